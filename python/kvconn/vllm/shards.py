"""Decode context parallelism (DCP): which tokens of a prompt a rank has.

The ranks of a DCP group deal a prompt's tokens out among them, some tokens (vLLM's interleave size) to each rank in turn. A
block of vLLM's scheduler has as many tokens as a block of each of these ranks together. On a rank, the tokens that it has lie
one after the other, as those of a shorter prompt would.

Groups whose spec is not dcp_sharded have all tokens on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .._engine import Rank
from .groups import is_dealt, transfer_groups


def dcp_size(parallel_config: Any) -> int:
    return getattr(parallel_config, "decode_context_parallel_size", 1) or 1


@dataclass(frozen=True)
class Shard:
    """A rank's share of the tokens."""

    rank: int = 0  # in its DCP group
    size: int = 1
    interleave: int = 1
    blocks: tuple[int, ...] = ()  # per group that takes part in transfers: tokens of a rank's block; 0: the group is not dealt out

    @property
    def name(self) -> str:
        """What regions of such a share have in their names."""
        return f"dcp {self.rank}/{self.size} by {self.interleave}" if self.size > 1 else ""

    def facts(self) -> dict[str, str]:
        """What two engines must have in common."""
        if not any(self.blocks):
            return {}
        return {"decode_context_parallel": f"{self.size} ranks, {self.interleave} tokens in turn"}

    def tokens(self, prompt: int) -> int:
        """How many of a prompt's tokens the rank has."""
        rounds, rest = divmod(prompt, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def cut(self, prompt: int, block_ids: Sequence[Sequence[int]], first: Sequence[int]) -> tuple[list[Sequence[int]], list[int]]:
        """The blocks that have tokens of the prompt on this rank, and how many tokens it has; both per group."""
        ids, tokens = list(block_ids), [prompt] * len(block_ids)
        for n, block in enumerate(self.blocks[: len(ids)]):
            if block:
                tokens[n] = self.tokens(prompt)
                ids[n] = ids[n][: max(0, -(-tokens[n] // block) - first[n])]
        return ids, tokens

    def arranged(self, rank: Rank) -> Rank:
        """The rank by the number that agents know it by: the ranks of one share come one after the other.

        Agents find by the numbers which ranks have heads in common. In this order ranks of unequal shares have none.
        """
        if not any(self.blocks):
            return rank
        return replace(rank, tp_rank=self.rank * (rank.tp_size // self.size) + rank.tp_rank // self.size)


WHOLE = Shard()


def shard_of(parallel_config: Any, kv_cache_config: Any) -> Shard:
    """This worker's share, once vLLM has set its groups up."""
    size = dcp_size(parallel_config)
    if size == 1:
        return WHOLE
    from vllm.distributed import parallel_state

    rank = parallel_state.get_dcp_group().rank_in_group
    interleave = int(getattr(parallel_config, "cp_kv_cache_interleave_size", 1) or 1)
    specs = [kv_cache_config.kv_cache_groups[number].kv_cache_spec for number in transfer_groups(kv_cache_config)]
    blocks = tuple(spec.block_size if is_dealt(spec) else 0 for spec in specs)
    for block in filter(None, blocks):
        if block % interleave:
            raise ValueError(f"cp_kv_cache_interleave_size = {interleave} does not divide a block of {block} tokens")
    return Shard(rank, size, interleave, blocks)
