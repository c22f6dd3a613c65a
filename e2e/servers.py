"""Starts and stops the servers of the demo and the tests, and talks to them.

Every server runs under a guard, a small process of its own (this file, started with --guard). The guard hears of our
end, however it comes, by the end of the pipe that is its standard input; it adopts whatever its server leaves behind;
and it ends only when nothing of that is alive any more. So there is one thing to wait for, and nothing to forget.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import http.client
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
HOST = "127.0.0.1"
RUN_VARIABLE = "KVCONN_E2E_RUN"  # marks every process of a run, so that one that is left behind can be found

START_S = 300.0  # two engines on two cores, cold disk
STOP_S = 8.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ServerError(RuntimeError):
    """A server did not do what it must; the message ends with the end of its log."""


# -- the guard ------------------------------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name is in parentheses and may hold anything: the parent is the second field after the last one.
                stat = Path(f"/proc/{entry}/stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry))
    return found


def _descendants(pid: int) -> list[int]:
    found = _children(pid)
    for child in list(found):
        found.extend(_descendants(child))
    return found


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _guard(argv: list[str], stop_s: float) -> int:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # A pipe wakes the select below when a child ends or we are asked to stop.
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    asked = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: asked.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)

    def in_child() -> None:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=2, stderr=2, preexec_fn=in_child)
    os.write(1, f"{child.pid}\n".encode())

    waiting = [wake_r, 0]
    while child.poll() is None and not asked:
        ready, _, _ = select.select(waiting, [], [])
        if wake_r in ready:
            os.read(wake_r, 4096)
        if 0 in ready and not os.read(0, 4096):
            asked.append(True)  # whoever started us is gone, or has said that it is enough

    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + stop_s
        while child.poll() is None and time.monotonic() < deadline:
            select.select([wake_r], [], [], max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(BlockingIOError):
                os.set_blocking(wake_r, False)
                os.read(wake_r, 4096)
    # What the server did not end itself gets no second chance.
    while True:
        left = _descendants(os.getpid())
        if not left:
            break
        _signal_all(left, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)
            while pid:
                if pid == child.pid and child.returncode is None:
                    child.returncode = os.waitstatus_to_exitcode(status)
                pid, status = os.waitpid(-1, os.WNOHANG)
        time.sleep(0.01)  # those just killed need a moment, and one of them may have forked meanwhile
    code = child.returncode if child.returncode is not None else 1
    return code if code >= 0 else 128 - code


# -- one server -----------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now; all are held until the last is found, so that no two are equal.

    They are below those that the kernel gives to outgoing connections, one of which could take a port before its server does.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for tried in range(100 * count):
            each = held.enter_context(socket.socket())
            try:
                each.bind((HOST, random.randrange(10_000, ephemeral) if ephemeral > 10_000 and tried < 50 * count else 0))
            except OSError:
                continue
            ports.append(each.getsockname()[1])
            if len(ports) == count:
                return ports
    raise OSError(f"{count} free ports were not found")


Progress = Callable[[str, float, str], None]


class Server:
    """A server process with everything it starts."""

    def __init__(self, name: str, argv: Sequence[str], env: dict[str, str], log_path: Path, url: str) -> None:
        self.name, self.argv, self.env, self.log_path, self.url = name, list(argv), env, log_path, url
        self.pid = 0
        self.started = 0.0
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self.alive():
            raise ServerError(f"{self.name} runs already")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        argv = [sys.executable, str(HERE), "--guard", str(STOP_S), *self.argv]
        with open(self.log_path, "ab") as log:
            log.write(f"\n=== {' '.join(self.argv)}\n".encode())
            log.flush()
            # A session of its own: a Ctrl-C at the terminal reaches us, and the guard by what we do then.
            self._guard = subprocess.Popen(
                argv,
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
        """SIGKILL for all of it, at once, as when the machine takes it away; returns when nothing is left."""
        if self._guard is None:
            return
        _signal_all(_descendants(self._guard.pid), signal.SIGKILL)
        self._end(5)

    def kill_one(self, title: str) -> None:
        """SIGKILL for the one of its processes whose title is this."""
        assert self._guard is not None
        found = []
        for pid in _descendants(self._guard.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().strip(b"\0 ") == title.encode():
                    found.append(pid)
        if len(found) != 1:
            raise ServerError(f"{self.name} has {len(found)} processes {title}")
        os.kill(found[0], signal.SIGKILL)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP for all of it, as of a machine that hangs; it goes on afterwards."""
        assert self._guard is not None
        pids = _descendants(self._guard.pid)
        _signal_all(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal_all(pids, signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after a while; returns when nothing is left."""
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
            _signal_all([*_descendants(guard.pid), guard.pid], signal.SIGKILL)
            guard.wait(10)
        self._guard = None

    def ask_to_stop(self) -> None:
        """The first half of stop, so that several servers stop side by side."""
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()


def wait_ready(servers: Sequence[Server], bound_s: float = START_S, progress: Progress | None = None) -> None:
    """Until /health of all of them says so."""
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
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{entry}: {command.strip()[:160]}")
    return found


@contextlib.contextmanager
def leaving_nothing(servers: Any) -> Iterator[None]:
    """Starts and stops them; what is left behind then is a failure."""
    with servers:
        yield
    left = servers.leftovers()
    assert not left, f"left behind: {left}"


# -- HTTP -----------------------------------------------------------------------------------------------------------


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
    """What a server made of a prompt."""

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


def ask(url: str, body: dict[str, Any], timeout_s: float = 120, chat: bool = False) -> Answer:
    """One completion (or chat completion), streamed if the body says so. Never raises for what the server answers."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = Answer()
    connection, _ = _connect(url, timeout_s)
    begin = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
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
    """Sends a request and leaves it to the caller when to hang up."""
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


def metric(url: str, name: str, absent: float | None = None, **labels: str) -> float:
    """The sum of a metric over the labels that are not named; a counter with labels of its own may not be there yet."""
    status, body = request("GET", url + "/metrics", timeout_s=10)
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


def wait_until(what: str, check: Callable[[], bool], bound_s: float, every_s: float = 0.1) -> float:
    """Polls check until it holds; returns how long that took."""
    begin = time.monotonic()
    while not check():
        if time.monotonic() - begin > bound_s:
            raise TimeoutError(f"{what}: not so after {bound_s:.0f} s")
        time.sleep(every_s)
    return time.monotonic() - begin


# -- the pair -------------------------------------------------------------------------------------------------------


# vLLM's processes import it anew, for 15 to 20 s each on two cores, where they are spawned (its default) and not forked.
FORKED = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}


class Pair:
    """A prefill server, a decode server and the router before them."""

    def __init__(
        self,
        model: Path,
        workdir: Path,
        *,
        python: str = sys.executable,
        failure_policy: str = "fail",
        max_model_len: int = 4096,
        prefill_config: dict[str, Any] | None = None,
        decode_config: dict[str, Any] | None = None,
        executor: str = "uni",
        dtype: str = "float32",
        extra_args: Sequence[str] = (),
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        extra_env: dict[str, str] | None = None,
        router_argv: Sequence[str] | None = None,
        progress: Progress | None = None,
        beside: dict[str, Any] | None = None,
        both: bool = False,
    ) -> None:
        self._beside = beside  # another connector, with which ours shares a MultiConnector
        self.model, self.workdir, self.python = str(model), workdir, python
        self.served = "tiny"
        self.run = uuid.uuid4().hex
        # In bfloat16 the tiny model's logits tie so often that one engine alone contradicts itself: of 50 prompts, 9 get
        # another text when their prefix comes from the engine's own cache. In float32 none does.
        self._dtype = dtype
        self._failure_policy, self._max_model_len = failure_policy, max_model_len
        self._extra_args, self._extra_env = list(extra_args), dict(extra_env or {})
        if executor == "uni":
            # The worker in the engine's own process, as vLLM does it with one GPU. With its default on CPU ("mp") both
            # wait for each other in sched_yield loops; on two cores the four loops of a pair take the processor from
            # the forward pass now and then, for up to a second, and time to first token measures little else.
            self._extra_args += ["--distributed-executor-backend", "uni"]
            self._extra_env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self._progress = progress
        prefill_port, decode_port, self.bootstrap_port, self._decode_bootstrap_port, *self._router_ports = free_ports(6)
        producer, consumer = ("kv_both", "kv_both") if both else ("kv_producer", "kv_consumer")
        self.prefill = self._engine(
            "prefill", prefill_port, producer, {"bootstrap_port": self.bootstrap_port, **(prefill_config or {})}, prefill_args
        )
        port = {"bootstrap_port": self._decode_bootstrap_port} if both else {}
        self.decode = self._engine("decode", decode_port, consumer, {**port, **(decode_config or {})}, decode_args)
        self._router_argv = list(router_argv or [python, "-m", "kvconn", "proxy"])
        self.router = self._router("router")

    @property
    def servers(self) -> list[Server]:
        return [self.router, self.prefill, self.decode]

    def _env(self) -> dict[str, str]:
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            RUN_VARIABLE: self.run,
        }
        env.update(self._extra_env)
        return env

    def _engine(self, name: str, port: int, role: str, config: dict[str, Any], more: Sequence[str] = ()) -> Server:
        transfer = {
            "kv_connector": "KVConnConnector",
            "kv_connector_module_path": "kvconn.vllm",
            "kv_role": role,
            "kv_load_failure_policy": self._failure_policy,
            "kv_connector_extra_config": {"advertise_host": HOST, "bootstrap_host": HOST, **config},
        }
        if self._beside is not None:
            members = [{key: transfer[key] for key in transfer if key != "kv_load_failure_policy"}, self._beside]
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": role,
                "kv_load_failure_policy": self._failure_policy,
                "kv_connector_extra_config": {"connectors": members},
            }
        command = Path(self.python).parent / "vllm"
        argv = [self.python, str(command)] if command.exists() else [self.python, "-m", "vllm.entrypoints.cli.main"]
        argv += ["serve", self.model, "--served-model-name", self.served, "--host", HOST, "--port", str(port)]
        argv += ["--enforce-eager", "--max-model-len", str(self._max_model_len), "--dtype", self._dtype]
        argv += ["--kv-transfer-config", json.dumps(transfer), *self._extra_args, *more]
        return Server(name, argv, self._env(), self.workdir / f"{name}.log", f"http://{HOST}:{port}")

    def _router(self, name: str) -> Server:
        port = self._router_ports.pop()
        argv = [*self._router_argv, "--prefill", self.prefill.url, str(self.bootstrap_port), "--decode", self.decode.url]
        return Server(name, [*argv, "--port", str(port)], self._env(), self.workdir / f"{name}.log", f"http://{HOST}:{port}")

    def turned(self) -> Pair:
        """The same engines, which are both, the other way round, with a router that is still to be started."""
        other = copy.copy(self)
        other.prefill, other.decode = self.decode, self.prefill
        other.bootstrap_port, other._decode_bootstrap_port = self._decode_bootstrap_port, self.bootstrap_port
        other.router = other._router("router-turned")
        return other

    def __enter__(self) -> Pair:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        for server in self.servers:
            server.start()
        wait_ready(self.servers, progress=self._progress)
        for server in (self.prefill, self.decode):
            self.warm(server)

    def warm(self, server: Server) -> None:
        # A CPU engine whose first forward pass is a single token, as a decode engine's is, dies of SIGILL: its
        # attention kernel uses AMX, for which only the first large matrix product asks the kernel.
        body = {"model": self.served, "prompt": "warm " * 80 + self.run, "max_tokens": 4, "temperature": 0}
        answer = ask(server.url, body)
        server.check_alive()
        if not answer.ok:
            raise ServerError(f"{server.name} does not answer: {answer.error}\n{server.log_tail()}")

    def stop(self) -> None:
        stop_all(self.servers)

    def leftovers(self) -> list[str]:
        return leftovers(self.run)

    def kill_prefill(self) -> None:
        self.prefill.kill()

    def restart_prefill(self) -> None:
        """The same address, another process and engine id."""
        self.prefill.start()
        wait_ready([self.prefill], progress=self._progress)
        self.warm(self.prefill)

    def loads(self, position: int = 0) -> list[dict[str, Any]]:
        """The finished loads that the decode server has logged since position (log_size)."""
        found: list[dict[str, Any]] = []
        for line in self.decode.log_since(position).splitlines():
            _, mark, text = line.partition("kvconn load ")
            if mark:
                with contextlib.suppress(ValueError):  # a line that is still being written
                    found.append(json.loads(text))
        return found


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] != "--guard":
        raise SystemExit("this is a module; --guard is for itself")
    raise SystemExit(_guard(sys.argv[3:], float(sys.argv[2])))
