"""KV cache groups: which blocks of a request each of them keeps.

A group of full attention keeps every block. A group of a sliding window, or of attention in chunks, gives back the blocks
that no later token attends to. vLLM puts the null block in their place, so the positions of the others stay. A group of
states needs one block, the last one (states.py).

Under decode context parallelism a block has the tokens of all ranks of a DCP group (shards.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import states
from .kinds import refusal

NULL_BLOCK = 0
_BEHIND = "vLLM writes to the pool behind the GPU, and does not tell when a prompt is there"
_PART_OF_A_BLOCK = "vLLM may take a cached prefix that ends within a block of the pool"
_LOSE_BLOCKS = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")


@dataclass(frozen=True)
class Group:
    number: int  # among all groups of the engine
    block_size: int
    window: int = 0  # tokens that a token attends to, itself among them; 0: all
    retained: int = 0  # tokens that are kept beside the window
    chunk: int = 0  # attention in chunks of so many tokens
    state: bool = False  # a block holds the state of all tokens up to its last one

    @property
    def loses_blocks(self) -> bool:
        return bool(self.window or self.chunk)

    def gone(self, computed: int) -> int:
        """How many of the first blocks no later token attends to when so many tokens are computed."""
        tokens = 0
        if self.window:
            tokens = max(0, computed - self.window + 1 - self.retained)
        elif self.chunk:
            tokens = computed // self.chunk * self.chunk
        return tokens // self.block_size

    def of_state(self, block_ids: Sequence[int], tokens: int) -> list[int]:
        """The block with the state of so many tokens; none if it is not there."""
        place = (tokens - 1) // self.block_size
        return [block for block in block_ids[place : place + 1] if block != NULL_BLOCK]


def first_kept(block_ids: Sequence[int]) -> int:
    """The position of the first block that is there."""
    return next((place for place, block in enumerate(block_ids) if block != NULL_BLOCK), len(block_ids))


def first_unhashed(blocks: Sequence[Any], start: int, end: int) -> int:
    """The position of the first block, from start on, that no other request may read.

    By its hash vLLM gives a block to other requests. All groups have such blocks up to the common prefix. The group of HiSparse's
    host pool may have more of them: it keeps what the others have lost.
    """
    return next((place for place in range(start, end) if blocks[place].block_hash is None), max(start, end))


def transfer_groups(kv_cache_config: Any) -> list[int]:
    """The KV cache groups that take part in transfers. If vLLM does not mark which do, all
    groups take part."""
    return [number for number, group in enumerate(kv_cache_config.kv_cache_groups) if getattr(group, "enable_kv_transfer", True)]


def is_index(spec: Any) -> bool:
    """Whether a layer's cache is the index of sparse attention, by which it finds the tokens that it attends to."""
    return getattr(getattr(spec, "cache_role", None), "value", "") == "indexer"


def transfer_parts(kv_cache_config: Any) -> list[tuple[int, list[str]]]:
    """The groups as a worker's agent counts them: the place of vLLM's group among those that take part, and the layers.

    An index is a group of its own. vLLM has it in one group with what it is the index of, or, with HiSparse, in another one. A
    scheduler's configuration does not tell which layers are an index.
    """
    parts: list[tuple[int, list[str]]] = []
    for place, number in enumerate(transfer_groups(kv_cache_config)):
        group = kv_cache_config.kv_cache_groups[number]
        whole = group.kv_cache_spec
        specs = getattr(whole, "kv_cache_specs", {})
        index = [name for name in group.layer_names if is_index(specs.get(name, whole))]
        others = [name for name in group.layer_names if name not in index]
        if others or not index:
            parts.append((place, others))
        if index:
            parts.append((place, index))
    return parts


def layer_specs(kv_cache_config: Any) -> Iterator[tuple[str, int, Any]]:
    """Each layer that takes part, with the number of its group at a worker's agent, and its spec."""
    numbers = transfer_groups(kv_cache_config)
    for place, (group, layers) in enumerate(transfer_parts(kv_cache_config)):
        spec = kv_cache_config.kv_cache_groups[numbers[group]].kv_cache_spec
        for name in layers:
            yield name, place, getattr(spec, "kv_cache_specs", {}).get(name, spec)


def host_layers(kv_cache_config: Any) -> set[str]:
    """The layers whose caches lie in the pool of the host that HiSparse has."""
    groups = kv_cache_config.kv_cache_groups
    return {name for group in groups if getattr(group, "host_resident", False) for name in group.layer_names}


def is_dealt(spec: Any) -> bool:
    """Whether the ranks of a DCP group deal out a group's tokens. A vLLM that does not say it deals out those of all but states."""
    return bool(getattr(spec, "dcp_sharded", not states.of(spec)))


def make_groups(kv_cache_config: Any, dcp_size: int = 1, loads_only: bool = False) -> list[Group]:
    """The groups that take part; an error names a kind of cache that is not supported.

    dcp_size: the ranks of a DCP group. loads_only: the engine gives nothing to others.
    """
    made = []
    in_host = host_layers(kv_cache_config)
    for number in transfer_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[number]
        whole = group.kv_cache_spec
        kind = ""
        for layer, spec in (getattr(whole, "kv_cache_specs", None) or {next(iter(group.layer_names), "none"): whole}).items():
            kind = type(spec).__name__
            why = refusal(spec) or (refusal(whole) if whole is not spec else "") or (states.refusal(spec) if states.is_state(spec) else "")
            if getattr(group, "host_resident", False) and not loads_only:
                why = f"a KV cache of {kind} in a pool of the host (HiSparse) is supported with kv_role kv_consumer only: {_BEHIND}"
            if in_host and states.is_state(spec):
                why = f"a KV cache of {kind} beside a pool of the host (HiSparse) is not supported: {_PART_OF_A_BLOCK}"
            if dcp_size > 1 and is_dealt(spec) and kind in _LOSE_BLOCKS:
                why = f"a KV cache of {kind} with DCP = {dcp_size} is not supported: vLLM finds no cached prefix of such a one"
            if why:
                raise ValueError(f"layer {layer}: {why}")
        # A group of full attention may have the field sliding_window too, and still keeps every block.
        made.append(
            Group(
                number,
                whole.block_size * (dcp_size if is_dealt(whole) else 1),
                window=spec.sliding_window if kind == "SlidingWindowSpec" else 0,
                retained=getattr(spec, "extra_retained_tokens", 0) if kind == "SlidingWindowSpec" else 0,
                chunk=spec.attention_chunk_size if kind == "ChunkedLocalAttentionSpec" else 0,
                state=states.is_state(spec),
            )
        )
    return made
