"""Processes that have imported an engine, and fork its servers: to import vLLM or SGLang takes ten seconds of a processor.

Server.start (servers.py) starts what runs forked_vllm.py or forked_sglang.py this way, if OMP_NUM_THREADS is 1: the guard is a fork of
such a process, and the server is a fork of the guard. Tests whose servers start as users start them name neither file.

A fork gets an os.environ of its own, but libraries have read the one before it. So there is such a process for each environment, apart
from vLLM's own variables, which vLLM reads when it uses them. (SGLang reads some of its own when it is imported.) kvconn's library is
not loaded there: Go does not survive a fork.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from guard import guard, in_child

HERE = Path(__file__).resolve()
PROGRAMS = ("forked_vllm", "forked_sglang")
IMPORT_S = 180.0  # of an engine, cold disk
MOST = 2  # such processes at a time; each holds a gigabyte
MARK = "KVCONN_E2E_RUN"  # names the variable that marks every process of a run
MACHINE = "KVCONN_E2E_MACHINE"  # names the variable with the process in whose network and mounts a server begins, and its folder there
_NOT_READ_BEFORE = ("VLLM_", MARK, MACHINE, "KVCONN_SERVES", "PYTEST_")
_REQUEST = 1 << 20  # bytes; it names the whole environment


def program(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """Which of PROGRAMS a command runs, if it can be forked: a fork does not have the threads that PyTorch begins when it is loaded."""
    found = Path(argv[1]) if len(argv) > 1 else HERE
    ours = found.stem in PROGRAMS and found.parent == HERE.parent
    return found.stem if ours and env.get("OMP_NUM_THREADS") == "1" else None


class Guard:
    """A guard that was forked elsewhere, as far as Server uses subprocess.Popen."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], status: int) -> None:
        self.pid, self.stdin, self.stdout, self._status = pid, stdin, stdout, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("the guard", timeout)
        return code

    def _ended(self, within_s: float) -> int | None:
        # The guard alone has the pipe's other end. What it writes there is its status; one that was killed writes nothing.
        if self.returncode is None and select.select([self._status], [], [], within_s)[0]:
            said = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode


class _Warm:
    """One such process."""

    def __init__(self, name: str, python: str, env: dict[str, str]) -> None:
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST)
        self._socket.settimeout(IMPORT_S)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - end() closes it
        with its:
            # A session of its own, as a guard's. When this process ends, the socket does, and then the other; guards see to themselves.
            self._child = subprocess.Popen(
                [python, str(HERE), str(its.fileno()), name],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=env,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )

    def fork(self, argv: Sequence[str], env: Mapping[str, str], stop_s: float, log: int) -> Guard:
        request = json.dumps({"argv": list(argv), "env": dict(env), "stop_s": stop_s}).encode()
        with contextlib.ExitStack() as given:
            (stdin, its_stdin), (its_stdout, stdout), (its_status, status) = os.pipe(), os.pipe(), os.pipe()
            for end in (stdin, stdout, status):
                given.callback(os.close, end)
            try:
                fds = array.array("i", [stdin, stdout, log, status])
                self._socket.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
                said = self._socket.recv(64)
            except OSError:
                said = b""
        guard = Guard(int(said or 0), os.fdopen(its_stdin, "wb", 0), os.fdopen(its_stdout, "rb", 0), its_status)
        if not said:
            guard.stdin.close(), guard.stdout.close(), os.close(its_status)
            size = os.fstat(self._said.fileno()).st_size
            last = os.pread(self._said.fileno(), 2000, max(0, size - 2000)).decode(errors="replace")
            raise OSError(f"{argv[1]}: the process that forks its servers is gone: {last}")
        return guard

    def end(self) -> None:
        self._socket.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(10)
        self._said.close()


_all: dict[tuple[str, ...], _Warm] = {}  # the one used last is the last


def fork(argv: Sequence[str], env: Mapping[str, str], stop_s: float, log: int) -> Guard:
    """A guard with the server that argv names, as guard.py. The first in an environment takes an import longer."""
    name = program(argv, env)
    assert name is not None, argv
    before = {key: value for key, value in env.items() if not key.startswith(_NOT_READ_BEFORE)}
    key = (name, argv[0], *(f"{each}={before[each]}" for each in sorted(before)))
    warm = _all.pop(key, None) or _Warm(name, argv[0], before)
    try:
        guard = warm.fork(argv, env, stop_s, log)
    except BaseException:
        warm.end()
        raise
    _all[key] = warm
    while len(_all) > MOST:
        _all.pop(next(iter(_all))).end()
    return guard


def has_mark(pid: str, mark: str) -> bool:
    """A fork has in /proc the environment of the process that it is a fork of, without its own mark. So a file has it."""
    with contextlib.suppress(OSError):
        for fd in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(fd.path).startswith(f"/memfd:{mark}"):
                    return True
    return False


# -- the side of who forks them -------------------------------------------------------------------------------------


class _Forked:
    """A server that was forked, as far as guard() uses subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class _Is(BaseException):
    """Raised in a fork: what it is to run, when it has left the frames of what it was forked from."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run


def _forks(name: str, asked: socket.socket) -> None:
    """Forks a guard for each request. Returns when nobody can ask any more."""
    before = dict(os.environ)
    engine = importlib.import_module(name)
    engine.imports()
    threads = os.listdir("/proc/self/task")
    if "kvconn" in sys.modules or len(threads) > 1:
        raise ImportError(
            f"{name} cannot be forked: kvconn is {'' if 'kvconn' in sys.modules else 'not '}loaded, {len(threads)} threads run"
        )
    sys.path.remove(str(HERE.parent))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no guard that has ended waits here
    gc.freeze()
    while True:
        request, fds, _, _ = socket.recv_fds(asked, _REQUEST, 4)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            asked.close()
            raise _Is(functools.partial(_guards, engine, before, json.loads(request), *fds))
        for fd in fds:
            os.close(fd)
        asked.send(str(pid).encode())


def _guards(engine: ModuleType, before: dict[str, str], request: dict[str, Any], stdin: int, stdout: int, log: int, status: int) -> None:
    os.setsid()
    for fd, number in ((stdin, 0), (stdout, 1), (log, 2)):
        os.dup2(fd, number)
        os.close(fd)
    for key in before.keys() - request["env"].keys():  # what the imports have set stays
        os.environ.pop(key, None)
    os.environ.update(request["env"])
    mark = os.memfd_create(f"{MARK}={os.environ.get(MARK)}")  # see has_mark

    def start() -> _Forked:
        pid = os.fork()
        if pid == 0:
            raise _Is(functools.partial(_serves, engine, request["argv"], status))
        return _Forked(pid)

    code = 1
    try:
        code = guard(start, request["stop_s"])
    except _Is:
        raise
    except BaseException:
        traceback.print_exc()
    os.close(mark)  # who reads the status may look for what is left
    os.write(status, str(code).encode())
    os._exit(code)


def _enter(pid: str, folder: str) -> None:
    """A machine of machines.py."""
    for kind in ("net", "mnt"):
        fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"the {kind} of process {pid} could not be entered")
        os.close(fd)
    os.chdir(folder)


def _serves(engine: ModuleType, argv: list[str], status: int) -> None:
    os.close(status)
    signal.set_wakeup_fd(-1)
    if machine := os.environ.get(MACHINE):
        _enter(*machine.split(" ", 1))
    in_child()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.argv = argv[1:]
    engine.serve()


def main() -> None:
    run: Callable[[], object] = functools.partial(_forks, sys.argv[2], socket.socket(fileno=int(sys.argv[1])))
    while True:
        try:
            run()
            return
        except _Is as become:
            run = become.run


if __name__ == "__main__":
    main()
