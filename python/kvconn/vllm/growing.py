"""Prefill: what of a prompt is computed is offered while the rest is being computed.

The scheduler knows, before each step, which blocks of a request hold computed tokens, and which will when the step is
done; the worker says so to the agent, for each layer as it is written. A request that is preempted, or given up, loses
its blocks at once: they are taken back before the next step can overwrite them.

A window's blocks are given back while the prompt is computed, but for those that its last token attends to. Only these
are of use to a decode engine, and where they begin is known beforehand: such a group grows from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .groups import NULL_BLOCK, Group
from .metadata import BlockIds, GrowWork, KVConnMetadata


@dataclass
class _Request:
    transfer_id: str
    prompt: int  # tokens
    fingerprint: int
    first: list[int]  # per group of ours: its first block that is kept until the prompt's end
    ends: list[int]  # the prompt's blocks; 0: the group comes with the offer
    block_ids: BlockIds = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # blocks of it, from first on, that the worker knows
    computed: int = 0  # tokens that will be there after the last step that was scheduled


class Growing:
    """The requests whose prompts are being computed, of those that a decode engine may ask for meanwhile."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self._requests: dict[str, _Request] = {}

    def add(self, req_id: str, transfer_id: str, prompt: int, fingerprint: int, loaded: int, ends_there: bool) -> None:
        """A prompt, of which a decode engine loads so many tokens; whether the request ends with the prompt's last token.

        One that goes on gives back blocks of the window's that are still being sent, and so does a last token that costs
        one: these groups come with the offer, which says what is wrong if one of them is gone.
        """
        first = [group.gone(loaded) for group in self._groups]
        ends = [
            -(-prompt // group.block_size) if not group.loses_blocks or (ends_there and group.gone(prompt) <= begin) else 0
            for group, begin in zip(self._groups, first)
        ]
        if any(ends):
            self._requests[req_id] = _Request(transfer_id, prompt, fingerprint, first, ends)

    def forget(self, req_id: str) -> dict[int, int]:
        """The groups of which blocks of the request were given, each with the position of the first one."""
        request = self._requests.pop(req_id, None)
        return {n: request.first[n] for n, given in enumerate(request.given) if given} if request else {}

    def step(self, output: Any, meta: KVConnMetadata) -> None:
        """Adds what a step will compute; output is vLLM's SchedulerOutput."""
        if not self._requests:
            return
        for req_id in getattr(output, "preempted_req_ids", None) or ():
            self._take_back(req_id, meta)
        for new in output.scheduled_new_reqs:
            if request := self._requests.get(new.req_id):
                self._replace(request, new.block_ids)
                self._compute(request, 0, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id], meta)
        cached = output.scheduled_cached_reqs
        for place, req_id in enumerate(cached.req_ids):
            if request := self._requests.get(req_id):
                blocks, there = cached.new_block_ids[place], cached.num_computed_tokens[place]
                after = there + output.num_scheduled_tokens[req_id]
                if req_id in cached.resumed_req_ids:
                    self._take_back(req_id, meta)
                    self._replace(request, blocks or ())
                    there = 0
                elif blocks:
                    for group, ours in zip(self._groups, request.block_ids):
                        ours.extend(blocks[group.number])
                if there < request.computed:  # what a connector beside this one had loaded was no good
                    held = request.block_ids
                    self._take_back(req_id, meta)
                    self._replace(request, ())
                    request.block_ids = held
                self._compute(request, there, after, meta)

    def _replace(self, request: _Request, block_ids: Any) -> None:
        request.block_ids = [list(block_ids[group.number]) if block_ids else [] for group in self._groups]
        if any(ids[begin : begin + 1] == [NULL_BLOCK] for ids, begin in zip(request.block_ids, request.first)):
            request.block_ids = []  # a hit that has less of the window than is to be sent: the offer says so
        request.given = [0] * len(self._groups)
        request.computed = 0

    def _take_back(self, req_id: str, meta: KVConnMetadata) -> None:
        request = self._requests.get(req_id)
        if request is not None and any(request.given):
            meta.retracts.append(request.transfer_id)
            self._replace(request, ())

    def _compute(self, request: _Request, before: int, after: int, meta: KVConnMetadata) -> None:
        """A step takes a prompt from so many tokens to so many.

        Of a request that comes into the batch nothing counts as there before: what it has by a hit is computed in this
        very step, if another request of the step has the same prefix, or loaded in it by a connector beside this one.
        """
        before, after = min(before, request.prompt), min(after, request.prompt)
        if after <= request.computed or not request.block_ids:
            return  # all of the prompt is there: it decodes
        request.computed = after
        now, then = self._ready(request, before), self._ready(request, after)
        if not any(then):
            return
        more: BlockIds = []
        for n, begin in enumerate(request.first):
            more.append(request.block_ids[n][begin + request.given[n] : request.ends[n]])
            request.given[n] += len(more[n])
        meta.grows.append(GrowWork(request.transfer_id, more, now, then, request.fingerprint, request.first))

    def _ready(self, request: _Request, tokens: int) -> list[int]:
        """Per group, how many of the prompt's blocks hold all that they ever will when so many tokens are computed; 0 as
        long as there is none of those that go."""
        counts = []
        for group, begin, end, ids in zip(self._groups, request.first, request.ends, request.block_ids):
            whole = -(-tokens // group.block_size) if tokens >= request.prompt else tokens // group.block_size
            whole = min(whole, len(ids), end)
            counts.append(whole if whole > begin else 0)
        return counts
