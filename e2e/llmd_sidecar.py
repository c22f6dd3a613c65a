"""What llm-d's sidecar asks of prefill and decode servers, replayed; or the sidecar itself.

It comes as a container image and as Go source, neither of which these checks can download. If KVCONN_E2E_LLMD names its program,
that runs in the place of the replay, with the same tests (it listens at all addresses of the host):

    python e2e/llmd_sidecar.py --port PORT --decode URL --kv-connector nixlv2|mooncake|sglang [--bootstrap-port PORT]
    KVCONN_E2E_LLMD=/path/of/pd-sidecar pytest e2e/test_kinds.py -k llmd
    KVCONN_E2E_LLMD=/path/of/pd-sidecar pytest e2e/test_sglang_pages.py -k llmd

Read in llm-d/llm-d-router v0.10.0 (commit 71f4f0999f95), pkg/sidecar/proxy. No line of it is copied:

- chat_completions.go:63-222: the header x-prefiller-host-port names the prefill server, the first of a list. Without it decode gets the
  request as it is.
- connector_nixlv2.go:54-430: prefill first, with NIXL's parameters and all three limits at 1 (proxy.go:143). An error of prefill's is the
  client's answer. The answer's kv_transfer_params go to decode, or null where there are none. Both get a further X-Request-Id behind the
  client's own (:99, :305).
- connector_mooncake.go:40-248: both at once. /query is asked once for a prefill server, until the sidecar ends, or until 1024 others were
  asked since (an LRU, which is no LRU here). Prefill's answer is thrown away.
- connector_sglang.go:53-217: both at once, with a room that is the time in nanoseconds and up to 999 more.
- A body goes through Go's map[string]any: its numbers are float64 on the way, and its members come in the order of their names.

Left out: /v1/messages, /v1/responses and /inference/v1/generate, its change of an answer's cached_tokens, its retries (none by default, and
on the same server), TLS, chunked decode, data parallel ports, encoders, P2P pulls and MoRI-IO. They are of other
connectors, or change nothing that a connector sees.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
import uuid
from typing import Any

from small_router import HOST, Answer, Fields, send, serve

TO_PREFILL = "x-prefiller-host-port"
LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens")


def parsed(body: bytes) -> dict[str, Any]:
    return json.loads(body, parse_int=lambda digits: int(float(digits)))


def text(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


class Sidecar:
    def __init__(self, connector: str, decode: str, bootstrap_port: int) -> None:
        self._decode, self._bootstrap_port = decode, bootstrap_port
        self._by = {"nixlv2": self._nixlv2, "mooncake": self._mooncake, "sglang": self._sglang}[connector]
        self._engines: dict[str, dict[str, str]] = {}

    def complete(self, path: str, fields: Fields, body: bytes) -> Answer:
        names = [value for name, value in fields if name.lower() == TO_PREFILL]
        fields = [field for field in fields if field[0].lower() != TO_PREFILL]
        prefill = names[0].split(",")[0].strip() if names else ""
        if not prefill:
            return send(self._decode, path, fields, body)
        return self._by(prefill, path, fields, parsed(body))

    def _nixlv2(self, prefill: str, path: str, fields: Fields, asked: dict[str, Any]) -> Answer:
        fields = [*fields, ("X-Request-Id", str(uuid.uuid1()))]
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        params |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        first = {key: value for key, value in asked.items() if key != "stream_options"}
        first |= {"kv_transfer_params": params, "stream": False, **dict.fromkeys(LIMITS, 1)}
        answer = send(f"http://{prefill}", path, fields, text(first))
        if not 200 <= answer.status < 300:
            return answer
        said = parsed(answer.whole()).get("kv_transfer_params")
        return send(self._decode, path, fields, text({**asked, "kv_transfer_params": said}))

    def _mooncake(self, prefill: str, path: str, fields: Fields, asked: dict[str, Any]) -> Answer:
        address = f"http://{prefill.rpartition(':')[0]}:{self._bootstrap_port}"
        if prefill not in self._engines:
            ranks = json.loads(send(address, "/query", [], b"", "GET").whole())
            self._engines[prefill] = {rank: said["engine_id"] for rank, said in ranks.items()}
        rank, engine = random.choice(list(self._engines[prefill].items()))
        transfer = "xfer-" + str(uuid.uuid4())
        first = {key: value for key, value in asked.items() if key != "stream_options"} | {"max_tokens": 1, "stream": False}
        if "max_completion_tokens" in asked:
            first["max_completion_tokens"] = 1
        first["kv_transfer_params"] = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": transfer}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer}
        params |= {"remote_bootstrap_addr": address, "remote_engine_id": engine}
        second = {**asked, "kv_transfer_params": params}
        return self._both(prefill, path, (fields, second), ([*fields, ("X-data-parallel-rank", rank)], first))

    def _sglang(self, prefill: str, path: str, fields: Fields, asked: dict[str, Any]) -> Answer:
        asked |= {"bootstrap_host": prefill.rpartition(":")[0], "bootstrap_port": self._bootstrap_port}
        asked["bootstrap_room"] = time.time_ns() + random.randrange(1000)
        return self._both(prefill, path, (fields, asked), (fields, asked))

    def _both(self, prefill: str, path: str, second: tuple[Fields, dict[str, Any]], first: tuple[Fields, dict[str, Any]]) -> Answer:
        def ask() -> None:
            send(f"http://{prefill}", path, first[0], text(first[1])).whole()

        threading.Thread(target=ask, daemon=True).start()
        return send(self._decode, path, second[0], text(second[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--decode", required=True, help=f"always a port of this host in llm-d: http://{HOST}:PORT")
    parser.add_argument("--kv-connector", required=True, choices=("nixlv2", "mooncake", "sglang"))
    parser.add_argument("--bootstrap-port", type=int, default=8998, help="of all prefill servers")
    args = parser.parse_args()
    if program := os.environ.get("KVCONN_E2E_LLMD"):
        argv = [program, "--port", str(args.port), "--model-server-port", args.decode.rpartition(":")[2], "--secure-proxy=false"]
        argv += ["--kv-connector", args.kv_connector, "--mooncake-bootstrap-port", str(args.bootstrap_port)]
        os.environ["SGLANG_BOOTSTRAP_PORT"] = str(args.bootstrap_port)  # by sglang's protocol it reads no option
        os.execv(program, argv)
    serve(args.port, Sidecar(args.kv_connector, args.decode, args.bootstrap_port).complete, args.decode)


if __name__ == "__main__":
    main()
