#!/usr/bin/env python3
"""Runs the commands of a page as they stand: all blocks of bash below a heading, in one bash, in the current directory.

    scripts/run-page.py PAGE HEADING [--within SECONDS] [--between COMMAND] [--says PATTERN]...

Blocks of Python with a title are first written to files of that name. The commands fail as in `bash -e -o pipefail`. What they print
must have each of the patterns. Whatever they have started ends with them. --between runs a command of the caller's between two blocks.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


def below(text: str, heading: str) -> str:
    """The part of a page below a heading, with those of lower levels; all of it for an empty heading."""
    if not heading:
        return text
    begin = re.search(rf"^(#+) {re.escape(heading)}$", text, re.M)
    if begin is None:
        raise SystemExit(f"the page has no heading {heading!r}")
    rest = text[begin.end() :]
    end = re.search(rf"^#{{1,{len(begin[1])}}} ", re.sub(BLOCK, lambda m: re.sub(r"^#", " ", m[0], flags=re.M), rest), re.M)
    return rest[: end.start()] if end else rest


def blocks(text: str) -> tuple[list[str], dict[str, str]]:
    """The commands of each block of bash, and the files that blocks with a title are."""
    found = BLOCK.findall(text)
    return [code for kind, _, code in found if kind == "bash"], {title: code for _, title, code in found if title}


def _end(bash: subprocess.Popen[bytes]) -> None:
    """Ends what is left in the commands' session: asks first."""
    for number, bound_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(bash.pid, number)
        except ProcessLookupError:
            return
        until = time.monotonic() + bound_s
        while time.monotonic() < until and _lives(bash):
            time.sleep(0.05)


def _lives(bash: subprocess.Popen[bytes]) -> bool:
    bash.poll()  # a process that nobody has waited for is a part of its session still
    try:
        os.killpg(bash.pid, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("heading", help="'' for the whole page")
    parser.add_argument("--within", type=float, default=300, metavar="SECONDS", help="ends a hang")
    parser.add_argument("--between", default="", metavar="COMMAND", help="for bash, between each block and the next")
    parser.add_argument("--says", action="append", default=[], metavar="PATTERN", help="a regular expression that the output must have")
    args = parser.parse_args()
    text = args.page.read_text(encoding="utf-8")
    commands, _ = blocks(below(text, args.heading))
    if not commands:
        raise SystemExit(f"{args.page}: no commands below {args.heading!r}")
    for name, code in blocks(text)[1].items():
        if Path(name).name != name:
            raise SystemExit(f"{args.page}: the title {name!r} is no name of a file")
        Path(name).write_text(code, encoding="utf-8")
    where = f"{args.page} {args.heading}".strip()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{where}: asked to end"))
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # a pipe would be open as long as what the commands start lives
        command = ["bash", "-e", "-o", "pipefail", "-c", f"\n{args.between}\n".join(commands)]
        bash = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        late = False
        try:
            bash.wait(args.within)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(bash)
        output.seek(0)
        said = output.read()
    print(said)
    if late:
        raise SystemExit(f"{where}: not over after {args.within:.0f} s")
    if bash.returncode:
        raise SystemExit(f"{where}: the commands end with {bash.returncode}")
    missing = [pattern for pattern in args.says if not re.search(pattern, said)]
    if missing:
        raise SystemExit(f"{where}: the output has no {' and no '.join(missing)}")
    print(f"{where}: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
