"""smg's own servicer, told of each connector's name under which kvconn serves, and of kvconn's answer. No server runs.

The servicer stands beside a vLLM that smg reaches by gRPC, and tells smg which connector it has. It comes with
scripts/requirements-smg-servicer.txt.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme import ROOT

import kvconn.vllm
from kvconn.vllm import params

BOUND_S = 180  # ends a hang
WHERE = Path(os.environ.get("KVCONN_E2E_SMG_SERVICER") or f"{sys.prefix}-smg-servicer")
NAMES = [name for name in kvconn.vllm.__all__ if name.endswith("Connector")]
KNOWN = ("MooncakeConnector", "NixlConnector")  # as docs/router.md has it
CHILD = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
ASKS = """
import json, sys
from smg_grpc_proto import vllm_engine_pb2
from smg_grpc_servicer.vllm.kv_transfer import params_from_request, params_to_response_fields, resolve_pd_connector
from vllm.config import KVTransferConfig
given = json.loads(sys.argv[1])
names = [resolve_pd_connector(KVTransferConfig(**config)) for config in given["configs"]]
_, carried = params_to_response_fields(given["answer"])
answer = params_from_request(vllm_engine_pb2.GenerateRequest(kv_transfer_params_json=carried))
print("smg says", json.dumps({"names": names, "answer": answer}))
"""


def one(name: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": "kvconn.vllm", **more}


def both(name: str) -> dict[str, Any]:
    extra = {"connectors": [one(name), CHILD]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "engine_id": "e-7", "kv_connector_extra_config": extra}


def test_names_that_smg_is_told() -> None:
    """By itself each name is told as it is; a MultiConnector's child only if the servicer knows it. kvconn's answer comes back whole."""
    if not (WHERE / "smg_grpc_servicer").is_dir():
        pytest.skip(
            f"NOT RUN: smg's servicer is not in {WHERE}: pip install --no-deps --target {WHERE} -r scripts/requirements-smg-servicer.txt"
        )
    sizes = {"tp_size": 1, "pp_size": 1, "dcp_size": 1}
    answer = params.answer("t-1", "e-7", "http://10.0.0.1:8998", [[3, 4]], sizes, 32)
    given = {"configs": [config for name in NAMES for config in (one(name, engine_id="e-7"), both(name))], "answer": answer}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(WHERE), os.environ.get("PYTHONPATH"))))}
    argv = [sys.executable, "-c", ASKS, json.dumps(given)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("smg says ")]
    said = json.loads(line.removeprefix("smg says "))
    assert said["answer"] == answer and params.parse(said["answer"]) == params.DecodeParams("t-1", "http://10.0.0.1:8998", "e-7")
    expected = [[told, "e-7"] for name in NAMES for told in (name, name if name in KNOWN else "MultiConnector")]
    assert said["names"] == expected
    (installed,) = {each.version for each in importlib.metadata.distributions(path=[str(WHERE)]) if each.name == "smg-grpc-servicer"}
    row = re.search(r"^\| smg [\d.]+, vLLM by gRPC .*servicer ([\d.]+)", (ROOT / "docs" / "router.md").read_text(encoding="utf-8"), re.M)
    assert row and row[1] == installed
