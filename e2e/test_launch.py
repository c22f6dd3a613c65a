"""The wheel's command as users start it: `launch` with real vLLM servers, and what a signal does to it and to `proxy`.

Nothing sleeps to let something happen: every wait polls for what it waits for, up to a bound.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import HOST, ask, open_stream, request, wait_until
from readme import alone_at, the_blocks
from servers import START_S, free_ports, leftovers
from vllm_pair import Pair

KVCONN = [sys.executable, "-m", "kvconn"]
PROMPTS = 6
# The router's grace and its end, each server's grace, and what is left of it after SIGKILL (launch.StopGrace and others), twice.
END_S = 2 * (2 + 3 + 15 + 10)


# -- launch -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make(tmp_path_factory.mktemp("launch") / "model")


# What the page's command has by default, and what its one machine needs beside: servers that do not wait for each other in loops.
PAGE, PORTS = "docs/quickstart-vllm.md", (8000, 8010, 8020, 8998)
VLLM = f'#!/bin/sh\nexec {Path(sys.executable).parent}/vllm "$@" --distributed-executor-backend uni\n'


class Launch:
    """`kvconn launch` with a prefill and a decode server. block: a page's commands, in place of ours."""

    def __init__(self, model: Path, workdir: Path, *options: str, block: str = "") -> None:
        # Never started: it says what the tiny model's servers need on two cores, and marks what is started.
        pair = Pair(model, workdir)
        prefill, decode, bootstrap, router = free_ports(4)
        self.run, self.served, self.url = pair.run, pair.served, f"http://{HOST}:{router}"
        self.logs, self.said = workdir / "logs", workdir / "said"
        argv = [*KVCONN, "launch", str(model), "--vllm", str(Path(sys.executable).parent / "vllm"), "--log-dir", str(self.logs)]
        argv += ["--prefill-ports", str(prefill), "--decode-ports", str(decode), "--bootstrap-ports", str(bootstrap)]
        argv += ["--port", str(router), "--timeout", f"{START_S:.0f}s", "--failure-policy", "fail", *options]
        argv += ["--", "--served-model-name", pair.served, "--enforce-eager", "--max-model-len", "4096", "--dtype", "float32"]
        env = pair._env()
        if block:
            self.served, self.url, self.logs = "MODEL", f"http://{HOST}:{PORTS[0]}", workdir / "kvconn-logs"
            (workdir / "MODEL").symlink_to(model)
            (workdir / "bin").mkdir()
            (workdir / "bin" / "vllm").write_text(VLLM)
            (workdir / "bin" / "vllm").chmod(0o755)
            env["PATH"] = f"{workdir / 'bin'}:{Path(sys.executable).parent}:{env['PATH']}"
            argv = ["bash", "-e", "-c", f"trap : TERM  # it ends with the command\n{block}"]
        else:
            argv += pair._extra_args
        # No guard of ours: it would end processes that the launcher leaves behind, and the test must see those.
        with open(self.said, "wb") as out:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=workdir, start_new_session=True
            )

    def terminate(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)

    def output(self) -> str:
        return self.said.read_text(errors="replace")

    def ready(self) -> bool:
        assert self.process.poll() is None, self.output()
        return f"\nready: send requests to {self.url}/v1/completions\n" in self.output()

    def loads(self) -> list[dict[str, Any]]:
        """The finished loads that the decode server has logged."""
        lines = [line.partition("kvconn load ") for line in (self.logs / "decode-1.log").read_text(errors="replace").splitlines()]
        return [json.loads(text) for _, mark, text in lines if mark and text.endswith("}")]

    def ends(self, bound_s: float) -> int:
        """The exit status; nothing may be left from that moment on."""
        try:
            status = self.process.wait(bound_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the launcher has not ended after {bound_s:.0f} s\n{self.output()}")
        left = leftovers(self.run)
        assert not left, f"left behind: {left}\n{self.output()}"
        return status


@contextlib.contextmanager
def launched(model: Path, workdir: Path, *options: str, block: str = "") -> Iterator[Launch]:
    it = Launch(model, workdir, *options, block=block)
    try:
        yield it
    finally:
        for number, bound_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, 10)):
            if it.process.poll() is None:
                os.killpg(it.process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    it.process.wait(bound_s)
        for line in leftovers(it.run):  # after a failure
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)


def test_bench(model: Path, tmp_path: Path) -> None:
    wants = f"--num-prompts {PROMPTS} --random-input-len 100 --random-output-len 4 --request-rate inf"
    with launched(model, tmp_path, "--bench", "--bench-args", wants) as it:
        assert it.ends(2 * START_S) == 0, it.output()
        said = it.output()
        assert f"\nready: send requests to {it.url}/v1/completions\n" in said
        table = said[said.index("Serving Benchmark Result") :]
        figures = {name: value.strip() for name, colon, value in (line.partition(":") for line in table.splitlines()) if colon}
        assert figures["Successful requests"] == str(PROMPTS), table
        assert figures["Failed requests"] == "0", table
        assert "Mean TTFT (ms)" in figures
        loads = it.loads()
        assert len(loads) >= PROMPTS, loads  # there may be requests before those of the table
        assert all(load["blocks"] > 0 and load["bytes"] > 0 for load in loads)


def test_page_s_command_and_sigterm(model: Path, tmp_path: Path) -> None:
    """The page's commands as they stand."""
    (block,) = the_blocks(PAGE, "One machine, one command")
    with alone_at(PORTS), launched(model, tmp_path, block=block) as it:
        wait_until("the servers and the router are ready", it.ready, 2 * START_S)
        body = {"model": it.served, "prompt": "the woods are lovely, dark and deep. " * 5, "max_tokens": 16, "temperature": 0}
        answer = ask(it.url, body)
        assert answer.ok, (answer, it.output())
        assert len(answer.text) == 16
        wait_until("the load's line in the decode server's log", lambda: bool(it.loads()))
        with open_stream(it.url, {**body, "max_tokens": 3500}) as connection:
            response = connection.getresponse()
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            it.terminate()
            assert it.ends(END_S) == 0, it.output()
            with contextlib.suppress(http.client.HTTPException, OSError):  # cut, or whole where two seconds are enough
                response.read()


# -- proxy --------------------------------------------------------------------------------------------------------------

EVENTS = [b'data: {"choices":[{"index":0,"text":" %d","finish_reason":%s}]}\n\n' % (n, end) for n, end in ((1, b"null"), (2, b'"length"'))]
EVENTS.append(b"data: [DONE]\n\n")


class Engine(BaseHTTPRequestHandler):
    """A prefill and a decode server in one; all but a stream's first event waits for the gate."""

    protocol_version = "HTTP/1.1"
    gate: threading.Event

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, kind: str, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_GET(self) -> None:
        self.answer("text/plain", 0)

    def do_POST(self) -> None:
        if not json.loads(self.rfile.read(int(self.headers["Content-Length"]))).get("stream"):
            text = b'{"choices":[{"index":0,"text":"","finish_reason":"length"}],"kv_transfer_params":{"do_remote_prefill":true}}'
            self.answer("application/json", len(text))
            self.wfile.write(text)
            return
        self.answer("text/event-stream", len(b"".join(EVENTS)))
        with contextlib.suppress(OSError):  # the router may be gone
            for event in EVENTS:
                self.wfile.write(event)
                self.gate.wait()


@contextlib.contextmanager
def proxy_in_an_answer(workdir: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, http.client.HTTPResponse, threading.Event]]:
    """`kvconn proxy`, a client that has the first event of its answer, and what lets the others come."""
    gate = threading.Event()
    engine = ThreadingHTTPServer((HOST, 0), type("AnEngine", (Engine,), {"gate": gate}))
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    engine_url, (port,) = f"http://{HOST}:{engine.server_port}", free_ports(1)
    argv = [*KVCONN, "proxy", "--contract", "nixl", "--prefill", engine_url, "--decode", engine_url, "--port", str(port)]
    url = f"http://{HOST}:{port}"
    with open(workdir / "proxy.log", "wb") as log:
        program = subprocess.Popen([*argv, "--drain-timeout", "600"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def ready() -> bool:
        assert program.poll() is None
        with contextlib.suppress(OSError):
            return request("GET", url + "/health", timeout_s=5)[0] == 200
        return False

    try:
        wait_until("the router is ready", ready, 60)
        with open_stream(url, {"model": "m", "prompt": "x"}) as connection:
            response = connection.getresponse()
            assert response.read(len(EVENTS[0])) == EVENTS[0]
            yield program, url, response, gate
    finally:
        gate.set()
        program.kill()
        program.wait()
        engine.shutdown()
        engine.server_close()


def drain(program: subprocess.Popen[bytes], url: str, number: signal.Signals) -> None:
    program.send_signal(number)

    def refused() -> bool:
        try:
            socket.create_connection((HOST, int(url.rpartition(":")[2])), timeout=5).close()
        except ConnectionRefusedError:
            return True
        except ConnectionResetError:  # it was not taken before the port was closed
            pass
        return False

    wait_until("new connections are refused", refused, 30)
    assert program.poll() is None, "the router ended with a request under way"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_proxy_drains(tmp_path: Path, number: signal.Signals) -> None:
    with proxy_in_an_answer(tmp_path) as (program, url, response, gate):
        drain(program, url, number)
        gate.set()
        assert EVENTS[0] + response.read() == b"".join(EVENTS)
        assert program.wait(30) == 0, (tmp_path / "proxy.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_proxy_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with proxy_in_an_answer(tmp_path) as (program, url, response, _):
        drain(program, url, number)

        def ended() -> bool:
            # Again and again: a signal that comes in the very moment of the first may be one with it.
            program.send_signal(number)
            return program.poll() is not None

        wait_until("the router ends", ended, 30)
        assert program.wait() == -number, (tmp_path / "proxy.log").read_text()
        with pytest.raises((http.client.HTTPException, OSError)):
            response.read()
