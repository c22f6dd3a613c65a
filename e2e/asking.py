"""Asks servers: requests, streams, metrics."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"


class ServerError(RuntimeError):
    """A server did not do what it must; the message ends with the end of its log."""


# -- the guard ------------------------------------------------------------------------------------------------------


def _connect(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or HOST, parts.port, timeout=timeout_s)
    return connection, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def request(method: str, url: str, body: Any = None, timeout_s: float = 60, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection, path = _connect(url, timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {**({"Content-Type": "application/json"} if data else {}), **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {url}: {error!r}") from error
    finally:
        connection.close()


@dataclass
class Answer:
    """A server's answer to a prompt."""

    text: str = ""
    finish_reason: str | None = None
    chunks: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    status: int = 200
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    came: list[float] = field(default_factory=list, repr=False)  # when each chunk did, by time.monotonic

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and self.finish_reason in ("length", "stop")


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def ask(url: str, body: dict[str, Any], timeout_s: float = 120, chat: bool = False, headers: dict[str, str] | None = None) -> Answer:
    """One completion (or chat completion), streamed if the body says so. No answer of the server makes it raise."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = Answer()
    connection, _ = _connect(url, timeout_s)
    begin = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        answer.status = response.status
        if response.status != 200:
            answer.error = response.read().decode(errors="replace")[:500]
            return answer
        events = _events(response) if body.get("stream") else iter([json.loads(response.read())])
        for event in events:
            if "error" in event:
                answer.error = json.dumps(event["error"])[:500]
                break
            for choice in event.get("choices", []):
                part = choice.get("delta") or choice.get("message") or {}
                piece = (part.get("content") if chat else choice.get("text")) or ""
                answer.came.append(time.monotonic())
                if not answer.chunks:
                    # The first token, also when its bytes are no text yet.
                    answer.ttft_s = answer.came[0] - begin
                answer.text += piece
                answer.chunks += 1
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            answer.usage = event.get("usage") or answer.usage
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = answer.error or repr(error)
    finally:
        answer.total_s = time.monotonic() - begin
        connection.close()
    return answer


@contextlib.contextmanager
def open_stream(url: str, body: dict[str, Any], timeout_s: float = 60) -> Iterator[http.client.HTTPConnection]:
    """Sends a request. The caller decides when to hang up."""
    connection, _ = _connect(url, timeout_s)
    try:
        data = json.dumps({**body, "stream": True}).encode()
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        yield connection
    finally:
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()


def metric(url: str, name: str, /, absent: float | None = None, **labels: str) -> float:
    """The sum of a metric over the labels that are not named. A counter with labels may not be there yet: absent stands for it."""
    status, body = request("GET", url + "/metrics", timeout_s=60)  # it ends a hang
    if status != 200:
        raise ServerError(f"{url}/metrics answers {status}")
    lines = [line for line in body.decode().splitlines() if line.startswith((name + "{", name + " "))]
    named = [f'{key}="{value}"' for key, value in labels.items()]
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in named)]
    if not values:
        if absent is not None:
            return absent
        raise ServerError(f"{url}/metrics has no {name} {' '.join(named)}")
    return sum(values)


def wait_until(what: str, check: Callable[[], bool], bound_s: float = 60, every_s: float = 0.1) -> float:
    """Polls check until it holds; returns how long that took. The bound only ends a hang."""
    begin = time.monotonic()
    while not check():
        if time.monotonic() - begin > bound_s:
            raise TimeoutError(f"{what}: not so after {bound_s:.0f} s")
        time.sleep(every_s)
    return time.monotonic() - begin


def wait_idle(name: str, url: str, bound_s: float) -> None:
    """Waits until a vLLM server has no request, and no block of its cache in use."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_until(f"{name}: no request and no block in use", lambda: all(metric(url, f"vllm:{gauge}") == 0 for gauge in gauges), bound_s)
