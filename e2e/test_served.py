"""Real servers that serve the same, or not: models are compared by their weights, and what is not known, or is wrong, ends the start."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask, metric, wait_until
from pair_tests import USAGE, body, from_prefill, numbers, progress, reasons, serves, words
from servers import leaving_nothing, stop_all, wait_ready
from vllm_pair import Pair

FINGERPRINT = re.compile(r'model \\?"(\w+)\\?" with fingerprint (1:[0-9a-f]{32})')


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one name, and a copy of the first under another name."""
    where = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_model.make(where / "one" / "tiny"), where / "copy")
    tiny_model.make(where / "two" / "tiny", seed=8)
    return where


@pytest.fixture(scope="module")
def pair(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    the_pair = Pair(
        models / "one" / "tiny", tmp_path_factory.mktemp("served"), decode_model=models / "copy", forked=True, progress=progress
    )
    with leaving_nothing(the_pair):
        yield the_pair


def test_copy_under_another_name_loads(pair: Pair) -> None:
    for _ in range(3):
        serves(pair)


def test_other_weights_under_one_name_are_refused(pair: Pair, models: Path, tmp_path: Path) -> None:
    """With both fingerprints, on a server that lives on; the pair goes on too."""
    other = Pair(models / "two" / "tiny", tmp_path, forked=True, progress=progress)
    try:
        other.decode.start()
        wait_ready([other.decode], progress=progress)
        other.warm(other.decode)
        position = other.decode.log_size()
        params = from_prefill(pair, f"weights-{next(numbers)}")
        answer = ask(other.decode.url, {**body(pair, words(300)), "kv_transfer_params": params}, timeout_s=30)
        assert not answer.ok, answer
        wait_until("the reason in the log", lambda: "their weights or configurations differ" in other.decode.log_since(position))
        said = FINGERPRINT.findall(reasons(other, position, "was not loaded"))
        assert [name for name, _ in said] == ["tiny", "tiny"] and said[0][1] != said[1][1], said
        assert ask(other.decode.url, body(pair, words(200))).ok
        wait_until("no block in use", lambda: metric(other.decode.url, USAGE) == 0)
    finally:
        other.stop()
    assert not other.leftovers()
    serves(pair)


class Ends(NamedTuple):
    """A start that ends. says is in the first line that has `begins`."""

    begins: str
    says: str
    name: str = "KVConnConnector"
    connector: str | None = None  # kv_connector_module_path
    extra: dict[str, Any] = {}
    serves: str = ""  # KVCONN_SERVES


IN_PLACE = "KVConnConnector in the place of {}: "
ENDS = {
    "kind of cache": Ends("the class FullAttentionSpec of KV caches is not known to this kvconn", "", connector="without_kind"),
    "key": Ends(
        IN_PLACE.format("MooncakeConnector"),
        'unknown config key "kv_lease_duratoin", the nearest is "kv_lease_duration" (of NIXL\'s connector); known keys are ',
        "MooncakeConnector",
        extra={"kv_lease_duratoin": 30},
        serves="MooncakeConnector",
    ),
    "value": Ends(
        IN_PLACE.format("NixlConnector"),
        "kv_connector_extra_config: kv_lease_duration (of NIXL's connector) is 'soon': a number of seconds was expected",
        "NixlConnector",
        "kvconn.vllm",
        {"kv_lease_duration": "soon"},
    ),
    "second registration": Ends(
        IN_PLACE.format("NixlConnector"),
        "vLLM's register has NixlConnector from registered_twice already; take one away",
        "NixlConnector",
        "registered_twice",
    ),
}


@pytest.fixture(scope="module")
def ending(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    """Their servers, side by side."""
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    pairs = {}
    try:
        for name, case in ENDS.items():
            env = {"PYTHONPATH": path, "KVCONN_SERVES": case.serves}
            transfer = {"kv_connector": case.name, "kv_connector_extra_config": case.extra}
            where = tmp_path_factory.mktemp("ends")
            pairs[name] = Pair(models / "copy", where, connector=case.connector, transfer=transfer, forked=True, extra_env=env)
            pairs[name].prefill.start()
        yield pairs
    finally:
        stop_all([pair.prefill for pair in pairs.values()])
    assert not [left for pair in pairs.values() for left in pair.leftovers()]


@pytest.mark.parametrize("name", ENDS)
def test_what_is_not_known_or_wrong_ends_the_start(ending: dict[str, Pair], name: str) -> None:
    """With the reason in the log: both connectors' names, the key or value, and the key that was meant."""
    case, server = ENDS[name], ending[name].prefill
    wait_until("the server ends", lambda: not server.alive(), 180)
    log = server.log_since(0)
    lines = [line for line in log.splitlines() if case.begins in line]
    assert lines and case.says in lines[0].partition(case.begins)[2], server.log_tail()
    assert name != "kind of cache" or re.search(r"layer model\.layers\.0\.self_attn\.attn", log)
