"""The processes: two engines by app.py, and kvconn's router before them."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

WAIT = 20  # seconds, for anything that a process is asked
HERE = Path(__file__).parent


def listening() -> socket.socket:
    s = socket.socket()
    s.bind(("127.0.0.1", 0))
    s.listen(128)
    s.set_inheritable(True)
    return s


class Engines:
    """A prefill and a decode server, and what they say that they have read."""

    def __init__(self, python: str):
        sockets = [listening(), listening()]
        self.prefill, self.decode = (s.getsockname()[1] for s in sockets)
        fds = [s.fileno() for s in sockets]
        command = [python, "-W", "ignore", str(HERE / "app.py"), *map(str, fds)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds, text=True)
        for s in sockets:
            s.close()
        self.lines: list[dict] = []
        self.marks = 0
        self.marked = threading.Condition()
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self) -> None:
        for line in self.process.stdout:
            with self.marked:
                self.lines.append(json.loads(line))
                self.marked.notify_all()

    def taken(self) -> list[dict]:
        """All that was read until now by requests that have been answered."""
        self.marks += 1
        for port in (self.prefill, self.decode):
            status, _ = send(port, f"POST /mark/{self.marks} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n".encode())
            if status != 200:
                raise SystemExit(f"referee: the engines' process does not answer: {status}")
        mark = str(self.marks)
        with self.marked:
            if not self.marked.wait_for(lambda: sum(line.get("mark") == mark for line in self.lines) == 2, WAIT):
                raise SystemExit("referee: the engines' process does not tell what it has read")
            lines, self.lines = self.lines, []
        return [line for line in lines if "mark" not in line]

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(WAIT)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()


class Router:
    """`kvconn proxy` of one contract."""

    def __init__(self, kvconn: str, prefill: str, decode: int, *options: str):
        command = [
            kvconn,
            "proxy",
            "--port",
            "0",
            "--no-access-log",
            "--prefill",
            *prefill.split(),
            "--decode",
            f"http://127.0.0.1:{decode}",
        ]
        self.process = subprocess.Popen([*command, *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.port = 0
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"router is listening.*127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        if not self.port:
            raise SystemExit("referee: the router did not start: " + "".join(self.log))
        self.reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self.reader.start()

    def await_ready(self) -> None:
        """Waits until the router's own probes have found its engines."""
        until = time.monotonic() + WAIT
        while send(self.port, b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")[0] != 200:
            if time.monotonic() > until:
                raise SystemExit("referee: the router does not find its engines: " + "".join(self.log))
            time.sleep(0.05)

    def close(self) -> int:
        """Lets it end its requests; the status that it ends with."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(WAIT)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()


def send(port: int, raw: bytes) -> tuple[int, bytes]:
    """The answer to a request, whatever its bytes; the status is 0 where the connection ends without one."""
    with socket.create_connection(("127.0.0.1", port), WAIT) as s:
        with contextlib.suppress(OSError):  # the server has answered before it has read all
            s.sendall(raw)
        answer = http.client.HTTPResponse(s)
        try:
            answer.begin()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as e:
            if isinstance(e, TimeoutError):
                print(f"referee: no answer in {WAIT} s to {raw[:300]!r}", file=sys.stderr)
                raise
            return 0, b""
