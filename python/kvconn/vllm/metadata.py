"""What the scheduler side and the worker side tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base

from ..types import Claim

BlockIds = list[list[int]]  # one list per KV cache group, in the order of the prompt


@dataclass
class OfferWork:
    """Prefill: the request has ended, and these blocks, from first_block on, hold its prompt."""

    req_id: str
    transfer_id: str
    block_ids: BlockIds
    first_block: list[int]
    prompt: int = 0  # its fingerprint; 0: not said


@dataclass
class LoadWork:
    """Decode: put the blocks from first_block on into block_ids, as far as num_tokens tokens of the prompt go.

    Without block ids nothing is wanted: the prefill engine is told so and frees, and vLLM hears nothing of it.
    """

    req_id: str
    transfer_id: str
    bootstrap_addr: str
    engine_id: str
    block_ids: BlockIds
    first_block: list[int]
    num_tokens: int = 0
    prompt: int = 0

    @property
    def silent(self) -> bool:
        return not any(self.block_ids)


@dataclass
class RefusedWork:
    """Decode: the request counts on a cache that cannot be had; it fails as a load of these blocks does."""

    req_id: str
    block_ids: BlockIds


@dataclass
class CancelWork:
    """The request is over before its transfer was: a load that need not end, or an offer that will never come."""

    transfer_id: str
    reason: str
    of_load: bool


@dataclass
class GrowWork:
    """Prefill: the request is being computed. block_ids are new, the first ones of a group begin at first_block; so many of
    the prompt's blocks, per group, are there before the step, and after it."""

    transfer_id: str
    block_ids: BlockIds
    before: list[int]
    after: list[int]
    prompt: int = 0
    first_block: Sequence[int] = ()


@dataclass
class KVConnMetadata(_base.KVConnectorMetadata):
    """Scheduler to workers, in each engine step."""

    announces: list[str] = field(default_factory=list)
    offers: list[OfferWork] = field(default_factory=list)
    grows: list[GrowWork] = field(default_factory=list)
    retracts: list[str] = field(default_factory=list)  # transfers whose blocks vLLM has taken back
    claims: list[Claim] = field(default_factory=list)  # requests that wait for blocks; their cache must be kept until then
    loads: list[LoadWork] = field(default_factory=list)
    refusals: list[RefusedWork] = field(default_factory=list)
    cancels: list[CancelWork] = field(default_factory=list)
    # No token is computed in this step: the engine runs it only to hear of transfers.
    empty_step: bool = False

    @property
    def says_something(self) -> bool:
        return bool(
            self.announces or self.offers or self.grows or self.retracts or self.claims or self.loads or self.refusals or self.cancels
        )


@dataclass
class KVConnHandshake(_base.KVConnectorHandshakeMetadata):
    """A worker to the scheduler, once: where decode engines find this engine."""

    bootstrap_addr: str
