"""A small HTTP server for the tests' own routers: what stands between a client and engines, and decides what each is sent."""

from __future__ import annotations

import http.client
import json
import sys
import urllib.parse
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
PIECE = 1 << 16
Fields = list[tuple[str, str]]  # of a header: a name may come twice
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
HOP_BY_HOP = ("connection", "content-length", "host", "transfer-encoding")


class Answer:
    """An engine's answer, whose body may still be coming, or the router's own."""

    def __init__(self, status: int, kind: str, body: Iterable[bytes]) -> None:
        self.status, self.kind, self.body = status, kind, body

    def whole(self) -> bytes:
        self.body = [b"".join(self.body)]
        return self.body[0]

    @classmethod
    def of_json(cls, status: int, value: Any) -> Answer:
        return cls(status, "application/json", [json.dumps(value).encode()])


def send(url: str, path: str, fields: Fields, body: bytes, method: str = "POST") -> Answer:
    """Asks an engine, and comes back with the first bytes of its answer."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or HOST, parts.port)
    connection.putrequest(method, path)
    for name, value in fields:
        if name.lower() not in HOP_BY_HOP:
            connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    came = connection.getresponse()

    def pieces() -> Iterable[bytes]:
        with came:
            while piece := came.read1(PIECE):
                yield piece
        connection.close()

    return Answer(came.status, came.headers.get("Content-Type", ""), pieces())


def serve(port: int, complete: Callable[[str, Fields, bytes], Answer], decode: str) -> None:
    """Answers /health, completions by complete, and all else by the decode server. What complete raises is a 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/health":
                self._relay(Answer(200, "text/plain", []))
            else:
                self._relay(send(decode, self.path, self.headers.items(), b"", "GET"))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fields = self.headers.items()
            try:
                answer = complete(self.path, fields, body) if self.path in COMPLETIONS else send(decode, self.path, fields, body)
            except Exception as error:
                print(f"{self.path}: {error!r}", file=sys.stderr, flush=True)
                answer = Answer.of_json(500, {"error": {"message": f"{type(error).__name__}: {error}"}})
            self._relay(answer)

        def _relay(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.end_headers()
            for piece in answer.body:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, text: str, *values: Any) -> None:
            print(text % values, file=sys.stderr, flush=True)

    ThreadingHTTPServer((HOST, port), Handler).serve_forever()
