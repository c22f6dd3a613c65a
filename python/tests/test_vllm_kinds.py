"""The table of kinds against the installed vLLM: a class that a new release brings fails these tests, and not a user's request."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
import vllm.v1
from state_sides import short_conv
from vllm.v1 import kv_cache_interface as specs
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST, KVCacheSpecRegistry

from kvconn.vllm import kinds
from kvconn.vllm.groups import make_groups
from kvconn.vllm.kinds import KINDS, Carried, Refused, refusal

REPOSITORY = Path(__file__).parents[2]


def installed() -> set[str]:
    """Every class of the installed vLLM that describes a cache: those of its module, registered ones, and subclasses anywhere else
    in its sources."""
    KVCacheSpecRegistry._ensure_registered()
    found = {kind.__name__ for kind in _REGISTRY_KVCACHESPEC_LIST}
    found |= {name for name, value in vars(specs).items() if isinstance(value, type) and issubclass(value, specs.KVCacheSpec)}
    bases = "|".join(map(re.escape, sorted(found)))
    named = re.compile(rf"^class (\w+)\([^)]*\b(?:{bases})\b[^)]*\):", re.M)
    (root,) = vllm.v1.__path__
    for file in Path(root).parent.rglob("*.py"):
        found |= set(named.findall(file.read_text(encoding="utf-8")))
    return found


def spec(name: str, **more: Any) -> Any:
    kind = getattr(specs, name)
    fields = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16, **more}
    return kind(**fields)


def grouped(one: Any) -> Any:
    return specs.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[specs.KVCacheGroupSpec(["layer.7"], one)])


def test_every_class_is_in_the_table() -> None:
    there = installed()
    assert len(there) >= 15 and "MambaSpec" in there
    assert not there - set(KINDS), "decide of each whether it is carried, by which test, or why it is refused"


def test_class_that_is_in_no_table_stops_the_start(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Classes are known by name. A subclass of a carried kind stops the start too: it may mean something else by the same fields."""

    class NewSpec(specs.FullAttentionSpec):
        pass

    new = NewSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"layer layer\.7: the class NewSpec of KV caches is not known to this kvconn"):
        make_groups(grouped(new))
    inside = specs.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": spec("FullAttentionSpec"), "b": new})
    with pytest.raises(ValueError, match="layer b: the class NewSpec"):
        make_groups(grouped(inside))
    make("kv_producer")
    monkeypatch.setattr(kinds, "KINDS", {name: kind for name, kind in KINDS.items() if name != "FullAttentionSpec"})
    with pytest.raises(ValueError, match="the class FullAttentionSpec of KV caches is not known to this kvconn"):
        make("kv_producer")


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (lambda: spec("SlidingWindowMLASpec", sliding_window=32), "only DeepSeek V4 has it"),
        (lambda: spec("SinkFullAttentionSpec", sink_len=4), "its sink lies in blocks that no request has"),
        (lambda: spec("RSWASpec", rswa_window=32), "RSWASpec is not supported"),
        (lambda: spec("CircularBufferSpec"), "a ring"),
        (lambda: spec("CrossAttentionSpec"), "of the encoder's tokens"),
        (lambda: spec("HiddenStateCacheSpec"), "hidden states"),
        (lambda: spec("MLAAttentionSpec", tokens_per_state=4), "MLAAttentionSpec with tokens_per_state = 4 is not supported"),
        (lambda: spec("MLAAttentionSpec", model_version="deepseek_v4"), "with model_version = deepseek_v4 is not"),
        (lambda: spec("FullAttentionSpec", tokens_per_state=2), "with tokens_per_state = 2 is not"),
    ],
)
def test_what_is_refused_says_why(one: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_groups(grouped(one()))


def test_field_that_is_not_known_must_have_its_default() -> None:
    """If a new release gives a carried class a new field, this test fails: does the field change what a block holds?"""
    looked_at = {"tokens_per_state", "alignment", "model_version", "non_causal_multi_token_decode"}
    looked_at |= {"topk_buffer_width", "storage_block_size"}  # from 0.33 on, and up to 0.31
    for name, kind in KINDS.items():
        if isinstance(kind, Carried) and name != "UniformTypeKVCacheSpecs":
            there = {field.name for field in dataclasses.fields(getattr(specs, name))}
            known = {*kinds._STATE_FIELDS, "num_heads", "dcp_sharded", "is_draft"} if name == "MambaSpec" else kinds._FIELDS
            assert not there - {*known, *looked_at}, name
    several = spec("MLAAttentionSpec", non_causal_multi_token_decode=True)
    assert "with non_causal_multi_token_decode = True is not supported" in refusal(several)
    assert not refusal(dataclasses.replace(several, non_causal_multi_token_decode=False))


def test_pool_of_the_host_is_refused() -> None:
    config = grouped(spec("FullAttentionSpec"))
    config.kv_cache_groups[0].host_resident = True
    with pytest.raises(ValueError, match="FullAttentionSpec in a pool of the host"):
        make_groups(config)


def test_states_beside_a_pool_of_the_host_are_refused() -> None:
    config, state = grouped(spec("FullAttentionSpec")), grouped(short_conv(align=True))
    config.kv_cache_groups[0].host_resident = True
    config.kv_cache_groups.extend(state.kv_cache_groups)
    with pytest.raises(ValueError, match="a KV cache of MambaSpec beside a pool of the host"):
        make_groups(config, loads_only=True)
    config.kv_cache_groups[0].host_resident = False
    assert [group.state for group in make_groups(config, loads_only=True)] == [False, True]


def test_what_is_carried_is_not_refused() -> None:
    assert not refusal(spec("MLAAttentionSpec")) and not refusal(spec("SlidingWindowSpec", sliding_window=32))
    assert not refusal(spec("ChunkedLocalAttentionSpec", attention_chunk_size=64))


def test_tests_that_the_table_names_are_there() -> None:
    if not (REPOSITORY / "e2e").is_dir():
        pytest.skip("the tests run without the repository")
    for kind in KINDS.values():
        if isinstance(kind, Carried):
            assert re.search(rf"\b{kind.which}\b", (REPOSITORY / kind.test).read_text())
        else:
            assert isinstance(kind, Refused) and kind.why


def test_page_has_the_table() -> None:
    """scripts/caches-page.py writes the table."""
    page = REPOSITORY / "docs" / "caches.md"
    if not page.exists():
        pytest.skip("the tests run without the repository")
    shown = page.read_text().partition("<!-- vllm:begin -->\n")[2].partition("<!-- vllm:end -->")[0]
    assert shown.split("\n") == [*kinds.table(), ""]
