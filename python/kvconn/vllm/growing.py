"""Prefill: what of a prompt is computed is offered while the rest is being computed.

The scheduler knows, before each step, which blocks of a request hold computed tokens, and which will when the step is
done; the worker says so to the agent, for each layer as it is written. A request that is preempted, or given up, loses
its blocks at once: they are taken back before the next step can overwrite them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .groups import Group
from .metadata import BlockIds, GrowWork, KVConnMetadata


@dataclass
class _Request:
    transfer_id: str
    prompt: int  # tokens
    fingerprint: int
    block_ids: BlockIds = field(default_factory=list)  # per group of ours
    given: list[int] = field(default_factory=list)  # blocks of it that the worker knows
    computed: int = 0  # tokens that will be there after the last step that was scheduled


class Growing:
    """The requests whose prompts are being computed, of those that a decode engine may ask for meanwhile."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups
        self._requests: dict[str, _Request] = {}
        # A window's blocks are given back while the prompt is computed: such a group comes with the offer.
        self._grows = [not group.loses_blocks for group in groups]

    def add(self, req_id: str, transfer_id: str, prompt: int, fingerprint: int) -> None:
        if any(self._grows):
            self._requests[req_id] = _Request(transfer_id, prompt, fingerprint)

    def forget(self, req_id: str) -> bool:
        """Whether blocks of the request were given."""
        request = self._requests.pop(req_id, None)
        return request is not None and any(request.given)

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
        for n, grows in enumerate(self._grows):
            limit = -(-request.prompt // self._groups[n].block_size) if grows else 0
            more.append(request.block_ids[n][request.given[n] : limit])
            request.given[n] += len(more[n])
        meta.grows.append(GrowWork(request.transfer_id, more, now, then, request.fingerprint))

    def _ready(self, request: _Request, tokens: int) -> list[int]:
        """Per group, how many of the prompt's blocks hold all that they ever will when so many tokens are computed."""
        counts = []
        for group, grows, ids in zip(self._groups, self._grows, request.block_ids):
            whole = -(-tokens // group.block_size) if tokens >= request.prompt else tokens // group.block_size
            counts.append(min(whole, len(ids)) if grows else 0)
        return counts
