"""The guard of a server: a small process between it and us.

The guard's standard input is a pipe. When the process that started it ends in any way, the pipe ends, and the guard knows. The guard
adopts the processes that its server leaves behind, and ends only when none of them is alive: to wait for the guard is to wait for all.

    guard.py STOP_S COMMAND…        the server's pid is the first line of standard output, and its status is this one's
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name is in parentheses and may hold anything: the parent is the second field after the last one.
                stat = Path(f"/proc/{entry}/stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for child in list(found):
        found.extend(descendants(child))
    return found


def signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def in_child() -> None:
    """Before a server's own code: a session of its own, which ends with the guard."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


class Child(Protocol):
    """The server, as far as subprocess.Popen is used."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


def guard(start: Callable[[], Child], stop_s: float) -> int:
    """Starts the server and stays until it and all that it leaves have ended; returns its status as a shell says it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A pipe wakes the select below when a child ends or we are asked to stop.
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = start()
    os.write(1, f"{child.pid}\n".encode())

    waiting = [wake_r, 0]
    while child.poll() is None and not asked:
        ready, _, _ = select.select(waiting, [], [])
        if wake_r in ready:
            os.read(wake_r, 4096)
        if 0 in ready and not os.read(0, 4096):
            asked.append(True)  # the process that started this one is gone, or has asked for the end

    if child.poll() is None:
        for ask in (os.killpg, os.kill):  # one that was just forked is not in a group of its own yet
            with contextlib.suppress(ProcessLookupError):
                ask(child.pid, signal.SIGTERM)
                break
        deadline = time.monotonic() + stop_s
        while child.poll() is None and time.monotonic() < deadline:
            select.select([wake_r], [], [], max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(BlockingIOError):
                os.set_blocking(wake_r, False)
                os.read(wake_r, 4096)
    # Processes that the server did not end itself get no second chance.
    while True:
        left = descendants(os.getpid())
        if not left:
            break
        signal_all(left, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                if pid == child.pid and child.returncode is None:
                    child.returncode = os.waitstatus_to_exitcode(status)
                pid, status = os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)  # a process just killed needs a moment, and may have forked before
    code = child.returncode if child.returncode is not None else 1
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    command = sys.argv[2:]
    server = lambda: subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, preexec_fn=in_child)  # noqa: E731
    raise SystemExit(guard(server, float(sys.argv[1])))
