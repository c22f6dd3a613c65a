"""KV cache groups: which blocks of a request each of them keeps.

A group of full attention keeps every block. A group of a sliding window, or of attention in chunks, gives back the blocks
that no later token attends to. vLLM puts the null block in their place, so the positions of the others stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NULL_BLOCK = 0

# A state is not made of blocks, and vLLM itself rebuilds some caches after a load: to load those would give wrong bytes.
_KINDS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_NOT_THOSE = ("RSWASpec", "HiddenStateCacheSpec", "KpoolTailSpec")


@dataclass(frozen=True)
class Group:
    number: int  # among all groups of the engine
    block_size: int
    window: int = 0  # tokens that a token attends to, itself among them; 0: all
    retained: int = 0  # tokens that are kept beside the window
    chunk: int = 0  # attention in chunks of so many tokens

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


def first_kept(block_ids: Sequence[int]) -> int:
    """The position of the first block that is there."""
    return next((place for place, block in enumerate(block_ids) if block != NULL_BLOCK), len(block_ids))


def transfer_groups(kv_cache_config: Any) -> list[int]:
    """The KV cache groups that take part in transfers; all, in a vLLM that does not mark them."""
    return [number for number, group in enumerate(kv_cache_config.kv_cache_groups) if getattr(group, "enable_kv_transfer", True)]


def make_groups(kv_cache_config: Any) -> list[Group]:
    """The groups that take part; an error names a kind of cache that is not supported."""
    made = []
    for number in transfer_groups(kv_cache_config):
        group = kv_cache_config.kv_cache_groups[number]
        whole = group.kv_cache_spec
        kinds: list[str] = []
        for spec in getattr(whole, "kv_cache_specs", {"": whole}).values():
            kinds = [kind.__name__ for kind in type(spec).__mro__]
            replayed = getattr(spec, "prefix_replay_tokens", 0)
            if replayed or kinds[0] in _NOT_THOSE or not set(kinds) & set(_KINDS) or getattr(group, "host_resident", False):
                raise ValueError(
                    f"KVConnConnector: a KV cache of {kinds[0]} is not supported: full attention, MLA, sliding windows and "
                    "attention in chunks are"
                )
        # A group of full attention may have the field sliding_window too, and still keeps every block.
        made.append(
            Group(
                number,
                whole.block_size,
                window=spec.sliding_window if "SlidingWindowSpec" in kinds else 0,
                retained=getattr(spec, "extra_retained_tokens", 0) if "SlidingWindowSpec" in kinds else 0,
                chunk=spec.attention_chunk_size if "ChunkedLocalAttentionSpec" in kinds else 0,
            )
        )
    return made
