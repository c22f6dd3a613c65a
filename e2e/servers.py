"""Starts and stops the servers of the demo and the tests. Every server runs under a guard (guard.py)."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import warm
from asking import HOST, ServerError, request
from guard import descendants, signal_all

GUARD = Path(__file__).resolve().with_name("guard.py")
RUN_VARIABLE = warm.MARK  # by which a process that is left behind is found
PAGES = {29000, 30000, 30001}  # of what the pages start, which other tests leave alone

WORKERS = 8  # so many processes that run tests side by side have each their own ports

START_S = 300.0  # two engines on two cores, cold disk
STOP_S = 8.0


# A port is given once: between its choice and its server's start another call could choose it too.
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports that no process has now. No two are equal, and no earlier call of this process has returned them. Of processes that run tests
    side by side each has its share.

    The kernel gives higher ports to outgoing connections: such a connection could take a port before its server does.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = 10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS, min(ephemeral, 28_000)
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for tried in range(100 * count):
            each = held.enter_context(socket.socket())
            try:
                each.bind((HOST, random.randrange(low, high, WORKERS) if high > low and tried < 50 * count else 0))
            except OSError:
                continue
            port = each.getsockname()[1]
            if port in PAGES or port in _given:
                continue
            ports.append(port)
            if len(ports) == count:
                _given.update(ports)
                return ports
    raise OSError(f"{count} free ports were not found")


Progress = Callable[[str, float, str], None]


class Server:
    """A server process with everything it starts."""

    def __init__(self, name: str, argv: Sequence[str], env: dict[str, str], log_path: Path, url: str) -> None:
        self.name, self.argv, self.env, self.log_path, self.url = name, list(argv), env, log_path, url
        self.pid = 0
        self.started = 0.0
        self._guard: subprocess.Popen[bytes] | warm.Guard | None = None

    def start(self) -> None:
        if self.alive():
            raise ServerError(f"{self.name} runs already")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        with open(self.log_path, "ab") as log:
            log.write(f"\n=== {' '.join(self.argv)}\n".encode())
            log.flush()
            # The guard has a session of its own: a Ctrl-C at the terminal reaches this process, which then stops the guard.
            if warm.program(self.argv, self.env):
                self._guard = warm.fork(self.argv, self.env, STOP_S, log.fileno())
            else:
                self._guard = subprocess.Popen(
                    [sys.executable, str(GUARD), str(STOP_S), *self.argv],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self.env,
                    start_new_session=True,
                )
        assert self._guard.stdout is not None
        ready, _, _ = select.select([self._guard.stdout], [], [], 30)
        line = self._guard.stdout.readline() if ready else b""
        if not line.strip().isdigit():
            self.stop()
            raise ServerError(f"{self.name} could not be started: {self.argv[0]}\n{self.log_tail()}")
        self.pid = int(line)

    def alive(self) -> bool:
        return self._guard is not None and self._guard.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return f"(no log at {self.log_path})"
        return f"--- end of {self.log_path} ---\n" + "\n".join(text.splitlines()[-lines:])

    def log_size(self) -> int:
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def log_since(self, position: int) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(position)
            return log.read().decode(errors="replace")

    def healthy(self) -> bool:
        try:
            return request("GET", self.url + "/health", timeout_s=5)[0] == 200
        except OSError:
            return False

    def check_alive(self) -> None:
        if not self.alive():
            code = self._guard.returncode if self._guard else None
            raise ServerError(f"{self.name} has ended (exit code {code})\n{self.log_tail()}")

    def kill(self) -> None:
        """Sends SIGKILL to all of it at once, as when the machine dies; returns when nothing is left."""
        if self._guard is None:
            return
        signal_all(descendants(self._guard.pid), signal.SIGKILL)
        self._end(5)

    def kill_one(self, title: str) -> None:
        """Sends SIGKILL to the server's process with this title."""
        assert self._guard is not None
        found = []
        for pid in descendants(self._guard.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ") == title.encode():
                    found.append(pid)
        if len(found) != 1:
            raise ServerError(f"{self.name} has {len(found)} processes {title}")
        os.kill(found[0], signal.SIGKILL)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Sends SIGSTOP to all of it, as when a machine hangs; it goes on afterwards."""
        assert self._guard is not None
        pids = descendants(self._guard.pid)
        signal_all(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            signal_all(pids, signal.SIGCONT)

    def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL after a while; returns when nothing is left."""
        if self._guard is None:
            return
        self._end(STOP_S + 10)

    def _end(self, bound_s: float) -> None:
        guard = self._guard
        assert guard is not None
        for pipe in (guard.stdin, guard.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()  # the end of its standard input is what tells the guard to stop
        try:
            guard.wait(bound_s)
        except subprocess.TimeoutExpired:
            signal_all([*descendants(guard.pid), guard.pid], signal.SIGKILL)
            guard.wait(10)
        self._guard = None

    def ask_to_stop(self) -> None:
        """The first half of stop, so that several servers stop side by side."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()


def wait_ready(servers: Sequence[Server], bound_s: float = START_S, progress: Progress | None = None) -> None:
    """Waits until /health of every server says that it is ready."""
    waiting = list(servers)
    begin = said = time.monotonic()
    while waiting:
        for server in list(waiting):
            server.check_alive()
            if server.healthy():
                waiting.remove(server)
                if progress:
                    progress(server.name, time.monotonic() - begin, "ready")
        now = time.monotonic()
        if waiting and now - begin > bound_s:
            raise ServerError(f"{waiting[0].name} is not ready after {bound_s:.0f} s\n{waiting[0].log_tail()}")
        if waiting and progress and now - said > 5:
            said = now
            progress(waiting[0].name, now - begin, _last_words(waiting[0]))
        if waiting:
            time.sleep(0.25)


def _last_words(server: Server) -> str:
    for line in reversed(server.log_tail(20).splitlines()):
        _, found, text = line.partition("] ")
        if found and text.strip():
            return text.strip()[:90]
    return "starting"


def stop_all(servers: Sequence[Server]) -> None:
    for server in servers:
        server.ask_to_stop()
    for server in servers:
        server.stop()


def leftovers(run: str) -> list[str]:
    """The processes that carry this run's mark (guards and servers, and whatever they started)."""
    mark = f"{RUN_VARIABLE}={run}".encode()
    found: list[str] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") or warm.has_mark(entry, mark.decode()):
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{entry}: {command.strip()[:160]}")
    return found


@contextlib.contextmanager
def leaving_nothing(servers: Any) -> Iterator[None]:
    """Starts the servers and stops them. A process that is left behind then is a failure."""
    with servers:
        yield
    left = servers.leftovers()
    assert not left, f"left behind: {left}"
