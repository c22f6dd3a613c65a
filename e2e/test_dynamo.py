"""Dynamo's own code, told of each connector's name under which kvconn serves, against docs/router.md. No server runs.

Dynamo comes with scripts/requirements-dynamo.txt. Its release is for an older vLLM than this environment's: its worker cannot be imported
here, but its prefill worker's handler can.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme import ROOT

import kvconn.vllm

BOUND_S = 180  # ends a hang
HANDLERS = Path(__file__).with_name("dynamo_handlers.py")
WHERE = Path(os.environ.get("KVCONN_E2E_DYNAMO") or f"{sys.prefix}-dynamo")
NAMES = [name for name in kvconn.vllm.__all__ if name.endswith("Connector")]
CHILD = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
MOONCAKE = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer", "engine_id": "prefill-7"}
# By what Dynamo finds Mooncake's port, the address that it finds, and by what it does not.
PORTS: dict[str, dict[str, Any]] = {
    "http://127.0.0.1:9111": {**MOONCAKE, "environment": {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9111"}},
    "http://10.0.0.9:9222": {**MOONCAKE, "kv_connector_extra_config": {"bootstrap_server_address": "10.0.0.9:9222"}},
}
NOT_KNOWN: list[dict[str, Any]] = [
    {**MOONCAKE, "kv_connector_extra_config": {"bootstrap_port": 9111, "advertise_host": "10.0.0.9"}},
    {**MOONCAKE, "environment": {"KVCONN_BOOTSTRAP_PORT": "9111"}},
]


def environment() -> dict[str, str] | None:
    """In which Dynamo can be imported; None where it is not installed."""
    if not (WHERE / "dynamo").is_dir():
        return None
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(WHERE), os.environ.get("PYTHONPATH"))))}


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name by itself, and as the first and the last child of a MultiConnector."""
    for name in NAMES:
        config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": "kvconn.vllm"}
        yield name, config
        for children in ([config, CHILD], [CHILD, config]):
            yield name, {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": children}}


def skip_without_dynamo() -> dict[str, str]:
    env = environment()
    if env is None:
        pytest.skip(f"NOT RUN: Dynamo is not in {WHERE}: pip install --no-deps --target {WHERE} -r scripts/requirements-dynamo.txt")
    return env


class Said(NamedTuple):
    of_names: list[dict[str, Any]]
    of_ports: list[dict[str, Any]]


@pytest.fixture(scope="module")
def said() -> Said:
    """What Dynamo says of all configurations: a process that imports vLLM and Dynamo takes long to begin."""
    env = skip_without_dynamo()
    names = [config for _, config in configurations()]
    configs = [*names, *PORTS.values(), *NOT_KNOWN]
    argv = [sys.executable, str(HANDLERS), "said", *map(json.dumps, configs)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line.removeprefix("dynamo says ")) for line in done.stdout.splitlines() if line.startswith("dynamo says ")]
    assert len(lines) == len(configs), done.stdout
    return Said(lines[: len(names)], lines[len(names) :])


def page() -> tuple[str, dict[str, str]]:
    """The release in the page's row about Dynamo, and what the row says of each name."""
    lines = (ROOT / "docs" / "router.md").read_text(encoding="utf-8").splitlines()
    heads, row = (next(line for line in lines if line.startswith(start)) for start in ("| router |", "| Dynamo "))
    cells = dict(zip(heads.split("|"), row.split("|")))
    release = re.match(r" Dynamo ([\d.]+) ", cells[" router "])
    assert release, row
    return release[1], {name: cell.strip() for head, cell in cells.items() for name in re.findall(r"`(\w+)`", head)}


def test_names_are_those_of_the_page(said: Said) -> None:
    release, cells = page()
    assert sorted(cells) == sorted(NAMES)
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    for (name, _), result in zip(configurations(), said.of_names, strict=True):
        found[name].append(result.get("error") or ("carried" if result["joined"] else "two transfers"))
    unknown = "each prefill request fails with a `ValueError`"
    for name, results in found.items():
        if cells[name].partition(",")[0] == "carried":
            assert results == ["carried"] * 3, name
        else:
            assert cells[name] == unknown, name
            assert results[0].startswith(f"ValueError: Unsupported kv_connector='{name}' for PD."), results
            assert all(result.startswith("ValueError: MultiConnector has no PD-capable sub-connector.") for result in results[1:]), results
    (installed,) = {each.version for each in importlib.metadata.distributions(path=[str(WHERE)]) if each.name == "ai-dynamo"}
    assert installed == release


def test_mooncakes_port(said: Said) -> None:
    """As the page has it: Dynamo asks vLLM, which knows Mooncake's own words only."""
    assert [answer["address"] for answer in said.of_ports] == [*PORTS, *["http://127.0.0.1:8998"] * len(NOT_KNOWN)]
    assert {answer["engine_id"] for answer in said.of_ports} == {"prefill-7"}
