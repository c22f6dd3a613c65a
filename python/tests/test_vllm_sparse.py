"""Sparse attention: its index is carried beside the attention's cache, also into the pool of the host that HiSparse has. vLLM's own
scheduler and HiSparse's own coordinator say into which blocks."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("vllm.v1.hisparse") is None:
    pytest.skip("vllm is not installed here, or is one without HiSparse", allow_module_level=True)

import torch
from sparse_sides import Side, heads_with_one_index, latents_with_indexes, latents_with_one_index, run
from vllm_engine import BLOCK, prefill_kv, until
from vllm_sides import step, worker

from kvconn import Memory
from kvconn.vllm import moments
from kvconn.vllm import worker as of_worker
from kvconn.vllm.connector import KVConnConnector
from kvconn.vllm.groups import make_groups, transfer_parts
from kvconn.vllm.layout import Heads, make_regions
from kvconn.vllm.metadata import KVConnMetadata, LoadWork

numbers = random.Random(34)


def text(tokens: int) -> list[int]:
    return [numbers.randrange(500) for _ in range(tokens)]


# The layers, and their bytes of a token.
MODELS = {
    "latents": (latents_with_indexes, 2 * (64 + 36)),
    "hisparse": (latents_with_indexes, 2 * (64 + 36)),
    "one index": (latents_with_one_index, 2 * 64 + 36),
    "heads": (heads_with_one_index, 2 * 64 + 36),
}


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str, model: Path) -> Iterator[tuple[Side, Side]]:
    layers, _ = MODELS[kind]
    p = Side(model, "kv_producer", layers=layers)
    d = Side(model, "kv_consumer", hisparse=kind == "hisparse", layers=layers, policy="fail")
    yield p, d
    p.agent.close()
    d.agent.close()


def add(p: Side, d: Side, prompt: list[int], max_tokens: int = 20) -> tuple[Any, Any]:
    kv = prefill_kv()
    decode = {"transfer_id": kv["transfer_id"], "remote_bootstrap_addr": p.agent.bootstrap_address}
    decode |= {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine-prefill"}
    return p.engine.add(list(prompt), kv, max_tokens=1), d.engine.add(list(prompt), decode, max_tokens=max_tokens)


def test_decode_goes_on_from_what_came(pair: tuple[Side, Side], kind: str) -> None:
    p, d = pair
    for lengths in ((2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 40), (64, 65, 150)):
        halves = [add(p, d, text(tokens)) for tokens in lengths]
        run(p, d)
        assert d.failures == [] and [len(d.engine.texts[each.request_id]) for _, each in halves] == [20] * len(halves)
    stats = d.agent.stats()
    blocks = sum(-(-tokens // BLOCK) for tokens in (2, 3, BLOCK - 1, BLOCK, BLOCK + 1, 40, 64, 65, 150))
    assert stats["bytes_in"] == blocks * BLOCK * MODELS[kind][1]
    assert stats["loads_failed"] == p.agent.stats()["offers_failed"] == 0


def test_a_part_is_sent_while_the_prompt_is_computed(pair: tuple[Side, Side]) -> None:
    p, d = pair
    prefill, request = add(p, d, text(150))
    d.step()
    until("the load has come to prefill", lambda: p.agent.stats()["offers_early"] > 0)
    p.step()  # of the three that the prompt takes
    until("a part has been sent", lambda: p.agent.stats()["bytes_partial"] > 0)
    assert prefill.num_computed_tokens < 150
    run(p, d)
    assert d.failures == [] and len(d.engine.texts[request.request_id]) == 20


def test_prefix_that_decode_has_cached(pair: tuple[Side, Side], kind: str) -> None:
    p, d = pair
    prompt = text(100)
    add(p, d, prompt)
    run(p, d)
    before = d.agent.stats()["bytes_in"]
    _, request = add(p, d, prompt[:90] + text(40))
    run(p, d)
    assert d.failures == [] and len(d.engine.texts[request.request_id]) == 20
    assert d.agent.stats()["bytes_in"] - before == 4 * BLOCK * MODELS[kind][1]  # 5 of 9 blocks were there


def test_prefix_that_only_the_pool_of_the_host_has(model: Path) -> None:
    """Another request reads its blocks while the load runs, so they stay as they are. The index of these tokens is loaded."""
    p, d = Side(model, "kv_producer"), Side(model, "kv_consumer", hisparse=True, policy="fail")
    try:
        prompt = text(100)
        _, reader = add(p, d, prompt, max_tokens=200)
        while not d.engine.texts.get(reader.request_id):
            p.step()
            d.step()
        latents, index = (d.blocks(reader.request_id, f"model.layers.0.{name}")[:6] for name in ("attn", "indexer.k_cache"))
        hashes = [d.pool("model.layers.0.attn").blocks[block].block_hash for block in latents]
        assert None not in hashes
        d.pool("model.layers.0.indexer.k_cache").evict_blocks(set(index))
        before, read = d.agent.stats()["bytes_in"], len(d.engine.texts[reader.request_id])
        prefill, request = add(p, d, prompt[:97] + text(40))
        while prefill.request_id not in p.engine.sending:
            p.step()
        for name in ("model.layers.0.attn", "model.layers.1.attn"):  # as if prefill rounded otherwise
            p.items(name)[p.engine.sending[prefill.request_id].block_ids[0][:6]] += 1
        run(p, d)
        assert d.failures == [] and len(d.engine.texts[request.request_id]) == 20
        assert len(d.engine.texts[reader.request_id]) == 200 and read < 200
        assert d.agent.stats()["bytes_in"] - before == BLOCK * 2 * (3 * 64 + 9 * 36)  # of 9 blocks
    finally:
        p.agent.close()
        d.agent.close()


def test_an_index_is_a_group_of_its_own_on_both_sides(pair: tuple[Side, Side]) -> None:
    p, d = pair
    layers = [[name for name in p.layers if name.endswith(what)] for what in ("attn", "indexer.k_cache")]
    assert transfer_parts(p.engine.caches) == [(0, layers[0]), (0, layers[1])]
    assert transfer_parts(d.engine.caches) == [(0, layers[0]), (int(d.hisparse), layers[1])]
    if d.hisparse:
        assert len(make_groups(d.engine.caches, loads_only=True)) == 2
        with pytest.raises(ValueError, match=r"in a pool of the host \(HiSparse\) is supported with kv_role kv_consumer only"):
            make_groups(d.engine.caches)


def test_a_moment_is_of_a_region_on_the_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first region lies in the pool of the host, of which no stream has moments."""
    d = Side(model, "kv_consumer", hisparse=True)
    d.agent.close()
    regions: list[Any] = []

    def made(*args: Any) -> list[Any]:
        regions[:] = make_regions(*args)
        for n, region in enumerate(regions):  # the index lies on a GPU
            regions[n] = region._replace(memory=Memory.DEVICE if "indexer" in region.name else Memory.HOST)
        return regions

    monkeypatch.setattr(of_worker, "make_regions", made)
    monkeypatch.setattr(of_worker, "device_of", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(moments, "current_stream", lambda device: lambda: 7)
    side, agent = worker()
    monkeypatch.setattr(agent, "register_kv_caches", lambda _: None, raising=False)
    monkeypatch.setattr(agent, "on_gpu", 1)
    side.register(dict(sorted(d.tensors.items())), d.engine.config, d.engine.caches, Heads(1))
    assert [region.memory for region in regions] == [Memory.HOST, Memory.DEVICE] * 2
    step(side, KVConnMetadata(loads=[LoadWork("r", "t", "http://p:8998", "p", [[1], [1]], [0, 0], BLOCK)]))
    assert agent.calls == [("load", "t")] and agent.after == {"t": 7}


@pytest.mark.parametrize("late", [False, True])
def test_loads_into_a_pool_of_the_host_start_when_each_connector_has_begun_the_step(late: bool) -> None:
    started: list[str] = []
    connector = object.__new__(KVConnConnector)
    connector._loads_late, connector._meta = late, object()  # type: ignore[assignment]

    class Worker:
        def load(self, meta: Any) -> None:
            started.append("load")

        def step_written(self, failed: bool) -> None:
            started.append("written")

    connector._worker = Worker()  # type: ignore[assignment]
    connector.start_load_kv(None)
    started.append("begun")
    connector.wait_for_save()
    assert started == (["begun", "load", "written"] if late else ["load", "begun", "written"])
