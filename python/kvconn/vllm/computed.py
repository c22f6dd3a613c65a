"""Counts and logs the prompts that an engine computed in another engine's place.

A pair whose requests name no transfer, or whose loads all fail, gives right answers. Such a pair only does its
work twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from .params import Refused
from .records import ASIDE, CLAIMED, LOADING, SETTLED, TO_LOAD, Record

logger = logging.getLogger("kvconn.vllm")

# Why a prompt was computed here. The words are labels of a metric.
FAILED = "failed_load"
NO_TRANSFER = "no_transfer"
NOTHING_MOVED = "nothing_moved"
BAD_PARAMS = "bad_params"
NOT_TAKEN = "not_taken"
SHORT = "below_threshold"
PREEMPTED = "preempted"
SIBLING = "sibling"
REASONS = {
    FAILED: "their loads failed",
    NO_TRANSFER: "they named no transfer: the router, or the client, sent no kv_transfer_params",
    NOTHING_MOVED: "for a minute or more no request of this engine, whose kv_role is kv_both, has named a transfer: "
    "the router, or the client, sends no kv_transfer_params",
    BAD_PARAMS: "their kv_transfer_params were refused",
    NOT_TAKEN: "there was nothing to load for them in vLLM's view: they ask for prompt_logprobs, or lack no more than a state",
    SHORT: "they were short: kv_recompute_threshold, or the router's --decode-below",
    PREEMPTED: "vLLM preempted them, and their loads were gone with their blocks",
    SIBLING: "another sample of the same request had the transfer",
}
# Prompts of these reasons are counted, but the log leaves them out: nothing is wrong.
_SILENT = (SHORT, SIBLING, PREEMPTED)
# A load leaves the last token to be computed.
_LEFT = 1
_EVERY_S = 30.0
# The states of requests whose load is still to end.
_ON_ITS_WAY = (TO_LOAD, CLAIMED, LOADING)
# An engine of both roles serves prompts of its own too. But if only such prompts come for so long, its pair moves nothing.
_WITHOUT_S = 60.0


class Computed:
    def __init__(self, kv_role: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._one_role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role)
        self._clock = clock
        self._new: dict[str, list[int]] = {}  # by reason: prompts and tokens since they were last taken
        self._unsaid: dict[str, list[int]] = {}  # the same, since the last line of the log
        self._loaded = 0  # prompts, since the last line
        self._said = -_EVERY_S
        # For an engine of both roles, since a request last named a transfer: when the first request came that named none, and how
        # many prompts and tokens of such requests are not counted yet.
        self._alone: float | None = None
        self._own = [0, 0]
        # A load has ended well here, or an offer has ended. So the router names transfers, and a request that names none may be meant
        # to name none.
        self.moved = False

    def named(self) -> None:
        """A request has come that names a transfer."""
        self._alone, self._own = None, [0, 0]

    def step(self, output: Any, records: Mapping[str, Record]) -> None:
        """Looks at the requests that come into the batch with a step. output is vLLM's SchedulerOutput."""
        for req_id in getattr(output, "preempted_req_ids", None) or ():
            if (record := records.get(req_id)) is not None:
                record.preempted = True
        for new in output.scheduled_new_reqs:
            if (record := records.get(new.req_id)) is not None:
                self._begins(record, new.num_computed_tokens, records)
        cached = output.scheduled_cached_reqs
        for req_id in cached.resumed_req_ids:
            if (record := records.get(req_id)) is not None:
                self._begins(record, cached.num_computed_tokens[cached.req_ids.index(req_id)], records)

    def _begins(self, record: Record, there: int, records: Mapping[str, Record]) -> None:
        reason, again = self._reason(record), record.preempted
        record.preempted = False
        tokens = record.tokens - there
        if record.state is not ASIDE:
            self.named()
        if reason and tokens > _LEFT:
            if reason is not NOTHING_MOVED:
                self._add(reason, 1, tokens, record.req_id)
                return
            now = self._clock()
            self._alone = now if self._alone is None else self._alone
            prompts, tokens = self._own[0] + 1, self._own[1] + tokens
            if now - self._alone < _WITHOUT_S or any(each.state in _ON_ITS_WAY for each in records.values()):
                self._own = [prompts, tokens]
                return
            self._own = [0, 0]
            self._add(NOTHING_MOVED, prompts, tokens, record.req_id)
        elif record.loaded and not again:
            self._loaded += 1

    def _reason(self, record: Record) -> str:
        """Why a request's prompt would be computed here, if it is; none where that is this engine's part."""
        state = record.state
        if state is SETTLED:
            if record.preempted:
                return PREEMPTED if record.loaded else ""  # else it was counted when it came
            if isinstance(record.params, Refused):
                return BAD_PARAMS
            return FAILED if record.failed else SHORT if record.short else NOT_TAKEN
        if state is ASIDE and not record.preempted:
            if record.sibling:
                return SIBLING if self._one_role == "decode" else ""
            return SHORT if record.short else NO_TRANSFER if self._one_role else NOTHING_MOVED
        return ""

    def _add(self, reason: str, prompts: int, tokens: int, req_id: str) -> None:
        silent = reason in _SILENT or (reason is NOTHING_MOVED and self.moved)
        for counts in (self._new,) if silent else (self._new, self._unsaid):
            count = counts.setdefault(reason, [0, 0])
            count[0] += prompts
            count[1] += tokens
        if silent:
            return
        now = self._clock()
        if now - self._said < _EVERY_S:
            return
        self._said = now
        why = "; ".join(f"{REASONS[reason]} ({count} prompts, {tokens} tokens)" for reason, (count, tokens) in sorted(self._unsaid.items()))
        logger.warning(
            "this engine computed prompts that the other engine of the pair was to compute or to load: %s; the last one is request %s. "
            "In the same time %d prompts were loaded",
            why,
            req_id,
            self._loaded,
        )
        self._unsaid, self._loaded = {}, 0

    def take(self) -> dict[str, list[int]]:
        """Prompts and tokens by reason since the last call."""
        new, self._new = self._new, {}
        return new
