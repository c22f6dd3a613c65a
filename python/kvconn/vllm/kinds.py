"""Which kinds of KV cache are carried: each class that vLLM describes a layer's cache by, with the test that shows it or the
reason why it is refused.

A class that is not in the table stops the engine's start: what its blocks mean is not known here. The names of classes are
compared and not their bases, since a subclass may mean something else by the same fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Carried:
    test: str  # the file of the test that shows that it is carried
    which: str = ""  # the case of that test


@dataclass(frozen=True)
class Refused:
    why: str


KINDS: dict[str, Carried | Refused] = {
    "FullAttentionSpec": Carried("e2e/test_kinds.py", "llama"),
    "MLAAttentionSpec": Carried("e2e/test_kinds.py", "mla"),
    "SlidingWindowSpec": Carried("e2e/test_kinds.py", "window"),
    "ChunkedLocalAttentionSpec": Carried("python/tests/test_vllm_windows.py", "chunks"),
    "UniformTypeKVCacheSpecs": Carried("python/tests/test_vllm_groups.py", "test_several_layers_of_unequal_heads"),
    "KVCacheSpec": Refused("a base class: it says nothing of what is in a block"),
    "AttentionSpec": Refused("a base class: it says nothing of what is in a block"),
    "MambaSpec": Carried("e2e/test_states.py", "granite"),
    "CircularBufferSpec": Refused("a ring: its one block is written to over and over while a request runs"),
    "KpoolTailSpec": Refused("a ring, of vLLMs before CircularBufferSpec"),
    "TQFullAttentionSpec": Refused("numbers and scales packed together, of vLLMs before KVQuantMode had TurboQuant"),
    "RSWASpec": Refused("a window that vLLM moves only while it decodes: which blocks are there is not known here"),
    "SlidingWindowMLASpec": Refused("only DeepSeek V4 has it, which no test has run"),
    "SinkFullAttentionSpec": Refused("its sink lies in blocks that no request has"),
    "HiddenStateCacheSpec": Refused("hidden states for another connector, no cache"),
    "EncoderOnlyAttentionSpec": Refused("it caches nothing"),
    "CrossAttentionSpec": Refused("its blocks are of the encoder's tokens, not of the prompt's"),
    "HiSparseHotSpec": Refused("copies that vLLM rebuilds after a load; it marks them as not to be transferred"),
    "HiSparseResidentSpec": Refused("copies of blocks that lie in a pool of the host; vLLM marks them as not to be transferred"),
}


# What may be said of a cache that is carried. Any other field must have its default: what it means otherwise is not known here.
_FIELDS = (
    *("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "cache_dtype_str"),
    *("page_size_padded", "block_stride_alignment", "num_head_slots", "state_content_bytes"),  # sizes, which the tensor has too
    *("sliding_window", "extra_retained_tokens", "attention_chunk_size", "non_causal"),
    *("dcp_sharded", "max_tp_shards", "is_draft"),
    *("cache_role", "is_index_group_leader"),  # sparse attention's index; by which layers it is computed
)
_STATE_FIELDS = (
    *("block_size", "shapes", "dtypes", "page_size_padded", "block_stride_alignment", "mamba_type", "mamba_cache_mode"),
    *("num_speculative_blocks", "tp_replicated"),
    *("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment"),  # blocks before that of the last state
)


def refusal(spec: Any) -> str:
    """Why a layer's cache is not carried; nothing if it is."""
    name = type(spec).__name__
    kind = KINDS.get(name)
    if kind is None:
        return f"the class {name} of KV caches is not known to this kvconn, so it is not carried: a newer kvconn may know it"
    if isinstance(kind, Refused):
        return f"a KV cache of {name} is not supported: {kind.why}"
    if hasattr(spec, "kv_cache_specs"):  # what its layers' specs say is looked at one by one
        return ""
    known = _STATE_FIELDS if name == "MambaSpec" else _FIELDS
    for field in fields(spec) if is_dataclass(spec) else ():
        value = getattr(spec, field.name)
        if field.name not in known and value != field.default:
            return f"a KV cache of {name} with {field.name} = {value} is not supported: no test has run one"
    return ""


def table() -> list[str]:
    """The table for docs/caches.md."""
    rows = ["| class | | shown by, or the reason |", "|---|---|---|"]
    for name, kind in KINDS.items():
        carried = isinstance(kind, Carried)
        rows.append(f"| `{name}` | {'carried' if carried else 'refused'} | {f'`{kind.test}`, {kind.which}' if carried else kind.why} |")
    return rows
