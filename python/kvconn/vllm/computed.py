"""Counts and logs the prompts that an engine computed in another engine's place.

A pair whose requests name no transfer, or whose loads all fail, gives right answers. Such a pair only does its
work twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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
# An engine of both roles serves prompts of its own too. But if only such prompts come for so long, its pair moves nothing. A line of
# the log may have to wait for _EVERY_S more. So an operator sees such a pair within a minute.
_WITHOUT_S = 25.0
_EVERY_S = 30.0
# How long to wait where a load is under way, which may end well.
_AGAIN_S = 5.0
REASONS = {
    FAILED: "their loads failed",
    NO_TRANSFER: "they named no transfer: the router, or the client, sent no kv_transfer_params",
    NOTHING_MOVED: f"for {_WITHOUT_S:g} s or more no request of this engine, whose kv_role is kv_both, has named a transfer: "
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
# The states of requests whose load is still to end.
_ON_ITS_WAY = (TO_LOAD, CLAIMED, LOADING)


class Timer(Protocol):
    def cancel(self) -> None: ...


def _later(seconds: float, call: Callable[[], None]) -> Timer:
    timer = threading.Timer(seconds, call)
    timer.name, timer.daemon = "kvconn-computed", True
    timer.start()
    return timer


class Computed:
    """Which prompts were computed here, and when the log says so.

    vLLM's scheduler calls this in its steps. If an engine is idle, no step comes. So while the log has something to say, a timer's thread
    looks too. close ends the timer. The lock guards all fields but moved, which the scheduler sets. Nobody holds the lock while the warning
    is written.
    """

    def __init__(
        self,
        kv_role: str,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Timer] = _later,
    ) -> None:
        self._one_role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role)
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._timer: Timer | None = None
        self._closed = False
        self._records: Mapping[str, Record] = {}  # of the last step
        self._last = ""  # the last request that the log is to name
        self._new: dict[str, list[int]] = {}  # by reason: prompts and tokens since they were last taken
        self._unsaid: dict[str, list[int]] = {}  # the same, since the last line of the log
        self._loaded = 0  # prompts, since the last line
        self._said = -_EVERY_S
        # For an engine of both roles, since a request last named a transfer: when the first request came that named none, when to look
        # whether such requests are to be counted, and how many of their prompts and tokens are not counted yet.
        self._alone: float | None = None
        self._due = 0.0
        self._own, self._last_own = [0, 0], ""
        # A load has ended well here, or an offer has ended. So the router names transfers, and a request that names none may be meant
        # to name none.
        self.moved = False

    def named(self) -> None:
        """A request has come that names a transfer."""
        with self._lock:
            self._named()

    def _named(self) -> None:
        self._alone, self._own = None, [0, 0]

    def step(self, output: Any, records: Mapping[str, Record]) -> None:
        """Looks at the requests that come into the batch with a step. output is vLLM's SchedulerOutput."""
        with self._lock:
            self._records = records
            for req_id in getattr(output, "preempted_req_ids", None) or ():
                if (record := records.get(req_id)) is not None:
                    record.preempted = True
            for new in output.scheduled_new_reqs:
                if (record := records.get(new.req_id)) is not None:
                    self._begins(record, new.num_computed_tokens)
            cached = output.scheduled_cached_reqs
            for req_id in cached.resumed_req_ids:
                if (record := records.get(req_id)) is not None:
                    self._begins(record, cached.num_computed_tokens[cached.req_ids.index(req_id)])
            line = self._look() if self._waits() else ""
        if line:
            logger.warning(line)

    def _begins(self, record: Record, there: int) -> None:
        reason, again = self._reason(record), record.preempted
        record.preempted = False
        tokens = record.tokens - there
        if record.state is not ASIDE:
            self._named()
        if reason and tokens > _LEFT:
            if reason is not NOTHING_MOVED:
                self._add(reason, 1, tokens, record.req_id)
                return
            if self._alone is None:
                self._alone = self._clock()
                self._due = self._alone + _WITHOUT_S
            self._own, self._last_own = [self._own[0] + 1, self._own[1] + tokens], record.req_id
        elif record.loaded and not again:
            self._loaded += 1

    def _waits(self) -> bool:
        """Whether something is to be counted or said."""
        return bool(self._own[0] or self._unsaid)

    def _look(self) -> str:
        """Counts what is due to be counted, and returns the line that the log is due."""
        now, line = self._clock(), ""
        if self._own[0] and now >= self._due:
            if any(record.state in _ON_ITS_WAY for record in list(self._records.values())):
                self._due = now + _AGAIN_S
            else:
                (prompts, tokens), self._own = self._own, [0, 0]
                self._add(NOTHING_MOVED, prompts, tokens, self._last_own)
        if self._unsaid and now - self._said >= _EVERY_S:
            line = self._line()
            self._said, self._unsaid, self._loaded = now, {}, 0
        if self._timer is None and not self._closed and self._waits():
            at = self._said + _EVERY_S if self._unsaid else self._due
            try:
                self._timer = self._later(at - now, self._tick)
            except RuntimeError:  # the system gives no thread: the next step tries again
                logger.debug("no timer for the line of prompts that were computed here", exc_info=True)
        return line

    def _tick(self) -> None:
        with self._lock:
            self._timer = None
            line = "" if self._closed else self._look()
        if line:
            logger.warning(line)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

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
        if not silent:
            self._last = req_id

    def _line(self) -> str:
        why = "; ".join(f"{REASONS[reason]} ({count} prompts, {tokens} tokens)" for reason, (count, tokens) in sorted(self._unsaid.items()))
        return (
            f"this engine computed prompts that the other engine of the pair was to compute or to load: {why}; one of the last is request "
            f"{self._last}. In the same time {self._loaded} prompts were loaded"
        )

    def take(self) -> dict[str, list[int]]:
        """Prompts and tokens by reason since the last call."""
        with self._lock:
            new, self._new = self._new, {}
        return new
