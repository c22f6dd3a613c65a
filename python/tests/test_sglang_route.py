"""How bootstrap ports are asked: which hosts, with TLS and tokens, and whatever they answer."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import pytest

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("aiohttp is not installed here: SGLang brings it, in the environment of `make e2e-sglang`", allow_module_level=True)

import kvconn
from kvconn.sglang.rooms import Inbox
from kvconn.sglang.route import _BATCH, Access, Engine, RouteError, Router


class Asker:
    def __init__(self, access: Access | None = None, prefill_key: str = "") -> None:
        self.inbox = Inbox()
        self.router = Router(self.inbox, access, prefill_key)
        self.answers: list[Any] = []

    def answer(self) -> Any:
        deadline = time.monotonic() + 60
        while not self.answers:
            if (call := self.inbox.take()) is not None:
                call(None)
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return self.answers.pop()

    def engine(self, address: str) -> Any:
        self.router.engine(address, self.answers.append)
        return self.answer()

    def told(self, address: str, room: int, rank: int) -> Any:
        self.router.tell_dp_rank(address, room, rank)
        self.router.dp_rank(address, room, self.answers.append)
        return self.answer()


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Gives each connection to serve."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_answer_that_comes_in_pieces() -> None:
    """A proxy between the two, or a slow network, cuts an answer up: TCP knows no messages."""
    text = json.dumps({"dp_size": 2, "page_size": 16}).encode()
    first = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text[:9])
        first.wait(0.2)  # nobody sets it
        connection.sendall(text[9:])

    with server(serve) as address:
        assert Asker().engine(address) == Engine(dp_size=2, page_size=16)


def test_answer_without_end() -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(4096)
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            for _ in range(64):
                connection.sendall(b"x" * (1 << 16))
        except OSError:
            return  # it has read enough

    with server(serve) as address:
        assert "more than 1048576 bytes" in str(Asker().engine(address))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_host_that_is_not_allowed_hears_nothing(host: str) -> None:
    heard: list[bytes] = []
    with server(lambda connection: heard.append(connection.recv(64))) as address:
        asker = Asker(Access({"bootstrap_allow": ["10.0.0.0/8"]}, own=False))
        answer = asker.engine(f"{host}:{address.rpartition(':')[2]}")
        assert isinstance(answer, RouteError) and "bootstrap_allow" in str(answer), answer
    assert not heard


@pytest.mark.parametrize("host", ["169.254.169.254", "user:pass@127.0.0.1", "127.0.0.1/admin?x=", "2852039166"])
def test_host_that_nobody_may_name(host: str) -> None:
    answer = Asker().engine(f"{host}:80")
    assert isinstance(answer, RouteError) and "is refused" in str(answer), answer


def test_token_of_the_own_port() -> None:
    token = "a-token-of-some-length-0123456789"
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "nats_token": token})
    try:
        assert Asker(Access({"nats_token": token}, own=True)).told(host.bootstrap_address.removeprefix("http://"), 4711, 1) == 1
    finally:
        host.close()


@pytest.mark.parametrize(
    ("config", "own", "address", "shown"),
    [
        ({}, True, "127.0.0.1:1", True),
        ({}, True, "[::1]:1", True),
        ({}, True, "10.0.0.7:1", False),  # others could read it
        ({"tls_ca_file": "ca"}, True, "10.0.0.7:1", True),
        ({"tls_ca_file": "ca"}, False, "127.0.0.1:1", False),  # a host that a request names
    ],
)
def test_who_sees_the_token(config: dict[str, Any], own: bool, address: str, shown: bool) -> None:
    access = Access({"nats_token": "secret", **config}, own=own)
    assert access.headers(address) == ({"Authorization": "Bearer secret"} if shown else {})


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Any) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    ask = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=x"]
    subprocess.run([*ask, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    config = {"tls_cert_file": cert, "tls_key_file": key, "tls_ca_file": cert}
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0, **config})
    try:
        address = host.bootstrap_address.removeprefix("https://")
        assert Asker(Access(config, own=True)).told(address, 4711, 1) == 1
        known = Asker(Access({"tls_ca_file": cert}, own=False))
        known.router.dp_rank(address, 4711, known.answers.append)
        assert known.answer() == 1
    finally:
        host.close()


def test_burst_of_rooms_is_a_few_questions() -> None:
    """Thousands of requests at once, which prefill names a little later."""
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    asked = 0
    try:
        address = host.bootstrap_address.removeprefix("http://")
        d, p = Asker(), Asker(Access({}, own=True))
        request = d.router._request

        async def counted(*what: Any) -> Any:
            nonlocal asked
            asked += 1
            return await request(*what)

        d.router._request = counted  # type: ignore[method-assign]
        got: dict[int, Any] = {}
        for room in range(3000):
            d.router.dp_rank(address, room, lambda rank, room=room: got.update({room: rank}))
        for room in range(3000):
            p.router.tell_dp_rank(address, room, room % 7)
        deadline = time.monotonic() + 60
        while len(got) < 3000:
            for side in (d, p):
                while (call := side.inbox.take()) is not None:
                    call(None)
            assert time.monotonic() < deadline, len(got)
            time.sleep(0.001)
        assert got == {room: room % 7 for room in range(3000)}
        assert asked < 3000, asked
        while d.router._asking or p.router._telling or any((d.router._under_way | p.router._under_way).values()):
            for side in (d, p):
                while (call := side.inbox.take()) is not None:
                    call(None)
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        host.close()
    d.router.dp_rank(address, 1, d.answers.append)
    assert "does not say which" in str(d.answer()) and not d.router._asking.get(address)


def test_longest_question_is_read() -> None:
    host = kvconn.Agent({"role": "bootstrap", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    try:
        asker = Asker()
        asked = asker.router._request(
            "POST", host.bootstrap_address.removeprefix("http://"), "/query_dp_ranks", {"bootstrap_rooms": [2**63 - 1] * _BATCH}
        )
        asker.router._start(asked, asker.answers.append)
        assert asker.answer() == (200, {})
    finally:
        host.close()


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize(
    ("status", "says"), [("200 OK", ""), ("401 Unauthorized", "it answers 401: no key (KVCONN_SGLANG_PREFILL_API_KEY")]
)
def test_prefill_again(status: str, says: str, key: str) -> None:
    """A prefill server is asked by its own API, once. If that fails, the error says why."""
    heard: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        said = b""
        while b"}" not in said:
            said += connection.recv(65536)
        heard.append(said)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 6\r\n\r\nno key".encode())

    asker = Asker(prefill_key=key)
    with server(serve) as address:
        asker.router.prefill_again(address, {"rid": "r"}, 20, asker.answers.append)
        answer = asker.answer()
    assert says in str(answer) if says else answer is None, answer
    assert len(heard) == 1 and heard[0].startswith(b"POST /generate ") and heard[0].endswith(b'{"rid": "r"}')
    assert (b"Authorization: Bearer secret" in heard[0]) == bool(key) and "secret" not in str(answer)


@pytest.mark.parametrize(
    ("access", "says"),
    [
        (Access({}, own=False), "asked to compute a retracted request again: "),
        (Access({"bootstrap_allow": ["10.0.0.0/8"]}, own=False), "bootstrap_allow says which hosts may be contacted"),
    ],
)
def test_prefill_again_where_nobody_may_or_does_answer(access: Access, says: str) -> None:
    asker = Asker(access)
    asker.router.prefill_again("127.0.0.1:1", {"rid": "r"}, 20, asker.answers.append)
    assert says in str(asker.answer())
