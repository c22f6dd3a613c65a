"""A pair of vLLM servers with the router before them."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asking import HOST, ServerError, ask
from servers import RUN_VARIABLE, Progress, Server, free_ports, leftovers, stop_all, wait_ready

HERE = Path(__file__).resolve().parent

# What a configuration says that was made for another connector, with the one key by which kvconn serves in its place. For
# MooncakeConnector it is the variable KVCONN_SERVES, so that nothing is added.
THEIRS: dict[str, dict[str, Any]] = {
    "NixlConnector": {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvconn.vllm",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 4, "kv_lease_duration": 30},
    },
    "NixlPushConnector": {
        "kv_connector": "NixlPushConnector",
        "kv_connector_module_path": "kvconn.vllm",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"push_registration_timeout": 60},
    },
    "MooncakeConnector": {
        "kv_connector": "MooncakeConnector",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 10},
    },
}


def environment(run: str) -> dict[str, str]:
    """What a server of vLLM on a CPU gets, with the mark of a run."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        RUN_VARIABLE: run,
    }


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
        decode_model: Path | None = None,
        connector: str | None = None,
        transfer: dict[str, Any] | None = None,
        written_for: str | None = None,
        forked: bool = False,
    ) -> None:
        self._forked = forked  # see forked_vllm.py
        self._written_for = written_for  # a connector of THEIRS: the servers are configured as its documentation has it
        self._beside = beside  # another connector, with which ours shares a MultiConnector
        self.model, self.workdir, self.python = str(model), workdir, python
        self._decode_model, self._connector, self._transfer = str(decode_model or model), connector, dict(transfer or {})
        self.served = "tiny"
        self.run = uuid.uuid4().hex
        # In bfloat16 the tiny model's logits tie so often that one engine alone contradicts itself: of 50 prompts, 9 get
        # another text when their prefix comes from the engine's own cache. In float32 none does.
        self._dtype = dtype
        self._failure_policy, self._max_model_len = failure_policy, max_model_len
        # By which its loads are to go. If nobody has said it, local: both servers are on this host.
        said = [config["transport"] for config in (prefill_config, decode_config) if config and config.get("transport", "auto") != "auto"]
        self.transport = "tcp" if written_for == "MooncakeConnector" else said[0] if said else "local"
        self._extra_args, self._extra_env = list(extra_args), dict(extra_env or {})
        if executor == "uni":
            # The worker runs in the engine's own process, as vLLM does it with one GPU. With vLLM's default on CPU ("mp")
            # engine and worker wait for each other in sched_yield loops. On two cores the four loops of a pair now and then
            # take the processor from the forward pass for up to a second: time to first token would measure little else.
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
        return {**environment(self.run), "OMP_NUM_THREADS": "1", **self._extra_env}

    def _engine(self, name: str, served_at: int, role: str, config: dict[str, Any], more: Sequence[str] = ()) -> Server:
        transfer = {
            "kv_connector": "KVConnConnector",
            "kv_connector_module_path": self._connector,
            "kv_role": role,
            "kv_load_failure_policy": self._failure_policy,
            "kv_connector_extra_config": {"advertise_host": HOST, "bootstrap_host": HOST, **config},
            **self._transfer,
        }
        if self._connector is None:
            del transfer["kv_connector_module_path"]  # vLLM knows the name by kvconn's entry point
        env = self._env()
        if self._written_for:
            extra, transfer = transfer["kv_connector_extra_config"], {**THEIRS[self._written_for], "kv_role": role, **self._transfer}
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
            if port := extra.get("bootstrap_port"):
                env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
        if self._beside is not None:
            members = [{key: transfer[key] for key in transfer if key != "kv_load_failure_policy"}, self._beside]
            transfer = {
                "kv_connector": "MultiConnector",
                "kv_role": role,
                "kv_load_failure_policy": self._failure_policy,
                "kv_connector_extra_config": {"connectors": members},
            }
        command = HERE / "forked_vllm.py" if self._forked else Path(self.python).parent / "vllm"
        argv = [self.python, str(command)] if command.exists() else [self.python, "-m", "vllm.entrypoints.cli.main"]
        argv += [
            "serve",
            self.model if name == "prefill" else self._decode_model,
            "--served-model-name",
            self.served,
            "--host",
            HOST,
            "--port",
            str(served_at),
        ]
        argv += ["--enforce-eager", "--max-model-len", str(self._max_model_len), "--dtype", self._dtype]
        argv += ["--kv-transfer-config", json.dumps(transfer), *self._extra_args, *more]
        return Server(name, argv, env, self.workdir / f"{name}.log", f"http://{HOST}:{served_at}")

    def _router(self, name: str) -> Server:
        port = self._router_ports.pop()
        argv = [*self._router_argv, "--prefill", self.prefill.url, str(self.bootstrap_port), "--decode", self.decode.url]
        return Server(name, [*argv, "--port", str(port)], self._env(), self.workdir / f"{name}.log", f"http://{HOST}:{port}")

    def turned(self) -> Pair:
        """The same engines (kv_both) with their roles exchanged, and a router that is still to be started."""
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

    def loaded(self, position: int) -> list[dict[str, Any]]:
        """loads, of which each must have gone by this pair's transport, from the moment on when its rank and its prefill engine
        have met over it. On a busy machine the first few may have gone by another: a load waits two seconds for a meeting."""
        loads, all_loads = self.loads(position), self.loads()
        first = all_loads.index(loads[0]) if loads else 0
        for rank, engine in {(load["rank"], load["engine_id"]) for load in loads}:
            of_both = [n for n, load in enumerate(all_loads) if (load["rank"], load["engine_id"]) == (rank, engine)]
            ways = [all_loads[n]["transport"] for n in of_both]
            met = ways.index(self.transport) if self.transport in ways else len(ways)
            astray = [all_loads[n] for n in of_both[met:] if n >= first and all_loads[n]["transport"] != self.transport]
            assert met <= 16 and not astray, (self.transport, rank, engine, ways, astray, self.decode.log_tail())
        return loads

    def loads(self, position: int = 0) -> list[dict[str, Any]]:
        """The finished loads that the decode server has logged since position (log_size)."""
        found: list[dict[str, Any]] = []
        for line in self.decode.log_since(position).splitlines():
            _, mark, text = line.partition("kvconn load ")
            if mark:
                with contextlib.suppress(ValueError):  # a line that is still being written
                    found.append(json.loads(text))
        return found
