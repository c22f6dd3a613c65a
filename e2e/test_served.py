"""Real servers that serve the same, or not: models are compared by their weights, and a kind of cache that is not known ends the start."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask, metric, wait_until
from pair_tests import USAGE, body, from_prefill, numbers, progress, reasons, serves, words
from servers import leaving_nothing, wait_ready
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


def test_kind_that_is_not_known_ends_the_start(models: Path, tmp_path: Path) -> None:
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    other = Pair(models / "copy", tmp_path, connector="without_kind", forked=True, extra_env={"PYTHONPATH": path}, progress=progress)
    try:
        other.prefill.start()
        wait_until("the server ends", lambda: not other.prefill.alive(), 180)
        log = other.prefill.log_since(0)
        assert "the class FullAttentionSpec of KV caches is not known to this kvconn" in log, other.prefill.log_tail()
        assert re.search(r"layer model\.layers\.0\.self_attn\.attn", log)
    finally:
        other.stop()
    assert not other.leftovers()
