"""The stand-ins of tests that run without SGLang are compared with SGLang's own objects; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import like as sglang
import numpy as np
import sglang_rank
import torch
from like import like
from sglang.srt.mem_cache import memory_pool, swa_memory_pool
from sglang_engine import start
from sglang_rank import HEADS, ITEM, PAGES, TOKENS
from sglang_sides import Side
from test_sglang_caches import mamba

from kvconn.sglang import pools

LAYERS = range(2, 5)
SIZE, DIM = PAGES * TOKENS - TOKENS, ITEM // 4


def mha() -> Any:
    return memory_pool.MHATokenToKVPool(
        SIZE, TOKENS, torch.float32, HEADS, DIM, len(LAYERS), "cpu", False, start_layer=LAYERS.start, end_layer=LAYERS.stop
    )


def mla() -> Any:
    return memory_pool.MLATokenToKVPool(
        SIZE, TOKENS, torch.float32, 1, 1, len(LAYERS), "cpu", False, start_layer=LAYERS.start, end_layer=LAYERS.stop
    )


def swa() -> Any:
    return swa_memory_pool.SWAKVPool(
        size=SIZE, size_swa=28, page_size=TOKENS, dtype=torch.float32, head_num=HEADS, head_dim=DIM, device="cpu",
        swa_attention_layer_ids=[LAYERS.stop], full_attention_layer_ids=list(LAYERS), start_layer=0,
    )  # fmt: skip


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("make", "more"), [(mha, {}), (mla, {"mla": True}), (swa, {"states": {"swa": 8}})])
def test_rank_is_as_sglang_starts_it(role: str, make: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has no field that SGLang does not set on this side, and its regions are those of SGLang's own pool."""
    stand_in: dict[str, Any] = {}
    given = sglang_rank.kv_args
    monkeypatch.setattr(sglang_rank, "kv_args", lambda *args: stand_in.setdefault("args", given(*args)))
    theirs = start(role, make, total_heads=HEADS, **(at_its_own_port() if role == "prefill" else {}))
    ours = sglang_rank.Rank(role, layers=LAYERS, **more)
    try:
        real = vars(theirs.manager.kv_args)
        for name, value in vars(stand_in["args"]).items():
            assert name in real and isinstance(value, type(real[name])), name
        assert (real["kv_item_lens"], real["page_size"]) == (stand_in["args"].kv_item_lens, stand_in["args"].page_size)
        assert [each.value for each in real["state_types"]] == stand_in["args"].state_types

        def described(rank: Any) -> list[tuple[Any, ...]]:
            pages = [region for region in rank.layout.regions if region.group == 0]
            return [(*region._replace(address=0),) for region in pages]

        assert described(ours) == described(theirs)
        of_states = [[region.name for region in rank.layout.regions if region.group == 1 and more.get("states")] for rank in (ours, theirs)]
        assert of_states[0] == of_states[1]
        assert theirs.layout.first([[1], [2, 3]], 0) == ours.layout.first([[1], [2, 3]], 0)
    finally:
        ours.close()
        theirs.manager.teardown()
        for server in servers:
            server.close()
        servers.clear()


servers: list[Any] = []


def at_its_own_port() -> dict[str, Any]:
    import socket

    from kvconn.sglang.server import KVConnBootstrapServer

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    servers.append(KVConnBootstrapServer("127.0.0.1", port))
    return {"disaggregation_bootstrap_port": port}


def test_pools_have_the_names_and_fields_of_sglang_s() -> None:
    kv = np.zeros((6, PAGES, TOKENS, HEADS, ITEM), np.uint8)
    states = np.zeros((1, 9, 16, 3), np.float32)
    full = sglang_rank.MHATokenToKVPool(kv, LAYERS, HEADS)
    state = sglang_rank.MambaPool(states, [1])
    with_states = start("decode", lambda: mamba([0, 1]))
    try:
        pairs = [
            (full, mha()),
            (sglang_rank.MLATokenToKVPool(kv[:3], LAYERS), mla()),
            (sglang_rank.SWAKVPool(full, sglang_rank.MHATokenToKVPool(kv.copy()[:2], range(1), HEADS)), swa()),
            (state, with_states.pool.mamba_pool),
            (sglang_rank.HybridLinearKVPool(full, state), with_states.pool),
        ]
        for ours, theirs in pairs:
            assert type(ours).__name__ == type(theirs).__name__ and type(theirs).__module__.startswith("sglang.")
            for name, value in vars(ours).items():
                assert isinstance(getattr(theirs, name), type(value)) or hasattr(value, "__dict__"), name
        for ours, theirs in pairs[:3]:
            owned = [[(owner.layer, owner.part) for owner in pools.owners(each).values()] for each in (ours, theirs)]
            assert owned[0] == owned[1]
        conv = next(owner for owner in pools.owners(state).values())
        real = next(owner for owner in pools.owners(with_states.pool.mamba_pool).values())
        assert conv[:3] == real[:3], "a slot is described in the same words"
    finally:
        with_states.manager.teardown()


def test_stand_in_with_a_field_that_sglang_does_not_have_is_an_error() -> None:
    like(sglang.SGLANG_SCHEDULER, rust_server=None)
    with pytest.raises(AssertionError, match="of the installed sglang has no rust_servers"):
        like(sglang.SGLANG_SCHEDULER, rust_servers=None)


# These make objects of kvconn's own, objects that a test of this file compares, or objects that only SGLang's code reads, which
# fails where a field is missing.
OF_NO_ENGINE = {
    "like.py": 2, "sglang_rank.py": 2, "sglang_engine.py": 1, "sglang_sides.py": 4,
    "test_sglang_caches.py": 5, "test_sglang_conn.py": 1, "test_sglang_plugin.py": 2,
}  # fmt: skip


def test_no_test_has_a_stand_in_of_another_make() -> None:
    """A new one must be compared with SGLang's class, by like.py or in this file, and named in docs/design/testing.md."""
    here = Path(__file__).parent
    for file in [*here.glob("test_sglang_*.py"), *here.glob("sglang_*.py"), here / "like.py"]:
        made = len(re.findall(r"\b(?:SimpleNamespace|\w*Mock)\(", file.read_text(encoding="utf-8")))
        assert made == OF_NO_ENGINE.get(file.name, 0) or file == Path(__file__), file


def test_senders_and_receivers_get_the_fields_of_the_manager() -> None:
    manager = start("decode", mha).manager
    side = Side("decode")
    try:
        of_the_test = {"rank", "forgotten", "address"}
        for name, value in vars(side).items():
            if name in of_the_test:
                continue
            real = getattr(manager, name)
            if hasattr(value, "__dict__"):  # a part of what it has
                assert all(hasattr(real, each) for each in vars(value)), name
            else:
                assert isinstance(real, type(value)) or value is None, name
        assert all(hasattr(manager.parallel.rank, each) for each in vars(side.parallel.rank))
        for name in ("engine", "forget", "dp_rank", "prefill_again"):
            assert callable(getattr(manager.router, name))
    finally:
        side.rank.close()
        manager.teardown()
