"""The worker side: it owns the agent, hands it the step's work, and turns completions into what vLLM wants to hear.

vLLM ends the engine if a worker reports a request twice, or one that vLLM does not know. So each request goes into a table
when the agent accepts its work, and is reported when it is taken out of the table.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidError, TransferError
from ..types import Claim, Offer, PartialOffer
from .groups import host_layers, transfer_parts
from .hand_over import hand_over
from .layout import Heads, make_regions, regions_by_layer
from .load_log import LoadLog
from .metadata import CancelWork, KVConnMetadata, LoadWork, OfferWork, PartialWork, RefusedWork, of_parts
from .moments import DeviceMoments, HostMoments, device_of, first_on_gpu, moments_of
from .shards import WHOLE, Shard
from .stats import KVConnStats, Recorder, reason_of
from .step import BEGUN, LOADED, UNCALLED, WITHDRAWN, WRITTEN, Step

logger = logging.getLogger("kvconn.vllm")


@dataclass
class Reports:
    """The reports of one step to the scheduler."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # a part of received
    failed_blocks: set[int] = field(default_factory=set)


@dataclass
class _Loading:
    work: LoadWork
    since: float
    posted_s: float  # what its part of the call took, on the engine's time
    cancelled: bool = False


class WorkerSide:
    def __init__(
        self, make_agent: Callable[[], Any], idle_wait_s: float, by_layers: bool = False, shard: Shard = WHOLE, rank: str = ""
    ) -> None:
        self._agent = make_agent()
        self._shard, self._parts = shard, list[int]()
        self._idle_wait_s = idle_wait_s
        self._loads: dict[str, _Loading] = {}  # by transfer id
        self._offers: dict[str, OfferWork] = {}
        self._by_layers = by_layers
        self._regions_of: dict[str, array[int]] = {}  # the indices of the regions that a layer writes
        self._moments: HostMoments | DeviceMoments = HostMoments(self._agent)
        self._marks = self._moments.marks
        self._uncalled_told = False  # that vLLM does not call all layers
        self._step: Step | None = None  # the step that runs, unless its metadata says nothing
        # Transfers of which a partial offer was refused: the blocks of the next one would stand in its place.
        self._broken: set[str] = set()
        self._reports = Reports()
        self._recorder = Recorder("worker")
        self._spent_s = 0.0  # the connector's own time on this step
        self._posted_s = 0.0  # for each load of the last call
        self._load_log, self._closed = LoadLog(rank, shard), False

    @property
    def bootstrap_address(self) -> str | None:
        return self._agent.bootstrap_address

    def register(self, kv_caches: Mapping[str, Any], vllm_config: Any, kv_cache_config: Any, heads: Heads) -> None:
        from kvconn import regions_from_tensor

        places = [place for place, _ in transfer_parts(kv_cache_config)]
        self._parts = places if len(places) > len(set(places)) else []
        on_host = host_layers(kv_cache_config)
        device = device_of([each for each in kv_caches.items() if each[0] not in on_host], vllm_config.kv_transfer_config.kv_buffer_device)
        regions = make_regions(kv_caches, vllm_config, kv_cache_config, regions_from_tensor, heads, self._shard)
        self._agent.register_kv_caches(regions)
        self.follow_layers(regions_by_layer(kv_caches, regions), device, first_on_gpu(regions))
        logger.info(
            "registered %d regions of %d layers on %s: %d blocks of %d bytes",
            len(regions),
            len(kv_caches),
            device,
            kv_cache_config.num_blocks,
            sum(region.block_bytes for region in regions),
        )

    def follow_layers(self, regions_of: Mapping[str, Sequence[int]], device: Any = None, region: int = 0) -> None:
        """Which regions each layer writes, and the device on which they lie, or at least this region."""
        self._regions_of = {name: array("I", regions) for name, regions in regions_of.items() if regions}
        self._moments = moments_of(self._agent, device, len(self._regions_of), region)
        self._marks = self._moments.marks
        if self._by_layers and self._moments.refusal:
            self._by_layers = False
            logger.warning("layers are sent when the step has ended, not when they are written: %s", self._moments.refusal)

    # -- the step's work --------------------------------------------------------------------------------------------

    def _step_of(self, meta: KVConnMetadata) -> Step:
        if self._step is None or self._step.meta is not meta:
            self._step = Step(meta, self._by_layers)
        return self._step

    def withdraw(self, meta: KVConnMetadata) -> None:
        """Called before the step writes to blocks that other requests had: nothing may read these any more."""
        if not meta.withdrawals:
            return
        step = self._step_of(meta)
        if not step.enter(WITHDRAWN):
            return
        for work in step.cancels() if meta.cancels else ():
            self._cancel(work)
        self._withdraw(meta.withdrawals)
        logger.info("the engine gave blocks of partial offers to other requests: withdrew the transfers %s", ", ".join(meta.withdrawals))

    def begin(self, meta: KVConnMetadata) -> None:
        """Called before the forward pass, so that a long pass does not delay what the peer waits for.

        Nothing here reads what the pass writes: an offer's blocks belong to a request that has ended, and a partial offer
        names as ready only blocks that earlier steps fill. On a GPU these steps may still run. All their work is queued by
        now, since a worker does one step after the other. This holds for a drafter's work too, which a runner starts after
        the output that has ended the request. So a moment is taken here, on each rank, and not when a step ends.
        """
        if not meta.says_something:
            self._step = None
            return
        began = time.perf_counter()
        step = self._step_of(meta)
        self.withdraw(meta)
        if step.enter(BEGUN):
            self._say(meta, step)
        self._spent_s += time.perf_counter() - began

    def _say(self, meta: KVConnMetadata, step: Step) -> None:
        if meta.announces and self._try(lambda: self._agent.announce(meta.announces), f"announce {len(meta.announces)} requests"):
            for transfer_id in meta.announces:  # one bad id must not hide the others
                self._try(lambda one=transfer_id: self._agent.announce([one]), f"announce {transfer_id!r}")
        if meta.offers:
            hand_over(meta.offers, self._offer_all, self._accepted, self._offer_refused)
        if meta.claims:
            self._claim(meta.claims)
        for refused in meta.refusals:
            self._recorder.failed("load", "bad_params")
            self._report_failed(refused)
        for work in step.cancels() if meta.cancels else ():
            self._cancel(work)
        if meta.partials:
            self._offer_partial(meta.partials, step)

    def load(self, meta: KVConnMetadata) -> None:
        """Called where vLLM wants loads to start. By now vLLM has queued its work on these blocks for requests that had them."""
        step = self._step
        if step is None or step.meta is not meta or not step.enter(LOADED):
            return
        began = time.perf_counter()
        if meta.loads:
            hand_over(meta.loads, self._load_all, self._accepted, self._load_refused)
        for work in step.cancels() if meta.cancels else ():
            self._cancel(work)
        self._spent_s += time.perf_counter() - began

    def layer_written(self, name: str) -> None:
        """Says that what this step writes into the layer's regions is there, or is queued on the GPU."""
        step = self._step
        if step is None or not step.unwritten:
            return
        began = time.perf_counter()
        if regions := step.unwritten.pop(name, None):
            if self._marks is not None:
                for region in regions:
                    self._marks[region] = 1
            else:
                self._layer_queued(name, regions, step)
        self._spent_s += time.perf_counter() - began

    def _layer_queued(self, name: str, regions: array[int], step: Step) -> None:
        if self._try(lambda: self._moments.written(regions, step), f"layer {name} is not sent when it is written"):
            step.by_layers, step.unwritten = False, {}  # the step's end tells

    def step_written(self, failed: bool = False) -> None:
        """Tells the agent which layers are written of those that no byte of Agent.written has said.

        failed: an exception goes through the step, so what the step was to compute is not there.
        """
        step = self._step
        if step is None or not step.enter(WRITTEN):
            return
        told = step.by_layers and step.partial_calls == 1 and not step.unwritten
        if step.computing and not told and not failed:
            began = time.perf_counter()
            works = [PartialWork(work.transfer_id, [()] * len(work.after), work.after, [], work.prompt) for work in step.computing]
            hand_over(works, self._partial_all, self._accepted, self._partial_refused)
            self._spent_s += time.perf_counter() - began
        if step.unwritten and not failed and not self._uncalled_told:
            self._uncalled_told = True
            logger.info(UNCALLED, len(step.unwritten), len(self._regions_of), min(step.unwritten))
        step.computing, step.unwritten = [], {}

    # -- calls of the agent -----------------------------------------------------------------------------------------

    def _withdraw(self, transfer_ids: Sequence[str]) -> None:
        try:
            self._agent.withdraw(transfer_ids)
            self._broken.difference_update(transfer_ids)
        except InvalidError as error:  # no valid id, or an earlier request's: this request has given nothing under it
            logger.error("transfers %s cannot be withdrawn: %s", ", ".join(transfer_ids), error)
            for transfer_id in transfer_ids if len(transfer_ids) > 1 else ():  # one bad id must not hide the others
                self._withdraw([transfer_id])
        except Exception as error:
            logger.critical("transfers %s cannot be withdrawn, so this engine ends: %s", ", ".join(transfer_ids), error)
            raise  # decode would read another request's bytes from these blocks: the engine has to end instead

    def _offer_partial(self, works: Sequence[PartialWork], step: Step) -> None:
        """Blocks that were there before the step go now; blocks that the step computes go when they are written."""
        step.partial_calls = 0
        works = [work for work in works if work.transfer_id not in self._broken]
        hand_over(works, self._partial_all, self._accepted, self._partial_refused)
        step.unwritten = self._regions_of.copy() if step.by_layers and step.computing else {}

    def _partial_all(self, works: Sequence[PartialWork]) -> None:
        assert self._step is not None
        self._step.partial_calls += 1
        by_layers, now, parts = self._by_layers, self._moments.now(), self._parts
        offers = []
        for each in works:
            ids, before, first = (of_parts(parts, of_groups) for of_groups in (each.block_ids, each.before, each.first_block))
            offers.append(
                PartialOffer(each.transfer_id, ids, before, first, each.mark(), of_parts(parts, each.after) if by_layers else (), now)
            )
        self._agent.offer_partial(offers)
        for work in works:
            self._accepted(work)

    def _partial_refused(self, work: PartialWork, error: Exception) -> None:
        logger.error("the partial offer of %r was refused: %s", work.transfer_id, error)  # the offer will say what is wrong
        self._broken.add(work.transfer_id)

    def _claim(self, claims: Sequence[Claim]) -> None:
        if self._try(lambda: self._agent.claim(claims), f"claim {len(claims)} transfers"):
            for claim in claims:  # one bad claim must not hide the others; the load of a refused one will say why
                self._try(lambda one=claim: self._agent.claim([one]), f"claim {claim.transfer_id!r}")

    def _try(self, call: Callable[[], None], what: str) -> Exception | None:
        """Whatever the agent says to a call, the engine lives on."""
        try:
            call()
        except Exception as error:
            logger.error("%s: %s", what, error)
            return error
        return None

    def _accepted(self, work: OfferWork | LoadWork | PartialWork) -> None:
        if isinstance(work, OfferWork):
            self._offers[work.transfer_id] = work
        elif isinstance(work, PartialWork):
            assert self._step is not None
            self._step.computing.append(work)
        else:
            self._loads[work.transfer_id] = _Loading(work, time.monotonic(), self._posted_s)

    def _offer_all(self, works: Sequence[OfferWork]) -> None:
        self._broken.difference_update(work.transfer_id for work in works)
        now, parts = self._moments.now(), self._parts
        offers = [(work, of_parts(parts, work.block_ids), of_parts(parts, work.first_block)) for work in works]
        self._agent.offer([Offer(work.transfer_id, ids, first_block=first, prompt=work.mark(), after=now) for work, ids, first in offers])
        for work in works:
            self._accepted(work)

    def _offer_refused(self, work: OfferWork, error: Exception) -> None:
        logger.error("request %s: its cache cannot be offered: %s", work.req_id, error)
        self._recorder.failed("offer", reason_of(error))
        self._reports.sent.add(work.req_id)
        self._cancel(CancelWork(work.transfer_id, "prefill: the offer was refused", of_load=False))
        self._withdraw([work.transfer_id])

    def _load_all(self, works: Sequence[LoadWork]) -> None:
        now = self._moments.now()
        began = time.perf_counter()
        try:
            self._agent.start_load([work.load(now, self._shard, self._parts) for work in works])
        finally:  # it may have taken some of them
            self._posted_s = (time.perf_counter() - began) / len(works)
        for work in works:
            self._accepted(work)

    def _load_refused(self, work: LoadWork, error: Exception) -> None:
        logger.error("request %s: its cache cannot be loaded: %s", work.req_id, error)
        if not work.silent:
            self._recorder.failed("load", reason_of(error))
            self._report_failed(work)
        if isinstance(error, TransferError):  # of the engine's weights; the prefill engine waits for a load
            hand_over([work.nothing()], self._load_all, self._accepted, self._load_refused)

    def _cancel(self, work: CancelWork) -> None:
        # A load that has ended in the meantime needs no cancel. A prefill request that was never offered needs one: the
        # decode engine must be told.
        if work.of_load:
            loading = self._loads.get(work.transfer_id)
            if loading is None:
                return
            loading.cancelled = True
        else:
            self._broken.discard(work.transfer_id)
        if self._step is not None:
            self._step.partial_calls = 0
        self._try(lambda: self._agent.cancel([work.transfer_id], work.reason), f"cancel {work.transfer_id}")

    # -- the step's reports -----------------------------------------------------------------------------------------

    def collect(self, empty_step: bool) -> Reports:
        """The requests that have ended since the last step.

        A step without tokens runs only to ask this, and the next step follows at once. So this call waits a
        little: until then the processor is free for the threads that move the bytes, and a completion ends the
        wait.
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
            # Bytes may still land in these blocks, or be read from them, and nobody can tell any more. If the blocks were
            # given back, tokens could be wrong: so the engine has to end.
            logger.critical("the agent tells no end any more (%s) of %d loads and %d offers", error, len(self._loads), len(self._offers))
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
            return  # a claim or a demand: the engine has given no blocks for it
        loading = self._loads.pop(completion.transfer_id, None)
        if loading is None:
            return
        work = loading.work
        if work.silent:
            if completion.code:
                logger.warning("request %s: the prefill engine was not told: %s", work.req_id, completion.reason)
            return
        self._count(completion, loading.posted_s)
        if completion.code:
            level = logging.INFO if loading.cancelled else logging.ERROR
            logger.log(level, "request %s: its cache was not loaded: %s", work.req_id, completion.reason)
            self._report_failed(work)
            return
        self._load_log.put(completion, work, loading.since)
        self._reports.received.add(work.req_id)

    def _count(self, completion: Any, posted_s: float = 0.0) -> None:
        if completion.code:
            self._recorder.failed(completion.kind, reason_of(completion))
        elif completion.transport or completion.kind == "offer":  # else this rank has none of the tokens
            self._recorder.moved(completion, posted_s)

    def _report_failed(self, work: LoadWork | RefusedWork) -> None:
        self._reports.received.add(work.req_id)
        self._reports.failed.add(work.req_id)
        for group in work.block_ids:
            self._reports.failed_blocks.update(group)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._step, self._marks = None, None  # the marks' memory may be another agent's next
            self._try(self._agent.close, "close")
            self._load_log.close()
