#!/usr/bin/env python3
"""Runs one stage of the check: `scripts/stage.py NAME COMMAND…`, with the command's exit status.

Where KVCONN_CHECK names a folder, as .ci/run does, what the command prints is kept there in NAME.log, and `stages` gets a line
for it: name, exit status, seconds, seconds of processors that those of its processes used for which somebody waited, command.
scripts/digest.py reads both. Elsewhere the command runs as it is.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path


def follow(log: Path, child: subprocess.Popen[bytes]) -> int:
    """Passes on what the child writes into its log until the child has ended. A process that the child left behind holds nobody up."""
    with log.open("rb") as lines:
        while True:
            ended = child.poll()
            while piece := lines.read(1 << 16):
                sys.stdout.buffer.write(piece)
                sys.stdout.flush()
            if ended is not None:
                return 128 - ended if ended < 0 else ended  # as a shell says it of a signal
            time.sleep(0.2)


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    name, command = sys.argv[1], sys.argv[2:]
    folder = os.environ.get("KVCONN_CHECK")
    if not folder:
        os.execvp(command[0], command)
    print(f"== {name}: {shlex.join(command)}", flush=True)
    log, start = Path(folder, name + ".log"), time.monotonic()
    with log.open("ab") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    status = follow(log, child)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took, busy = round(time.monotonic() - start), round(used.ru_utime + used.ru_stime)
    with Path(folder, "stages").open("a", encoding="utf-8") as stages:
        print(name, status, took, busy, " ".join(shlex.join(command).split()), sep="\t", file=stages)
    return status


if __name__ == "__main__":
    sys.exit(main())
