"""SGLang servers without a GPU: one alone, and a prefill/decode pair that a client asks as SGLang's routers do."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from asking import HOST, ServerError, ask
from servers import RUN_VARIABLE, Server, free_ports, leftovers, stop_all, wait_ready

CONTEXT = 2048  # tokens, of a request
POOL = 4096  # tokens, of the KV cache
# The settings with which SGLang serves on a CPU; see e2e/sgl_kernel.py for the one that is missing.
ON_CPU = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --cuda-graph-backend-decode disabled "
    "--cuda-graph-backend-prefill disabled --disable-overlap-schedule --disable-custom-all-reduce --grammar-backend none "
    # An engine that has nothing to do at all sleeps until a request comes, and leaves the processor to others.
    "--sleep-on-idle "
    f"--skip-server-warmup --max-running-requests 8 --context-length {CONTEXT} --max-total-tokens {POOL} --mem-fraction-static 0.3"
).split()


@dataclass
class Reply:
    """A server's answer to a request."""

    ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    status: int = 0
    error: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and bool(self.finish) and self.finish["type"] in ("length", "stop")  # type: ignore[index]


def post(url: str, body: dict[str, Any], timeout_s: float = 180, hang_up_s: float | None = None) -> Reply:
    """A request to /generate, streamed if the body says so; hang_up_s: the client goes away after that long."""
    reply = Reply()
    parts = urllib.parse.urlsplit(url)
    connection = HTTPConnection(parts.hostname or HOST, parts.port, timeout=timeout_s if hang_up_s is None else max(hang_up_s, 0.001))
    began = time.monotonic()
    try:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        if hang_up_s is not None and connection.sock is not None:
            connection.sock.settimeout(max(hang_up_s, 0.001))
        answer = connection.getresponse()
        reply.status = answer.status
        if reply.status != 200:
            reply.error = answer.read().decode(errors="replace")
        elif body.get("stream"):
            for line in answer:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                _take(reply, json.loads(line[6:]), began)
        else:
            _take(reply, json.loads(answer.read()), began)
    except (OSError, HTTPException, ValueError) as error:
        reply.error = reply.error or repr(error)
    finally:
        reply.total_s = time.monotonic() - began
        connection.close()
    return reply


def _take(reply: Reply, said: dict[str, Any], began: float) -> None:
    if "error" in said:
        reply.error = json.dumps(said["error"])
        return
    if said.get("output_ids") and not reply.ttft_s:
        reply.ttft_s = time.monotonic() - began
    reply.ids = said.get("output_ids", reply.ids)
    reply.finish = said["meta_info"]["finish_reason"]
    if reply.finish and reply.finish["type"] == "abort":
        reply.error = reply.finish.get("message") or "aborted"


def plugin(where: Path, code: str) -> dict[str, str]:
    """The environment in which SGLang finds a plugin: code with a function register, for the CPU's sake only."""
    described = where / "on_cpu-0.dist-info"
    described.mkdir(parents=True)
    (where / "on_cpu.py").write_text(code)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: on_cpu\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[sglang.srt.plugins]\non_cpu = on_cpu:register\n")
    return {"PYTHONPATH": os.pathsep.join([str(where), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


class Engines:
    """Some servers of one model."""

    def __init__(
        self, model: Path, workdir: Path, *, dtype: str = "float32", extra_env: dict[str, str] | None = None, forked: bool = True
    ) -> None:
        self._program = [str(Path(__file__).with_name("forked_sglang.py"))] if forked else ["-m", "sglang.launch_server"]
        self.model, self.workdir = str(model), workdir
        self.run = uuid.uuid4().hex
        self.dtype = dtype
        self.extra_env = dict(extra_env or {})
        self.servers: list[Server] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": "1",
            # SGLang wants a NUMA node for each rank of a CPU, or to be told its cores: all of them, for up to four ranks.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(4 * [",".join(map(str, sorted(os.sched_getaffinity(0))))]),
            # Ranks would talk by NCCL where NCCL is installed. Without NCCL they talk by gloo, which sleeps while it waits.
            "SGLANG_NCCL_SO_PATH": "none",
            # Compiling what ranks do with their part of the vocabulary takes the first request half a minute.
            "TORCHDYNAMO_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
            RUN_VARIABLE: self.run,
            **self.extra_env,
        }

    def engine(self, name: str, port: int, *args: str) -> Server:
        argv = [sys.executable, *self._program, "--model-path", self.model, "--host", HOST, "--port", str(port)]
        argv += [*ON_CPU, "--dtype", self.dtype, *args]
        server = Server(name, argv, self.environment, self.workdir / f"{name}.log", f"http://{HOST}:{port}")
        self.servers.append(server)
        return server

    def __enter__(self) -> Any:
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
        self.ready()

    def ready(self) -> None:
        wait_ready(self.servers, progress=progress)

    def stop(self) -> None:
        stop_all(self.servers)

    def leftovers(self) -> list[str]:
        return leftovers(self.run)


def progress(name: str, seconds: float, text: str) -> None:
    print(f"  [{seconds:4.0f} s] {name}: {text}", file=sys.stderr, flush=True)


class Alone(Engines):
    """One server that prefills and decodes."""

    def __init__(self, model: Path, workdir: Path, *args: str, **more: Any) -> None:
        super().__init__(model, workdir, **more)
        self.server = self.engine("alone", free_ports(1)[0], *args)

    def ask(self, ids: list[int], max_tokens: int = 12) -> Reply:
        return post(self.server.url, generate(ids, max_tokens))

    def complete(self, body: dict[str, Any]) -> str:
        """The text of OpenAI's completion."""
        self.ready()
        answer = ask(self.server.url, {"model": self.model, **body})
        assert answer.ok, answer
        return answer.text


class SGLangPair(Engines):
    """A prefill and a decode server."""

    def __init__(
        self,
        model: Path,
        workdir: Path,
        *args: str,
        backend: str = "kvconn",
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        config: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(model, workdir, **more)
        self.extra_env.setdefault("KVCONN_SGLANG_CONFIG", json.dumps({"tcp_listen_host": HOST, **(config or {})}))
        prefill, decode, self.bootstrap_port = free_ports(3)
        shared = ["--disaggregation-transfer-backend", backend, "--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        # Retraction to pinned memory wants CUDA.
        shared += ["--disaggregation-decode-retraction-backup", "cpu_tensor", *args]
        self.shared = shared
        self.prefill = self.engine("prefill", prefill, "--disaggregation-mode", "prefill", *shared)
        self.decode = self.engine("decode", decode, "--disaggregation-mode", "decode", *shared)
        self._alike = {server.name: server.argv for server in self.servers}
        self.become(self.prefill, *prefill_args)
        self.become(self.decode, *decode_args)

    def become(self, server: Server, *args: str) -> None:
        """Sets other arguments for the server's next start, at the same ports."""
        server.argv = [*self._alike[server.name], *args]

    def up(self, prefill: str, decode: str, *others: Server) -> None:
        """Has servers with these arguments up. A server that is up with them already stays."""
        replaced = []
        for server, args in ((self.prefill, prefill), (self.decode, decode)):
            was = server.argv
            self.become(server, *args.split())
            if not server.alive() or server.argv != was:
                replaced.append(server)
        stop_all(replaced)
        for server in replaced:
            server.start()
        wait_ready([*others, *self.servers], progress=progress)

    def body(self, ids: list[int], max_tokens: int = 12, room: Any = None, **more: Any) -> dict[str, Any]:
        fields = {
            "bootstrap_host": HOST,
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": random.getrandbits(62) if room is None else room,
        }
        return {**generate(ids, max_tokens), **fields, **more}

    def ask(self, ids: list[int], max_tokens: int = 12, **more: Any) -> Reply:
        """The decode server's answer. The same request goes to both servers at once."""
        return self.ask_both(self.body(ids, max_tokens, **more))[1]

    def ask_both(
        self, body: dict[str, Any], timeout_s: float = 180, hang_up_s: tuple[float | None, float | None] = (None, None)
    ) -> tuple[Reply, Reply]:
        replies: list[Reply] = []
        prefill = threading.Thread(target=lambda: replies.append(post(self.prefill.url, body, timeout_s, hang_up_s[0])))
        prefill.start()
        decode = post(self.decode.url, body, timeout_s, hang_up_s[1])
        prefill.join()
        return replies[0], decode

    def ask_many(self, prompts: Sequence[list[int]], max_tokens: int = 12, at_once: int = 8) -> list[Reply]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda ids: self.ask(ids, max_tokens), prompts))

    def ways(self) -> set[str]:
        """The transports by which the decode server's agent says that its pairs go."""
        return set(re.findall(r"pair (?:goes over|goes on over|is back on) (\w+)", self.decode.log_since(0)))

    def check_decode(self) -> None:
        self.check([self.decode])

    def check(self, servers: Sequence[Server] = ()) -> None:
        for server in servers or self.servers:
            try:
                server.check_alive()
            except ServerError as error:
                raise AssertionError(str(error)) from None


def generate(ids: list[int], max_tokens: int) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}}


def prompt(tokens: int, seed: Any) -> list[int]:
    """Tokens of the tiny model's vocabulary that no cache has seen, unless the seed was used before."""
    chosen = random.Random(f"{tokens} {seed}")
    return [chosen.randrange(20, 200) for _ in range(tokens)]
