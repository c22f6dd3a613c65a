"""Prefill: partial offers, which send the computed part of a prompt while the rest is being computed.

Before each step the scheduler knows which blocks of a request hold computed tokens, and which blocks will hold some when the
step is done. The worker tells the agent so, for each layer when the layer is written. A request that is preempted or given up
loses its blocks at once, so its partial offers are withdrawn before the next step can overwrite the blocks.

While vLLM computes a prompt it gives back a window's blocks, except those that the prompt's last token attends to. A
decode engine can use only these. Their first position is known before the prompt is begun: the partial offers of such a
group begin there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .groups import NULL_BLOCK, Group
from .metadata import BlockIds, KVConnMetadata, PartialWork


class Partial:
    """How much of one request's prompt the worker knows."""

    __slots__ = ("block_ids", "computed", "ends", "fingerprint", "first", "given", "prompt", "transfer_id")

    def __init__(self, transfer_id: str, prompt: int, fingerprint: int, first: list[int], ends: list[int]) -> None:
        self.transfer_id = transfer_id
        self.prompt = prompt  # tokens
        self.fingerprint = fingerprint
        self.first = first  # per group: the first block that vLLM keeps until the prompt's end
        self.ends = ends  # per group: the number of the prompt's blocks; 0: the group comes with the offer
        self.block_ids: BlockIds = []
        self.given: list[int] = []  # per group: how many blocks, from first on, the worker knows
        self.computed = 0  # tokens that are there after the last step that was scheduled


class HasPartial(Protocol):
    """A scheduler's record of a request."""

    partial: Partial | None


class _Unknown:
    """Stands in the place of a record that is not there."""

    partial = None


class PartialOffers:
    """Keeps the Partial of each request up to date with vLLM's steps. The records of the requests belong to the scheduler side."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self.count = 0  # requests that have a Partial
        self.given = 0  # how many of these have blocks that the worker knows

    def begin(self, transfer_id: str, prompt: int, fingerprint: int, loaded: int, ends_there: bool) -> Partial | None:
        """The Partial of a prompt; None if every group has to come with the offer. loaded: the tokens that decode loads.

        ends_there: the request ends with the prompt's last token. If a request goes on, or if its last token costs a block,
        vLLM gives back blocks of a window while they are still being sent. Groups with such a window come with the offer. If
        one of their blocks is gone by then, the offer says so.
        """
        first = [group.gone(loaded) for group in self._groups]
        ends = [
            -(-prompt // group.block_size) if not group.state and self._stays(group, prompt, begin, ends_there) else 0
            for group, begin in zip(self._groups, first)
        ]
        if not any(ends):
            return None
        self.count += 1
        return Partial(transfer_id, prompt, fingerprint, first, ends)

    @staticmethod
    def _stays(group: Group, prompt: int, begin: int, ends_there: bool) -> bool:
        """Whether a request keeps the group's blocks from begin on until it has ended."""
        return not group.loses_blocks or (ends_there and group.gone(prompt) <= begin)

    def end(self, partial: Partial | None) -> dict[int, int]:
        """The groups of which the worker knows blocks, each with the position of the first one."""
        if partial is None:
            return {}
        self.count -= 1
        self.given -= any(partial.given)
        return {n: partial.first[n] for n, given in enumerate(partial.given) if given}

    def step(self, output: Any, requests: Mapping[str, HasPartial], meta: KVConnMetadata) -> None:
        """Adds the partial offers and withdrawals of a step to meta; output is vLLM's SchedulerOutput."""
        if not self.count:
            return
        for req_id in getattr(output, "preempted_req_ids", None) or ():
            if partial := requests.get(req_id, _Unknown).partial:
                self._withdraw(partial, meta)
        for new in output.scheduled_new_reqs:
            if partial := requests.get(new.req_id, _Unknown).partial:
                self._replace(partial, new.block_ids)
                self._compute(partial, 0, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id], meta)
        cached = output.scheduled_cached_reqs
        for place, req_id in enumerate(cached.req_ids):
            if partial := requests.get(req_id, _Unknown).partial:
                blocks, there = cached.new_block_ids[place], cached.num_computed_tokens[place]
                after = there + output.num_scheduled_tokens[req_id]
                if req_id in cached.resumed_req_ids:
                    self._withdraw(partial, meta)
                    self._replace(partial, blocks or ())
                    there = 0
                elif blocks:
                    for group, ours in zip(self._groups, partial.block_ids):
                        ours.extend(blocks[group.number])
                if there < partial.computed:  # another connector had loaded a prefix, and that load has failed
                    self._take_back(partial, meta)
                self._compute(partial, there, after, meta)

    def stop(self, requests: Mapping[str, HasPartial], meta: KVConnMetadata) -> None:
        """Takes everything back, since vLLM computes nothing though requests want it: vLLM pauses, and may throw the cache away.

        A request that goes on after the pause is offered anew.
        """
        for record in requests.values() if self.given else ():
            if record.partial is not None:
                self._take_back(record.partial, meta)

    def _take_back(self, partial: Partial, meta: KVConnMetadata) -> None:
        """Takes back the partial offers of a request that keeps its blocks."""
        held = partial.block_ids
        self._withdraw(partial, meta)
        self._replace(partial, ())
        partial.block_ids = held

    def _replace(self, partial: Partial, block_ids: Any) -> None:
        partial.block_ids = [list(block_ids[group.number]) if block_ids else [] for group in self._groups]
        attended = [(ids, begin) for group, ids, begin in zip(self._groups, partial.block_ids, partial.first) if not group.state]
        if any(ids[begin : begin + 1] == [NULL_BLOCK] for ids, begin in attended):
            partial.block_ids = []  # the cache hit has less of the window than is to be sent: the offer says so
        self.given -= any(partial.given)
        partial.given = [0] * len(self._groups)
        partial.computed = 0

    def _withdraw(self, partial: Partial, meta: KVConnMetadata) -> None:
        if any(partial.given):
            meta.withdrawals.append(partial.transfer_id)
            self._replace(partial, ())

    def _compute(self, partial: Partial, before: int, after: int, meta: KVConnMetadata) -> None:
        """A step takes a prompt from so many tokens to so many.

        When a request comes into the batch, before is 0 even if the request has a cached prefix. The same step may still
        have to fill that prefix: another request of the step computes it, or another connector loads it.
        """
        before, after = min(before, partial.prompt), min(after, partial.prompt)
        if after <= partial.computed or not partial.block_ids:
            return  # the whole prompt is there: the request decodes
        partial.computed = after
        had = any(partial.given)
        now, then = self._ready(partial, before), self._ready(partial, after)
        if not any(then):
            return
        more: BlockIds = []
        for n, begin in enumerate(partial.first):
            more.append(partial.block_ids[n][begin + partial.given[n] : partial.ends[n]])
            partial.given[n] += len(more[n])
        self.given += any(partial.given) - had
        meta.partials.append(PartialWork(partial.transfer_id, more, now, then, partial.fingerprint, partial.first))

    def _ready(self, partial: Partial, tokens: int) -> list[int]:
        """Per group, how many of the prompt's blocks are complete when so many tokens are computed; 0 as long as none of them
        is to be sent."""
        counts = []
        for group, begin, end, ids in zip(self._groups, partial.first, partial.ends, partial.block_ids):
            whole = -(-tokens // group.block_size) if tokens >= partial.prompt else tokens // group.block_size
            whole = min(whole, len(ids), end)
            counts.append(whole if whole > begin else 0)
        return counts
