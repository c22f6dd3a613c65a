"""SGLang's caches as SGLang's own classes keep them: which bytes go where; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import ctypes
import importlib.util
import socket
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import torch
from sglang.srt.disaggregation import utils
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang_engine import DIM, HEADS, PAGE, Rank, engine, mha, send, start

SUCCESS = 4


@pytest.fixture
def port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def tokens(pages: list[int]) -> list[int]:
    return [page * PAGE + n for page in pages for n in range(PAGE)]


SPLITS = {"one": [[0, 1, 2, 3]], "two": [[0, 1], [2, 3]], "uneven": [[0], [1, 2, 3]]}


def ranks_of(role: str, split: list[list[int]], make: Any, port: int, **more: Any) -> list[Rank]:
    size = len(split)
    return [
        start(role, lambda layers=layers: make(layers), pp=(n, size), stages=split, disaggregation_bootstrap_port=port, **more)
        for n, layers in enumerate(split)
    ]


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("theirs", "ours"), [("one", "two"), ("two", "two"), ("two", "one"), ("two", "uneven"), ("uneven", "two")])
def test_stages(port: int, kind: str, theirs: str, ours: str) -> None:
    """Each layer's keys and values come to the stage of decode that computes the layer."""

    def make(layers: list[int]) -> Any:
        if kind == "mha":
            pool = mha(layers[0], layers[-1] + 1)
        else:
            pool = memory_pool.MLATokenToKVPool(
                64, PAGE, torch.float32, 8, 4, len(layers), "cpu", False, start_layer=layers[0], end_layer=layers[-1] + 1
            )
        return pool

    with engine(port) as ranks:
        ps = ranks_of("prefill", SPLITS[theirs], make, port)
        ranks += ps
        ds = ranks_of("decode", SPLITS[ours], make, port)
        ranks += ds
        for p, layers in zip(ps, SPLITS[theirs]):
            for layer in layers:
                p.pool.get_key_buffer(layer)[:] = 1 + layer
                if kind == "mha":
                    p.pool.get_value_buffer(layer)[:] = 11 + layer
        ends, rooms = send(ps, ds, port, ([1, 2], [], 0), ([4, 5], [], 1))
        assert ends == [SUCCESS] * len(ds), [room.reason for room in rooms]
        for d, layers in zip(ds, SPLITS[ours]):
            for layer in layers:
                assert (d.pool.get_key_buffer(layer)[tokens([4, 5])] == 1 + layer).all(), (
                    layer,
                    d.pool.get_key_buffer(layer)[tokens([4, 5])],
                )
                if kind == "mha":
                    assert (d.pool.get_value_buffer(layer)[tokens([4, 5])] == 11 + layer).all()
                assert not d.pool.get_key_buffer(layer)[tokens([0, 1, 2, 3, 6])].any(), "nothing else was written"


def fill(p: Rank, seed: int) -> None:
    """Other bytes in each buffer of a rank."""
    for n, region in enumerate(p.layout.regions):
        ctypes.memset(region.address, (seed * 50 + n) % 255 + 1, region.block_stride * region.num_blocks)


def swa(layers: list[int], heads: int = HEADS) -> Any:
    """Odd layers have a window, and so a pool of their own."""
    windows, full = [layer for layer in layers if layer % 2], [layer for layer in layers if not layer % 2]
    return SWAKVPool(
        size=64, size_swa=32, page_size=PAGE, dtype=torch.float32, head_num=heads, head_dim=DIM, swa_attention_layer_ids=windows,
        full_attention_layer_ids=full, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), [("one", "two"), ("two", "two"), ("two", "one")])
def test_stages_of_windows(port: int, theirs: str, ours: str) -> None:
    """The states of layers with a window come to the stage that computes the layer, at their end of the prompt."""
    with engine(port) as ranks:
        ps = ranks_of("prefill", SPLITS[theirs], swa, port)
        ranks += ps
        ds = ranks_of("decode", SPLITS[ours], swa, port)
        ranks += ds
        for p, layers in zip(ps, SPLITS[theirs]):
            for layer in layers:
                p.pool.get_key_buffer(layer)[:] = 1 + layer
                p.pool.get_value_buffer(layer)[:] = 11 + layer
        ends, rooms = send(ps, ds, port, ([1, 2], [[3, 5]], 0), ([4, 5], [[6]], 1))
        assert ends == [SUCCESS] * len(ds), [room.reason for room in rooms]
        for d, layers in zip(ds, SPLITS[ours]):
            for layer in layers:
                mine = tokens([6] if layer % 2 else [4, 5])
                assert (d.pool.get_key_buffer(layer)[mine] == 1 + layer).all(), layer
                assert (d.pool.get_value_buffer(layer)[mine] == 11 + layer).all(), layer
                others = [n for n in range(32) if n not in mine]
                assert not d.pool.get_key_buffer(layer)[others].any(), "nothing else was written"


def dsa(layers: list[int], *, kpool: int = 1, extra: int = 0, skip: int | None = None) -> Any:
    more = {"index_kpool_compress": True, "tail_extra_slots": extra, "max_running_requests": 7} if kpool > 1 else {}
    return memory_pool.DSATokenToKVPool(
        size=64 * kpool * 8, page_size=64 * kpool, kv_lora_rank=12, dtype=torch.float32, qk_rope_head_dim=4, layer_num=len(layers),
        device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=16, start_layer=layers[0], end_layer=layers[-1] + 1,
        index_kpool=kpool, skip_topk_layers=[layer == skip for layer in layers], **more,
    )  # fmt: skip


@pytest.mark.parametrize("skip", [None, 1])
@pytest.mark.parametrize(("theirs", "ours"), [("one", "two"), ("two", "two"), ("two", "one")])
def test_stages_of_sparse_attention(port: int, theirs: str, ours: str, skip: int | None) -> None:
    """The indexer's keys come to the stage that computes the layer, also where a layer has none of its own."""
    with engine(port) as ranks:
        ps = ranks_of("prefill", SPLITS[theirs], lambda layers: dsa(layers, skip=skip), port, page=64)
        ranks += ps
        ds = ranks_of("decode", SPLITS[ours], lambda layers: dsa(layers, skip=skip), port, page=64)
        ranks += ds
        for p, layers in zip(ps, SPLITS[theirs]):
            for n, layer in enumerate(layers):
                p.pool.kv_buffer[n][:] = 1 + layer
                p.pool.index_k_with_scale_buffer[n][:] = 11 + layer
        ends, rooms = send(ps, ds, port, ([1, 2], [[1, 2]], 0), ([4, 5], [[4, 5]], 1))
        assert ends == [SUCCESS] * len(ds), [room.reason for room in rooms]
        for d, layers in zip(ds, SPLITS[ours]):
            for n, layer in enumerate(layers):
                assert (d.pool.kv_buffer[n][4 * 64 : 6 * 64] == 1 + layer).all()
                if layer != skip:
                    assert (d.pool.index_k_with_scale_buffer[n][4:6] == 11 + layer).all()
                    assert not d.pool.index_k_with_scale_buffer[n][:4].any()


@pytest.mark.parametrize("length", [5, 6, 7, 11, 12, 13, 64])
@pytest.mark.parametrize("extra", [0, 2, 3])
def test_tails_are_those_of_sglang(port: int, length: int, extra: int) -> None:
    """The entries of a request's ring, also where it wraps: as SGLang's own function has it."""
    with engine(port) as ranks:
        p = start("prefill", lambda: dsa([0, 1], kpool=4, extra=extra), page=256, disaggregation_bootstrap_port=port)
        ranks.append(p)
        d = start("decode", lambda: dsa([0, 1], kpool=4, extra=extra), page=256, disaggregation_bootstrap_port=port)
        ranks.append(d)
        given, taken = (utils.get_dsa_tail_state_indices(whose(rank), row, length) for rank, row in ((p, 3), (d, 5)))
        buffers = [(rank.pool._compress_tail_k + rank.pool._compress_tail_score) for rank in (p, d)]
        for n, buffer in enumerate(buffers[0]):
            buffer[:] = torch.arange(buffer.numel(), dtype=torch.float32).reshape(buffer.shape).to(torch.bfloat16) + n
        copies = [buffer.clone() for buffer in buffers[1]]
        source, target = ([(b.data_ptr(), b[0].nbytes) for b in one] for one in (buffers[0], copies))
        for at, to, count in utils.build_dsa_tail_transfer_blocks(
            [a for a, _ in source], [n for _, n in source], [a for a, _ in target], given, taken, [n for _, n in target]
        ):
            ctypes.memmove(to, at, count)
        ends, rooms = send([p], [d], port, ([1], [[1], given], 0), ([4], [[4], taken], 1))
        assert ends == [SUCCESS], rooms[0].reason
        for (
            mine,
            theirs_,
        ) in zip(buffers[1], copies):
            assert torch.equal(mine, theirs_)
        assert given == [] or any(buffer.any() for buffer in copies)


def whose(rank: Rank) -> Any:
    """What SGLang's function wants to see of a pool: the hybrid one that has this one inside."""
    return SimpleNamespace(use_dsa=True, full_kv_pool=SimpleNamespace(**{**vars(rank.pool), "index_kpool": rank.pool.index_kpool}))


def mamba(layers: list[int], *, tp: int = 1, dtype: Any = torch.float32) -> Any:
    """Odd layers have states."""
    states = [layer for layer in layers if layer % 2]
    shape = SimpleNamespace(conv=[(16 // tp, 3)], temporal=(4 // tp, 8, 8))
    params = SimpleNamespace(shape=shape, dtype=SimpleNamespace(conv=torch.float32, temporal=dtype), is_kda=False, layers=states)
    pool = memory_pool.MambaPool(size=8, spec_state_size=0, cache_params=params, mamba_layer_ids=states, device="cpu")
    return memory_pool.HybridLinearKVPool(
        size=64, dtype=torch.float32, page_size=PAGE, head_num=HEADS // tp, head_dim=DIM, device="cpu", mamba_pool=pool,
        full_attention_layer_ids=[layer for layer in layers if not layer % 2], start_layer=layers[0],
    )  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), [("one", "two"), ("two", "two"), ("two", "one")])
def test_mamba_states(port: int, theirs: str, ours: str) -> None:
    with engine(port) as ranks:
        ps = ranks_of("prefill", SPLITS[theirs], mamba, port)
        ranks += ps
        ds = ranks_of("decode", SPLITS[ours], mamba, port)
        ranks += ds

        def states(rank: Rank) -> list[tuple[int, Any, Any]]:
            cache = rank.pool.mamba_pool.mamba_cache
            return [(layer, cache.conv[0][n], cache.temporal[n]) for n, layer in enumerate(rank.pool.mamba_pool.mamba_layer_ids)]

        for p in ps:
            for layer, conv, temporal in states(p):
                conv[:], temporal[:] = 1 + layer, 11 + layer
        ends, rooms = send(ps, ds, port, ([1, 2], [[torch.tensor(3).numpy()]], 0), ([4, 5], [[torch.tensor(5).numpy()]], 1))
        assert ends == [SUCCESS] * len(ds), [room.reason for room in rooms]
        for d in ds:
            for layer, conv, temporal in states(d):
                assert (conv[5] == 1 + layer).all() and (temporal[5] == 11 + layer).all()
                assert not conv[:5].any() and not temporal[6:].any()


@pytest.mark.parametrize("windows", [False, True])
def test_block_scales(port: int, windows: bool) -> None:
    """The scales of a cache in MXFP8, of all layers or of those with a window too."""
    kind = {"size": 64, "dtype": torch.float8_e4m3fn, "page_size": PAGE, "head_num": HEADS, "head_dim": 32, "device": "cpu"}

    def make() -> Any:
        if windows:
            more = {
                "swa_attention_layer_ids": [1],
                "full_attention_layer_ids": [0],
                "token_to_kv_pool_class": memory_pool.MHATokenToKVPoolMXFP8,
            }
            return SWAKVPool(size_swa=64, **kind, **more)
        return memory_pool.MHATokenToKVPoolMXFP8(**kind, layer_num=2, enable_memory_saver=False, start_layer=0, end_layer=2)

    with engine(port) as ranks:
        ranks += [start(role, make, disaggregation_bootstrap_port=port) for role in ("prefill", "decode")]
        p, d = ranks
        fill(p, 1)
        states = [[1, 2]] * len(p.layout.state_types)
        ends, rooms = send([p], [d], port, ([1, 2], states, 0), ([4, 5], [[4, 5]] * len(states), 1))
        assert ends == [SUCCESS], rooms[0].reason
        assert p.layout.state_types == (["swa", "block_scale", "block_scale_swa"] if windows else ["block_scale"])
        for theirs, mine in zip(p.layout.regions[:-1], d.layout.regions[:-1]):
            if mine.group <= len(states):
                read = [ctypes.string_at(r.address + at * r.block_stride, 2 * r.block_stride) for r, at in ((theirs, 1), (mine, 4))]
                assert read[0] == read[1] and read[0] != bytes(len(read[0]))


@pytest.mark.parametrize("kind", ["mha", "swa", "dsa"])
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2)])
def test_unequal_ranks(port: int, kind: str, theirs: int, ours: int) -> None:
    """Heads of keys and values are cut and gathered, also of layers with a window; a latent and the indexer's keys come from one rank."""

    def make(size: int) -> Any:
        if kind == "mha":
            return mha(0, 2, heads=HEADS // size)
        return swa([0, 1], heads=HEADS // size) if kind == "swa" else dsa([0, 1])

    def start_all(role: str, size: int) -> list[Rank]:
        page = 64 if kind == "dsa" else PAGE
        return [start(role, lambda: make(size), tp=(n, size), disaggregation_bootstrap_port=port, page=page) for n in range(size)]

    def tensors(rank: Rank) -> list[Any]:
        if kind == "dsa":
            return [*rank.pool.kv_buffer, *rank.pool.index_k_with_scale_buffer]
        return [get(layer) for layer in (0, 1) for get in (rank.pool.get_key_buffer, rank.pool.get_value_buffer)]

    with engine(port) as ranks:
        ps = start_all("prefill", theirs)
        ranks += ps
        ds = start_all("decode", ours)
        ranks += ds
        for n, p in enumerate(ps):
            for each, tensor in enumerate(tensors(p)):
                for head in range(tensor.shape[1] if kind != "dsa" else 0):
                    tensor[:, head] = 1 + 10 * each + n * HEADS // theirs + head
                if kind == "dsa":
                    tensor[:] = 1 + each
        state = [] if kind == "mha" else [[1]]
        ends, rooms = send(ps, ds, port, ([1], state, 0), ([4], [] if kind == "mha" else [[4]], 1))
        assert ends == [SUCCESS] * ours, [room.reason for room in rooms]
        for n, d in enumerate(ds):
            for each, tensor in enumerate(tensors(d)):
                if kind == "dsa":
                    got = tensor[4] if tensor.dim() == 2 else tensor[4 * 64 : 5 * 64]
                    assert (got == 1 + each).all()
                    continue
                for head in range(tensor.shape[1]):
                    assert (tensor[tokens([4]), head] == 1 + 10 * each + n * HEADS // ours + head).all(), (each, head)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (2, 2)])
def test_draft_of_unequal_ranks(port: int, theirs: int, ours: int) -> None:
    """The heads of a draft model that has as many as the model are cut and gathered like the model's."""
    drafts: dict[tuple[str, int], Any] = {}

    def start_all(role: str, size: int) -> list[Rank]:
        def draft(n: int) -> Any:
            drafts[role, n] = mha(0, 1, heads=HEADS // size)
            return drafts[role, n]

        def make() -> Any:
            return mha(0, 2, heads=HEADS // size)

        more = {"disaggregation_bootstrap_port": port, "speculative_algorithm": "EAGLE"}
        return [start(role, make, tp=(n, size), draft=lambda n=n: draft(n), **more) for n in range(size)]

    with engine(port) as ranks:
        ps = start_all("prefill", theirs)
        ranks += ps
        ds = start_all("decode", ours)
        ranks += ds
        for n in range(theirs):
            for head in range(HEADS // theirs):
                drafts["prefill", n].get_key_buffer(0)[:, head] = 100 + n * HEADS // theirs + head
        ends, rooms = send(ps, ds, port, ([1, 2], [], 0), ([4, 5], [], 1))
        assert ends == [SUCCESS] * ours, [room.reason for room in rooms]
        for n in range(ours):
            for head in range(HEADS // ours):
                assert (drafts["decode", n].get_key_buffer(0)[tokens([4, 5]), head] == 100 + n * HEADS // ours + head).all()
