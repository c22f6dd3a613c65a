"""The worker side: it owns the agent, hands it the step's work, and turns completions into what vLLM wants to hear.

vLLM ends the engine when it hears of a request twice, or of one it does not know: every request goes into a table when
its work is accepted, and is reported when it is taken out of it.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidError, Status
from ..types import Claim, Growth, Load, Offer
from .layout import Heads, make_regions
from .metadata import CancelWork, GrowWork, KVConnMetadata, LoadWork, OfferWork, RefusedWork
from .stats import KVConnStats, Recorder

logger = logging.getLogger("kvconn.vllm")


@dataclass
class Reports:
    """What one step has to tell the scheduler."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # a part of received
    failed_blocks: set[int] = field(default_factory=set)


@dataclass
class _Loading:
    work: LoadWork
    since: float
    cancelled: bool = False


class WorkerSide:
    def __init__(self, make_agent: Callable[[], Any], idle_wait_s: float, by_layers: bool = False) -> None:
        self._agent = make_agent()
        self._idle_wait_s = idle_wait_s
        self._loads: dict[str, _Loading] = {}  # by transfer id
        self._offers: dict[str, OfferWork] = {}
        self._by_layers = by_layers
        self._regions_of: dict[str, tuple[int, ...]] = {}  # by layer that writes any: their indices
        self._written = memoryview(b"")  # by region: 1 when the step has written it
        self._begun = 0  # calls that told what this step computes: each ends what the one before it began, and so does a cancel
        self._untold: set[str] = set()  # layers of this step
        self._growing: list[GrowWork] = []  # what the step that runs computes of requests that grow
        self._stunted: set[str] = set()  # a growth was refused: those that follow it would stand in its place
        self._reports = Reports()
        self._recorder = Recorder("worker")
        self._spent_s = 0.0  # by the connector on this step
        self._lines = _Lines()
        self._closed = False

    @property
    def bootstrap_address(self) -> str | None:
        return self._agent.bootstrap_address

    def register(self, kv_caches: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any, heads: Heads) -> None:
        from kvconn import regions_from_tensor

        regions = make_regions(kv_caches, vllm_config, kv_cache_config, regions_from_tensor, heads)
        self._agent.register_kv_caches(regions)
        written = {}
        for name in kv_caches:
            written[name] = [n for n, region in enumerate(regions) if region.name == name or region.name.startswith(f"{name}[")]
        self.follow_layers(written)
        total = sum(region.block_bytes for region in regions)
        logger.info(
            "registered %d regions of %d layers: %d blocks of %d bytes",
            len(regions),
            len(kv_caches),
            kv_cache_config.num_blocks,
            total,
        )

    def follow_layers(self, regions_of: Mapping[str, Sequence[int]]) -> None:
        """What each layer writes, if the engine tells of layers at all."""
        self._regions_of = {name: tuple(regions) for name, regions in regions_of.items() if regions}
        self._written = self._agent.written
        if self._by_layers and not len(self._written):
            self._by_layers = False
            logger.warning("layers are sent when the step has ended and not when they are written: membarrier(2) is refused here")

    # -- the step's work --------------------------------------------------------------------------------------------

    def begin(self, meta: KVConnMetadata) -> None:
        """Before the forward pass, so that a long one does not delay what the peer waits for.

        Nothing here reads what the pass writes: an offer's blocks belong to a request that has ended, and of one that
        grows only those go that earlier steps have filled.
        """
        self._growing = []  # of a step that failed nothing is there
        if not meta.says_something:
            return
        began = time.perf_counter()
        self.take_back(meta)
        announces, meta.announces = meta.announces, []
        offers, meta.offers = meta.offers, []
        # A load is to start first, should its cancel come in the same step.
        starting = {work.transfer_id for work in meta.loads}
        cancels = [work for work in meta.cancels if work.transfer_id not in starting]
        meta.cancels = [work for work in meta.cancels if work.transfer_id in starting]
        if announces and self._try(lambda: self._agent.announce(announces), f"announce {len(announces)} requests"):
            for transfer_id in announces:  # one bad id must not hide the others
                self._try(lambda one=transfer_id: self._agent.announce([one]), f"announce {transfer_id!r}")
        if offers:
            self._each(offers, self._offer_all, self._offer_refused)
        if meta.claims:
            self._claim(meta.claims)
            meta.claims = []
        for refused in meta.refusals:
            self._recorder.failed("load", "bad_params")
            self._report_failed(refused)
        meta.refusals = []
        for work in cancels:
            self._cancel(work)
        if meta.grows:
            self._grow(meta.grows)
            meta.grows = []
        self._spent_s += time.perf_counter() - began

    def take_back(self, meta: KVConnMetadata) -> None:
        """Before the step writes to blocks that other requests had: nothing may read them any more."""
        retracts, meta.retracts = meta.retracts, []
        if not retracts:
            return
        # Those that are given up too are not to be loaded anew.
        given_up = [work for work in meta.cancels if not work.of_load and work.transfer_id in retracts]
        meta.cancels = [work for work in meta.cancels if work not in given_up]
        for work in given_up:
            self._cancel(work)
        self._retract(retracts)
        logger.info("took back what was sent of %s: the engine has given their blocks to others", ", ".join(retracts))

    def _retract(self, transfer_ids: Sequence[str]) -> None:
        try:
            self._agent.retract(transfer_ids)
            self._stunted.difference_update(transfer_ids)
        except InvalidError as error:  # no id at all, or an earlier request's: of it this one gave nothing
            logger.error("take back %s: %s", ", ".join(transfer_ids), error)
            for transfer_id in transfer_ids if len(transfer_ids) > 1 else ():  # nor must it hide the others
                self._retract([transfer_id])
        except Exception as error:
            logger.critical("take back %s: %s", ", ".join(transfer_ids), error)
            raise  # who reads these blocks would read another request's: the engine has to end instead

    def _grow(self, works: Sequence[GrowWork]) -> None:
        """What was there before the step goes now; what it computes, when it is written."""
        works = [work for work in works if work.transfer_id not in self._stunted]
        self._begun, self._untold = 0, set(self._regions_of)
        self._each(works, self._grow_all, self._growth_refused)

    def _grow_all(self, works: Sequence[GrowWork]) -> None:
        self._begun += 1
        self._agent.grow(
            [
                Growth(work.transfer_id, work.block_ids, work.before, work.first_block, work.prompt, work.after if self._by_layers else ())
                for work in works
            ]
        )
        for work in works:
            self._accepted(work)

    def _growth_refused(self, work: GrowWork, error: Exception) -> None:
        logger.error("grow %r: %s", work.transfer_id, error)  # its offer says what is wrong
        self._stunted.add(work.transfer_id)

    def layer_written(self, name: str) -> None:
        """A few stores: the agent looks for them."""
        if not self._growing or not self._by_layers:
            return
        began = time.perf_counter()
        if regions := self._regions_of.get(name):
            for region in regions:
                self._written[region] = 1
            self._untold.discard(name)
        self._spent_s += time.perf_counter() - began

    def step_written(self, failed: bool = False) -> None:
        """What no layer has told of. failed: an exception goes through the step, and what it was to compute is not there."""
        works, self._growing = self._growing, []
        said = self._by_layers and self._begun == 1 and not self._untold
        if works and not said and not failed:
            began = time.perf_counter()
            written = [GrowWork(work.transfer_id, [()] * len(work.after), work.after, [], work.prompt) for work in works]
            self._each(written, self._grow_all, self._growth_refused)
            self._growing = []
            self._spent_s += time.perf_counter() - began

    def load(self, meta: KVConnMetadata) -> None:
        """Where vLLM wants loads to start: after what it has queued for these blocks itself."""
        if not meta.says_something:
            return
        began = time.perf_counter()
        loads, meta.loads = meta.loads, []
        if loads:
            self._each(loads, self._load_all, self._load_refused)
        cancels, meta.cancels = meta.cancels, []
        for work in cancels:
            self._cancel(work)
        self._spent_s += time.perf_counter() - began

    def _claim(self, claims: Sequence[Claim]) -> None:
        if self._try(lambda: self._agent.claim(claims), f"claim {len(claims)} transfers"):
            for claim in claims:  # one that is refused must not hide the others; its load will say why
                self._try(lambda one=claim: self._agent.claim([one]), f"claim {claim.transfer_id!r}")

    def _try(self, call: Callable[[], None], what: str) -> Exception | None:
        """Whatever the agent says to a call, the engine lives on."""
        try:
            call()
        except Exception as error:
            logger.error("%s: %s", what, error)
            return error
        return None

    def _each(self, works: Sequence[Any], accept: Callable[[Sequence[Any]], None], refuse: Callable[[Any, Exception], None]) -> None:
        """All in one call. The agent takes them in order up to the first that it refuses, which its error names."""
        works = list(works)
        while works:
            try:
                accept(works)
                return
            except Exception as error:
                named = getattr(error, "transfer_id", None)
                place = next((n for n, work in enumerate(works) if work.transfer_id == named), None)
                if place is None and len(works) > 1:
                    # It did not come to a single one of them: find out which is to blame.
                    for work in works:
                        self._each([work], accept, refuse)
                    return
                place = place or 0
                for work in works[:place]:
                    self._accepted(work)
                refuse(works[place], error)
                works = works[place + 1 :]

    def _accepted(self, work: OfferWork | LoadWork | GrowWork) -> None:
        if isinstance(work, OfferWork):
            self._offers[work.transfer_id] = work
        elif isinstance(work, GrowWork):
            self._growing.append(work)
        else:
            self._loads[work.transfer_id] = _Loading(work, time.monotonic())

    def _offer_all(self, works: Sequence[OfferWork]) -> None:
        self._stunted.difference_update(work.transfer_id for work in works)
        self._agent.offer([Offer(work.transfer_id, work.block_ids, first_block=work.first_block, prompt=work.prompt) for work in works])
        for work in works:
            self._accepted(work)

    def _offer_refused(self, work: OfferWork, error: Exception) -> None:
        logger.error("request %s: its cache cannot be offered: %s", work.req_id, error)
        self._recorder.failed("offer", _reason(error))
        self._reports.sent.add(work.req_id)
        self._cancel(CancelWork(work.transfer_id, "prefill: the offer was refused", of_load=False))
        self._retract([work.transfer_id])

    def _load_all(self, works: Sequence[LoadWork]) -> None:
        self._agent.start_load(
            [
                Load(
                    work.transfer_id,
                    work.bootstrap_addr,
                    work.engine_id,
                    work.block_ids,
                    work.first_block,
                    tokens=[work.num_tokens] * len(work.block_ids),
                    prompt=work.prompt,
                )
                for work in works
            ]
        )
        for work in works:
            self._accepted(work)

    def _load_refused(self, work: LoadWork, error: Exception) -> None:
        logger.error("request %s: its cache cannot be loaded: %s", work.req_id, error)
        if not work.silent:
            self._recorder.failed("load", _reason(error))
            self._report_failed(work)

    def _cancel(self, work: CancelWork) -> None:
        # A load that has ended in the meantime needs no cancel. What prefill gives up was never offered, and the decode
        # engine must be told all the same.
        if work.of_load:
            loading = self._loads.get(work.transfer_id)
            if loading is None:
                return
            loading.cancelled = True
        else:
            self._stunted.discard(work.transfer_id)
        self._begun = 0  # it ends that too
        self._try(lambda: self._agent.cancel([work.transfer_id], work.reason), f"cancel {work.transfer_id}")

    # -- the step's reports -----------------------------------------------------------------------------------------

    def collect(self, empty_step: bool) -> Reports:
        """What has ended since the last step.

        A step without tokens runs only to ask this, and is followed by the next one at once: waiting a moment for an
        answer here leaves the processor to those who work on it, and hears of a completion when it comes.
        """
        began = time.perf_counter()
        completions = self._completions()
        ready = self._reports.sent or self._reports.received
        waited_s = 0.0
        if empty_step and not completions and not ready and (self._loads or self._offers) and self._idle_wait_s:
            waits = time.perf_counter()
            self._try(lambda: self._agent.wait(self._idle_wait_s) and None, "wait")
            waited_s = time.perf_counter() - waits
            completions = self._completions()
        for completion in completions:
            self._ended(completion)
        reports, self._reports = self._reports, Reports()
        self._recorder.step(self._spent_s + time.perf_counter() - began - waited_s)
        self._spent_s = 0.0
        return reports

    def stats(self) -> KVConnStats | None:
        return self._recorder.take()

    def _completions(self) -> Sequence[Any]:
        try:
            return self._agent.get_finished()
        except Exception as error:
            if not (self._loads or self._offers):
                return ()
            # Nobody can say any more whether bytes still land in these blocks, or are read from them. Giving them back
            # would mean wrong tokens, so the engine has to end instead.
            logger.critical("get_finished: %s: %d loads and %d offers have no end", error, len(self._loads), len(self._offers))
            raise

    def _ended(self, completion: Any) -> None:
        if completion.kind == "offer":
            offer = self._offers.pop(completion.transfer_id, None)
            if offer is None:
                return
            self._count(completion)
            if completion.code:
                logger.warning("request %s: its cache was not fetched: %s", offer.req_id, completion.reason)
            self._reports.sent.add(offer.req_id)
            return
        if completion.kind != "load":
            return  # no end of what the engine has given blocks for
        loading = self._loads.pop(completion.transfer_id, None)
        if loading is None:
            return
        work = loading.work
        if work.silent:
            if completion.code:
                logger.warning("request %s: the prefill engine was not told: %s", work.req_id, completion.reason)
            return
        self._count(completion)
        if completion.code:
            level = logging.INFO if loading.cancelled else logging.ERROR
            logger.log(level, "request %s: its cache was not loaded: %s", work.req_id, completion.reason)
            self._report_failed(work)
            return
        self._lines.put(completion, work, loading.since)
        self._reports.received.add(work.req_id)

    def _count(self, completion: Any) -> None:
        if completion.code:
            self._recorder.failed(completion.kind, _reason(completion))
        else:
            self._recorder.moved(completion)

    def _report_failed(self, work: LoadWork | RefusedWork) -> None:
        self._reports.received.add(work.req_id)
        self._reports.failed.add(work.req_id)
        for group in work.block_ids:
            self._reports.failed_blocks.update(group)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._growing, self._written = [], memoryview(b"")  # it may be another agent's next
            self._try(self._agent.close, "close")
            self._lines.close()


class _Lines:
    """Writes a line of the log for each load, beside the engine's step: it would be the dearest part of it."""

    _LIMIT = 4096  # lines that wait; more are counted in the statistics only
    _NAP_S = 0.1  # between two looks while there are lines: to wake the thread is the dearest part of handing one over

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, LoadWork, float, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def put(self, completion: Any, work: LoadWork, since: float) -> None:
        if not logger.isEnabledFor(logging.INFO) or self._queue.qsize() > self._LIMIT:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvconn-lines", daemon=True)
            self._thread.start()
        self._queue.put((completion, work, since, time.monotonic()))

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            logger.info("kvconn load %s", json.dumps(_load_line(*entry)))
            if self._queue.empty():
                self._closing.wait(self._NAP_S)

    def close(self) -> None:
        if self._thread is not None:
            self._closing.set()
            self._queue.put(None)
            self._thread.join(5)


def _reason(failure: Any) -> str:
    """Of a completion or an error, in one word."""
    try:
        return Status(failure.code).name.lower()
    except (AttributeError, ValueError):
        return "other"


def _load_line(completion: Any, work: LoadWork, since: float, until: float) -> dict[str, Any]:
    took = completion.transfer_s
    return {
        "transfer_id": completion.transfer_id,
        "request_id": work.req_id,
        "bytes": completion.bytes,
        "blocks": sum(len(group) for group in work.block_ids),
        "first_block": list(work.first_block),
        "segments": completion.segments,
        "transport": completion.transport,
        "ms": round(took * 1e3, 3),
        "gb_per_s": round(completion.bytes / took / 1e9, 3) if took > 0 else 0.0,
        "wait_ms": round(completion.wait_s * 1e3, 3),
        "total_ms": round((until - since) * 1e3, 3),
    }
