"""Which bytes of vLLM's pages are a state, what two engines must have in common, and what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
import torch
from like import like
from state_sides import AT, DTYPES, mamba2, model_layers, short_conv
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_layout import KVCacheLayout

import kvconn
from kvconn.vllm import states
from kvconn.vllm.groups import Group, make_groups
from kvconn.vllm.layout import Heads, make_regions, regions_by_layer

BLOCKS = 8


def config(dtype: Any = torch.bfloat16) -> Any:
    return like(
        vllm.VLLM_CONFIG,
        compilation_config=like(vllm.COMPILATION_CONFIG, static_forward_context={}),
        cache_config=like(vllm.CACHE_CONFIG, cache_dtype="auto"),
        model_config=like(vllm.MODEL_CONFIG, dtype=dtype),
        device_config=like("vllm.config:DeviceConfig", device_type="cpu"),
    )


def caches(layers: dict[str, Any]) -> Any:
    groups = [specs.KVCacheGroupSpec([name], spec) for name, spec in layers.items()]
    return specs.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout="LBHNC")


def tensors(layers: dict[str, Any], layout: str = "LBHNC") -> dict[str, torch.Tensor]:
    """As vLLM makes them: all in one buffer, with room behind each state."""
    page = max(spec.page_size_bytes for spec in layers.values())
    beside = layout.startswith("B")  # the layers of a block lie side by side
    strides = (page, page * len(layers)) if beside else (page * BLOCKS, page)
    raw = torch.zeros(page * BLOCKS * len(layers), dtype=torch.int8)
    out = {}
    for n, (name, spec) in enumerate(layers.items()):
        where = specs.KVCacheTensor(
            size=raw.numel(), layers=[name], layer_stride=strides[0], block_stride=strides[1], offset=n * strides[0]
        )
        (out[name],) = specs.create_kv_cache_views(raw, spec, BLOCKS, KVCacheLayout[layout], where)
    return out


def bound(spec: Any, page: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The states as vLLM's layers find them in their page."""
    layer = type("Layer", (), {"get_state_shape": lambda self: spec.shapes, "get_state_dtype": lambda self: spec.dtypes})()
    MambaBase.bind_kv_cache(layer, page)
    return tuple(layer.kv_cache)


def register(
    layers: dict[str, Any], role: str, tp: tuple[int, int] = (0, 1), layout: str = "LBHNC", first: Any = None
) -> tuple[Any, dict[str, Any]]:
    """An agent of a rank, and its layers' caches. first: the agent of the first rank."""
    here = tensors(layers, layout)
    at = {"bootstrap_join": first.bootstrap_address, "tcp_listen_host": "127.0.0.1"} if first else AT if role == "prefill" else {}
    facts = states.facts(config(), caches(layers), tp[1])
    agent = kvconn.Agent({"engine_id": role, "role": role, "must_match": facts, "tp_rank": tp[0], "tp_size": tp[1], **at})
    agent.register_kv_caches(make_regions(here, config(), caches(layers), kvconn.regions_from_tensor, Heads(2, *tp)))
    return agent, here


def load(p: Any, d: Any, src: list[list[int]], dst: list[list[int]]) -> Any:
    p.offer([kvconn.Offer("t", src)])
    d.start_load([kvconn.Load("t", p.bootstrap_address, "prefill", dst)])
    return next(filter(None, (d.get_finished() or (d.wait(1) and None) for _ in range(30))))[0]


@pytest.mark.parametrize("layouts", [("LBHNC", "LBHNC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")])
def test_each_tensor_of_a_state_comes_to_its_place(layouts: tuple[str, str]) -> None:
    """P keeps states at blocks' borders and D in one block: pages of the two have other lengths, and the layers another order."""
    ps, ds = {"a": mamba2(True, page_size_padded=4096), "b": short_conv(True)}, {"a": mamba2(False), "b": short_conv(False)}
    (p, theirs), (d, mine) = register(ps, "prefill", layout=layouts[0]), register(ds, "decode", layout=layouts[1])
    with p, d:
        for name, spec in ps.items():
            for n, state in enumerate(bound(spec, theirs[name])):
                state.copy_(torch.randn(state.shape, generator=torch.Generator().manual_seed(n + ord(name))))
        done = load(p, d, [[3], [4]], [[6], [1]])
        assert done.ok, done
        content = sum(spec.state_content_size_bytes for spec in ps.values())
        assert done.bytes == content < sum(spec.page_size_bytes for spec in ps.values())
        for name, (src, dst) in {"a": (3, 6), "b": (4, 1)}.items():
            for given, found in zip(bound(ps[name], theirs[name]), bound(ds[name], mine[name])):
                assert given[src].any() and torch.equal(given[src], found[dst])
                assert not found[[n for n in range(BLOCKS) if n != dst]].any(), "nothing else was written"


def test_layers_with_states_are_never_said_to_be_written() -> None:
    layers = model_layers(True)
    here = tensors(layers)
    regions = make_regions(here, config(), caches(layers), kvconn.regions_from_tensor, Heads(2))
    by_layer = regions_by_layer(here, regions)
    assert [name for name, indices in by_layer.items() if indices] == ["model.layers.2.self_attn"]
    assert [region.index_kind for region in regions] == [kvconn.IndexKind.SLOT] * 3 + [kvconn.IndexKind.BLOCK]
    assert make_groups(caches(layers)) == [Group(0, 16, state=True), Group(1, 16, state=True), Group(2, 16)]


def test_equal_tensor_parallel_ranks() -> None:
    """Each rank's part of a state goes to the same rank, and to no other."""
    layers = {"a": mamba2(True, tp=2)}
    p0, mine0 = register(layers, "prefill", (0, 2))
    p1, mine1 = register(layers, "prefill", (1, 2), first=p0)
    for seed, mine in enumerate((mine0, mine1)):
        mine["a"].copy_(torch.randint(-100, 100, mine["a"].shape, generator=torch.Generator().manual_seed(seed)))
    with p0, p1:
        for p in (p0, p1):
            p.offer([kvconn.Offer("t", [[3]])])
        for rank, theirs in enumerate((mine0, mine1)):
            d, here = register(layers, "decode", (rank, 2))
            with d:
                d.start_load([kvconn.Load("t", p0.bootstrap_address, "prefill", [[6]])])
                done = next(filter(None, (d.get_finished() or (d.wait(1) and None) for _ in range(30))))[0]
                assert done.ok, done
            for given, found in zip(bound(layers["a"], theirs["a"]), bound(layers["a"], here["a"])):
                assert torch.equal(given[3], found[6])


def other(**more: Any) -> dict[str, Any]:
    return {"a": mamba2(True, **more)}


@pytest.mark.parametrize(
    ("theirs", "both"),
    [
        (other(tp=2), ["state_tp_size", '"1"', '"2"']),
        (other(dtypes=(torch.bfloat16, torch.bfloat16)), ["states", "ssm 4x16x8 float32", "ssm 4x16x8 bfloat16"]),
        (other(shapes=MambaStateShapeCalculator.mamba2_state_shape(1, 64, 1, 4, 16, 16, 4)), ["states", "4x16x8", "4x16x16"]),
        (other(shapes=((3, 80), (8, 8, 8))), ["states", "4x16x8", "8x8x8"]),  # as many bytes
    ],
)
def test_engines_that_keep_other_states_are_refused(theirs: dict[str, Any], both: list[str]) -> None:
    """The reason has both values."""
    (p, _), (d, _) = register(other(), "prefill"), register(theirs, "decode", (0, 2) if both[0] == "state_tp_size" else (0, 1))
    with p, d:
        done = load(p, d, [[3]], [[6]])
        assert done.code == kvconn.Status.REFUSED, done
        assert all(each in done.reason for each in both), done.reason


def test_order_of_a_convolutions_state_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    square = other(shapes=((4, 4), (4, 16, 8)), dtypes=DTYPES)
    p, _ = register(square, "prefill")
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    d, _ = register(square, "decode")
    with p, d:
        done = load(p, d, [[3]], [[6]])
        assert done.code == kvconn.Status.REFUSED and 'conv_state_layout "SD" at the prefill engine, "DS" at' in done.reason


def test_name_says_of_which_rank_a_state_is() -> None:
    def names(rank: int, size: int, **more: Any) -> list[str]:
        layers = other(tp=size, **more)
        made = make_regions(tensors(layers), config(), caches(layers), kvconn.regions_from_tensor, Heads(2, rank, size))
        return [region.name for region in made]

    assert names(1, 2) == ["a:conv[MAMBA2,3x48 bfloat16,SD,cpu,rank 1/2]", "a:ssm[MAMBA2,2x16x8 float32,cpu,rank 1/2]"]
    assert not set(names(0, 2)) & set(names(1, 2)) and "rank" not in "".join(names(0, 1))
    assert names(0, 2, tp_replicated=True) == names(1, 2, tp_replicated=True)


def test_replicated_state_needs_no_equal_ranks() -> None:
    facts = states.facts(config(), caches({"a": mamba2(True, tp_replicated=True)}), 2)
    assert "state_tp_size" not in facts and states.facts(config(), caches({"a": mamba2(True)}), 2)["state_tp_size"] == "2"
    assert states.facts(config(), caches({"a": model_layers(True)["model.layers.2.self_attn"]}), 2) == {}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            lambda: mamba2(True, num_speculative_blocks=3),
            "num_speculative_blocks = 3 is not supported: speculative decoding keeps a state of",
        ),
        (lambda: mamba2(True, mamba_type=Kind.LINEAR), "a state of LINEAR is not supported: no test has run one"),
        (lambda: mamba2(True, mamba_cache_mode="all"), "mamba_cache_mode = 'all' is not supported: known are none, align"),
        (
            lambda: mamba2(True, dtypes=(*DTYPES, torch.float32), shapes=((3, 80), (4, 16, 8), (4, 16))),
            "in tensors of shapes .* further ones, as --use-replayssm",
        ),
        (lambda: mamba2(True, tokens_per_state=4), "MambaSpec with tokens_per_state = 4 is not supported"),
    ],
)
def test_what_is_refused_at_start_says_why(spec: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"layer a: .*{said}"):
        make_groups(caches({"a": spec()}))


@pytest.mark.parametrize("shape", [(BLOCKS + 1, 1, 1, 2528), (BLOCKS, 2, 1, 2528), (BLOCKS, 1, 1, 2000)])
def test_page_that_is_not_what_its_spec_says_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"layer a has a cache of shape \({shape[0]}, .*but its states are 8 pages of \d+ bytes"):
        make_regions({"a": torch.zeros(shape, dtype=torch.int8)}, config(), caches(other()), kvconn.regions_from_tensor, Heads(2))
