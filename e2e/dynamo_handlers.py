"""Dynamo's own code for vLLM's prefill worker, asked outside a worker.

    python e2e/dynamo_handlers.py said CONFIG…                      what it does with each --kv-transfer-config, a line of JSON each
    python e2e/dynamo_handlers.py serve CONFIG --port PORT --prefill URL --decode URL

It needs the packages of scripts/requirements-dynamo.txt on PYTHONPATH, and vLLM. A worker of Dynamo's has the engine in its own process.
Here the engines are behind HTTP: PrefillWorkerHandler says what each is sent, and gets what prefill answered. A CONFIG is the prefill
engine's, as its process knows it. It may have "environment", variables that this process has.
"""

from __future__ import annotations

import argparse
import json
import os
from types import SimpleNamespace
from typing import Any

from dynamo.vllm.handlers import PrefillWorkerHandler, _update_kv_transfer_params
from dynamo.vllm.multimodal_utils.request_processor import VllmMultimodalRequestProcessor
from small_router import Answer, Fields, send, serve
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig

from kvconn.vllm import params

PARAMS = "kv_transfer_params"
MARK = "dynamo says "  # its log is on the same output


class Request:
    """One request on its way through Dynamo's prefill worker."""

    def __init__(self, config: dict[str, Any]) -> None:
        config = dict(config)
        os.environ.update(config.pop("environment", {}))
        self._handler = object.__new__(PrefillWorkerHandler)
        self._handler.engine_client = SimpleNamespace(vllm_config=VllmConfig(kv_transfer_config=KVTransferConfig(**config)))
        self._handler._multimodal_request_processor = object.__new__(VllmMultimodalRequestProcessor)

    def to_prefill(self) -> dict[str, Any]:
        sampling = SamplingParams(max_tokens=1, min_tokens=1)
        self._protocol = self._handler._prefill_kv_protocol(False, sampling)
        return sampling.extra_args[PARAMS]

    def to_decode(self, answered: dict[str, Any] | None) -> dict[str, Any] | None:
        result = SimpleNamespace(kv_transfer_params=answered, prompt_token_ids=[])
        said = self._handler._prefill_disaggregated_params(self._protocol, result, None, None)
        sampling = SamplingParams()
        # As the decode worker's _generate_token_mode has it.
        if (handed := (said or {}).get(PARAMS)) is not None:
            _update_kv_transfer_params(sampling, handed)
        return (sampling.extra_args or {}).get(PARAMS)


def said(config: dict[str, Any]) -> dict[str, Any]:
    """What Dynamo makes of kvconn's own answer, and what kvconn understands of that."""
    kept = dict(os.environ)
    try:
        request = Request(config)
        first = request.to_prefill()
        asked = params.parse(first)
        if not isinstance(asked, params.PrefillParams):
            return {"error": f"kvconn's prefill engine reads {asked!r} in {first}"}
        block = {"tp_size": 1, "pp_size": 1, "dcp_size": 1}
        second = request.to_decode(params.answer(asked.transfer_id, "prefill-1", "http://10.0.0.1:5600", [[1]], block, 100))
        claim = params.parse(second)
        if not isinstance(claim, params.DecodeParams):
            return {"error": f"kvconn's decode engine reads {claim!r} in {second}"}
        return {"joined": claim.transfer_id == asked.transfer_id, "engine_id": claim.engine_id, "address": claim.bootstrap_addr}
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(kept)


class Worker:
    def __init__(self, config: dict[str, Any], prefill: str, decode: str) -> None:
        self._config, self._prefill, self._decode = config, prefill, decode

    def complete(self, path: str, fields: Fields, body: bytes) -> Answer:
        asked = json.loads(body)
        request = Request(self._config)
        first = {key: value for key, value in asked.items() if key != "stream_options"}
        first |= {PARAMS: request.to_prefill(), "max_tokens": 1, "min_tokens": 1, "stream": False}
        answer = send(self._prefill, path, fields, json.dumps(first).encode())
        if answer.status != 200:
            return answer
        second = {**asked, PARAMS: request.to_decode(json.loads(answer.whole()).get(PARAMS))}
        return send(self._decode, path, fields, json.dumps(second).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("said").add_argument("config", nargs="+", type=json.loads)
    serving = commands.add_parser("serve")
    serving.add_argument("config", type=json.loads)
    serving.add_argument("--port", type=int, required=True)
    serving.add_argument("--prefill", required=True)
    serving.add_argument("--decode", required=True)
    args = parser.parse_args()
    if args.command == "serve":
        serve(args.port, Worker(args.config, args.prefill, args.decode).complete, args.decode)
    for config in args.config:
        print(MARK + json.dumps(said(config)), flush=True)


if __name__ == "__main__":
    main()
