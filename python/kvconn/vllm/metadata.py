"""The messages between the scheduler side and the worker side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

from .. import weights
from ..types import Claim, Load
from .shards import WHOLE, Shard

BlockIds = list[list[int]]  # one list per KV cache group, in the order of the prompt


def of_parts(parts: Sequence[int], of_groups: Sequence[Any]) -> Sequence[Any]:
    """What is said of each of vLLM's groups, for each group of the agent. parts: the former's place for each of the latter; empty:
    they are the same."""
    return [of_groups[place] for place in parts] if parts and of_groups else of_groups


class OfPrompt:
    """Work about the cache of a prompt. The scheduler side knows the prompt, the worker which weights it has."""

    prompt: int

    def mark(self) -> int:
        """The prompt's fingerprint for the agent. Raises TransferError if the weights are not to be compared with another
        engine's."""
        return weights.engine.of_prompt(self.prompt)


@dataclass
class OfferWork(OfPrompt):
    """Prefill: the request has ended, and these blocks, from first_block on, hold its prompt."""

    req_id: str
    transfer_id: str
    block_ids: BlockIds
    first_block: list[int]
    prompt: int = 0  # the prompt's fingerprint; 0: not said


@dataclass
class PartialWork(OfPrompt):
    """Prefill: a partial offer of a request whose prompt is being computed.

    block_ids are the blocks that the worker does not know yet; a group's first ones begin at first_block. before and after
    count, per group, the prompt's blocks that are there before the step and after it.
    """

    transfer_id: str
    block_ids: BlockIds
    before: list[int]
    after: list[int]
    prompt: int = 0  # the prompt's fingerprint; 0: not said
    first_block: Sequence[int] = ()


@dataclass
class LoadWork(OfPrompt):
    """Decode: load the prompt's blocks from first_block on into block_ids, as far as num_tokens tokens of the prompt go.

    A load without block ids is silent: the prefill engine hears that decode needs nothing, and frees its blocks; vLLM
    gets no report of it.
    """

    req_id: str
    transfer_id: str
    bootstrap_addr: str
    engine_id: str
    block_ids: BlockIds
    first_block: list[int]
    num_tokens: int = 0
    prompt: int = 0  # the prompt's fingerprint; 0: not said

    @property
    def silent(self) -> bool:
        return not any(self.block_ids)

    def nothing(self) -> LoadWork:
        """The silent load in the place of one that cannot be made."""
        return LoadWork(self.req_id, self.transfer_id, self.bootstrap_addr, self.engine_id, [], [])

    def load(self, after: int, shard: Shard = WHOLE, parts: Sequence[int] = ()) -> Load:
        """The Load for the agent of a rank. after: the moment after which the blocks may be written. parts: see of_parts.

        A rank that has none of the tokens needs nothing. Its load is not silent, since vLLM waits for each rank's report.
        """
        block_ids, tokens = shard.cut(self.num_tokens, self.block_ids, self.first_block)
        return Load(
            self.transfer_id,
            self.bootstrap_addr,
            self.engine_id,
            of_parts(parts, block_ids),
            of_parts(parts, self.first_block),
            tokens=of_parts(parts, tokens),
            prompt=self.mark() if any(block_ids) else 0,
            after=after,
        )


@dataclass
class RefusedWork:
    """Decode: the request counts on a cache that cannot be loaded. The worker reports these blocks as a failed load."""

    req_id: str
    block_ids: BlockIds


@dataclass
class CancelWork:
    """The request has ended before its transfer did.

    of_load: the request's load is under way, and need not be finished. Otherwise the request was announced, and no offer will
    follow.
    """

    transfer_id: str
    reason: str
    of_load: bool


@dataclass
class KVConnMetadata(_base.KVConnectorMetadata):
    """Scheduler to workers, in each engine step. A worker reads it and never changes it."""

    announces: list[str] = field(default_factory=list)
    offers: list[OfferWork] = field(default_factory=list)
    partials: list[PartialWork] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)  # transfers whose blocks vLLM has taken back
    claims: list[Claim] = field(default_factory=list)  # requests that wait for blocks; prefill must keep their cache until then
    loads: list[LoadWork] = field(default_factory=list)
    refusals: list[RefusedWork] = field(default_factory=list)
    cancels: list[CancelWork] = field(default_factory=list)
    # The step computes no token: the engine runs it only to hear of transfers.
    empty_step: bool = False

    @property
    def says_something(self) -> bool:
        return bool(
            self.announces or self.offers or self.partials or self.withdrawals or self.claims or self.loads or self.refusals or self.cancels
        )


@dataclass
class KVConnHandshake(_base.KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once: the address at which decode engines find this engine."""

    bootstrap_addr: str
