"""KVConnConnector: what vLLM calls, passed on to the scheduler's or the worker's side.

vLLM's base class changes from release to release. This module looks once for what an older release lacks, and never asks
for a version.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1 import base as _base
from vllm.v1.core.sched.output import SchedulerOutput as _SchedulerOutput

from .compat import understood
from .groups import host_layers, make_groups, transfer_groups
from .interface import unknown
from .layout import Heads
from .metadata import KVConnHandshake, KVConnMetadata
from .names import OWN, PUSH, named
from .names import register as _register
from .nixl_metrics import NixlPromMetrics
from .params import (
    IDLE_WAIT_MS,
    LAYERS,
    OFF,
    SEND_EARLY,
    advertised,
    agent_config,
    check_parallel,
    idle_wait_s,
    open_agent,
    rank_of,
    recompute_below,
    role_of,
    send_early,
    sizes,
)
from .scheduler import SchedulerSide
from .served import check_engine, count_replacements
from .shards import dcp_size, shard_of
from .stats import KVConnPromMetrics, KVConnStats, Recorder
from .worker import Reports, WorkerSide

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kvconn.vllm")

# The result of the call that reports sends, receives and failed receives together. Without it a failed load is named by its
# blocks.
_Results: Any = getattr(_base, "KVConnectorTransferResults", None)
_HAS_FAILED = _Results is not None and "failed_recving" in getattr(_Results, "__dataclass_fields__", {})

try:  # a vLLM whose layouts are named by L, B, H, N, C
    from vllm.v1.kv_cache_layout import KVCacheLayout as _Layout
except ImportError:
    _Layout = None  # type: ignore[assignment,misc]

try:  # where a hit comes from, in vLLM's statistics
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as _Source
except ImportError:
    _Source = None  # type: ignore[assignment,misc]


def _show_logs() -> None:
    """Has our logger write where vLLM's does, unless it is set up already: vLLM sets up the logger `vllm` only."""
    ours, theirs = logging.getLogger("kvconn"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False


# Without this field a preempted request's blocks may be another request's before its partial offers can be withdrawn.
_TELLS_PREEMPTIONS = "preempted_req_ids" in getattr(_SchedulerOutput, "__dataclass_fields__", {})

_register()  # MultiConnector finds its members' statistics only in vLLM's register, by the name of their class


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _timed(method: _Method) -> _Method:
    """Makes a scheduler's method count its own time as part of what the connector costs the step."""

    @functools.wraps(method)
    def run(self: KVConnConnector, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._spent_s += time.perf_counter() - began

    return run  # type: ignore[return-value]


class KVConnConnector(_base.KVConnectorBase_V1, _base.SupportsHMA):
    """Carries the KV cache of a request from the engine that prefilled it to the engine that decodes it."""

    _name = OWN  # under which vLLM knows it
    _prom_metrics = KVConnPromMetrics

    if _Source is not None and hasattr(_Source, "P2P"):
        _cache_hit_source = _Source.P2P

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _show_logs()
        with named(self._name):
            self._begin(vllm_config, role, kv_cache_config)

    def _begin(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_parallel(vllm_config.parallel_config)
        check_engine(vllm_config)
        transfer = vllm_config.kv_transfer_config
        groups = make_groups(kv_cache_config, dcp_size(vllm_config.parallel_config), transfer.kv_role == "kv_consumer")
        self._loads_late = bool(host_layers(kv_cache_config))
        extra = transfer.kv_connector_extra_config or {}
        wait, early = idle_wait_s(extra, vllm_config.parallel_config), send_early(extra, vllm_config.parallel_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._load_errors: set[int] = set()
        self._meta: KVConnMetadata | None = None
        self._recorder = Recorder("scheduler")
        self._spent_s = 0.0  # by the scheduler's side on this step
        if role == _base.KVConnectorRole.SCHEDULER:
            partial = early != OFF and _TELLS_PREEMPTIONS
            for remark in understood(self._name, extra, role_of(transfer)).remarks:
                logger.info(remark)
            if new := unknown(_base.KVConnectorBase_V1, KVConnConnector):
                logger.warning("this vLLM asks a connector for %s, which kvconn does not know: vLLM's defaults hold", ", ".join(new))
            self._scheduler = SchedulerSide(
                transfer.kv_role,
                groups,
                transfer.engine_id,
                sizes(vllm_config.parallel_config),
                partial,
                batches=getattr(vllm_config, "max_concurrent_batches", 1),
                cache_dir=vllm_config.load_config.download_dir,
                recompute_below=recompute_below(extra),
            )
            self._scheduler.joined_by_request = self._name == PUSH
        else:
            self._rank = rank_of(vllm_config.parallel_config, transfer.engine_id)
            shard = shard_of(vllm_config.parallel_config, kv_cache_config)
            self._config = config = agent_config(vllm_config, kv_cache_config, self._rank, self._name, shard)
            count_replacements(vllm_config)
            self._worker = WorkerSide(lambda: open_agent(config), wait, early == LAYERS, shard, self._rank.name)
            logger.info("engine %s, role %s, %s, process %d", config["engine_id"], config["role"], self._rank, os.getpid())
            if (told := shard.arranged(self._rank)) != self._rank:
                logger.info("with DCP agents know this rank as %s: it is so named in their log, names and labels", told.name)
            logger.info("model %s, fingerprint %s", config["model"], config.get("model_fingerprint", "none"))
            if not wait and extra.get(IDLE_WAIT_MS):
                logger.info("%s is set, but ranks that compute together do not wait", IDLE_WAIT_MS)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads before tokens: then engines of unequal tensor parallel sizes move whole heads, not one piece for each token.

        vLLM takes another layout if the attention backend has not got this one. A latent has one head.
        """
        model = getattr(vllm_config, "model_config", None)
        return None if _Layout is None or model is None or model.use_mla or not hasattr(_Layout, "LBHNC") else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether vLLM must not put whole steps into CUDA graphs, which call no layer.

        The connector sends what such a step computes when the step has ended: later, but right. By default vLLM has full graphs
        only for steps that only decode, and these steps compute nothing that is sent. So the graphs stay, with all that decode gains by
        them, unless somebody asks for layers.
        """
        return (extra_config or {}).get(SEND_EARLY) == LAYERS

    # -- scheduler side ---------------------------------------------------------------------------------------------

    @property
    def _sched(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler's method was called on a worker's connector"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        # In a MultiConnector the metadata of the other connectors comes here too.
        ours = [rank for rank, theirs in metadata.items() if isinstance(theirs, KVConnHandshake)]
        if ours:  # the first rank serves the port; the others have joined it and know its address
            self._sched.found_at(metadata[min(ours)].bootstrap_addr)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether vLLM may count a prefix as cached if it has the prefix's attention cache, but not its states.

        A load brings a state whole, so such a prefix need not be carried again. If the load fails, vLLM computes the whole prompt. A
        window that lags would have a gap between its blocks and the load's.
        """
        return self._sched.loads_states and _HAS_FAILED

    @_timed
    def on_new_request(self, request: Any) -> None:
        self._sched.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(transfer_groups(self._kv_cache_config))

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._sched.matched_tokens(request, num_computed_tokens)

    @_timed
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._sched.after_alloc(request, [list(group) for group in blocks.get_block_ids()], num_external_tokens, blocks.blocks)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnMetadata:
        began = time.perf_counter()
        meta = self._sched.build_meta(scheduler_output.total_num_scheduled_tokens, scheduler_output)
        self._recorder.step(self._spent_s + time.perf_counter() - began)
        self._spent_s = 0.0
        return meta

    @_timed
    def update_connector_output(self, connector_output: Any) -> None:
        failed = getattr(connector_output, "failed_recving", ())
        self._sched.worker_reported(connector_output.finished_sending, connector_output.finished_recving, failed)

    @_timed
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.request_finished(request, [list(block_ids)])

    @_timed
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.request_finished(request, [list(group) for group in block_ids])

    def has_pending_push_work(self) -> bool:
        # Without this an idle engine would not step: it would hear of no completion, and free no block.
        return self._scheduler is not None and (self._scheduler.has_unsaid() or self._scheduler.waits())

    def reset_cache(self) -> bool | None:
        """Nothing is cached here. But transfers under way carry what was computed before the reset, for use after it."""
        loads, offers = self._sched.in_flight()
        if loads or offers:
            logger.warning("reset_cache: %d loads and %d offers that carry the former cache are under way", loads, offers)
        return not loads and not offers

    # -- statistics -------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnStats | None:
        if self._scheduler is not None:
            return self._recorder.take(*self._scheduler.in_flight(), computed=self._scheduler.computed.take())
        return self._work.stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnStats:
        return KVConnStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnPromMetrics:
        return cls._prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- worker side ------------------------------------------------------------------------------------------------

    @property
    def _work(self) -> WorkerSide:
        assert self._worker is not None, "a worker's method was called on a scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        heads = Heads(self._vllm_config.model_config.get_total_num_kv_heads(), self._rank.tp_rank, self._rank.tp_size)
        with named(self._name):
            self._work.register(kv_caches, self._vllm_config, self._kv_cache_config, heads)

    def get_handshake_metadata(self) -> KVConnHandshake | None:
        address = advertised(self._work.bootstrap_address, self._config)
        return KVConnHandshake(address) if address else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._meta = connector_metadata if isinstance(connector_metadata, KVConnMetadata) else None
        if self._worker is not None and self._meta is not None:
            self._worker.begin(self._meta)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._meta = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._loads_late:
            self._start_loads()

    def _start_loads(self) -> None:
        if self._meta is not None:
            self._work.load(self._meta)

    def _start_late_loads(self) -> None:
        """Starts a step's loads when each connector of the engine has begun the step.

        By then the stream waits for what HiSparse's own connector still writes to blocks of the host that requests have given back.
        """
        if self._loads_late:
            self._start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        # What the layer writes into its cache is there, or is queued on the current stream, when vLLM makes this call.
        self._work.layer_written(layer_name)

    def wait_for_save(self) -> None:
        # vLLM's runner calls it in a "finally" around the forward pass.
        self._start_late_loads()
        self._work.step_written(failed=sys.exc_info()[0] is not None)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Called before anything of the step may touch the blocks that vLLM has taken back."""
        if isinstance(kv_connector_metadata, KVConnMetadata):
            self._work.withdraw(kv_connector_metadata)

    def _collect(self) -> Reports:
        self._start_late_loads()
        return self._work.collect(self._meta is not None and self._meta.empty_step)

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str] | None, set[str] | None]:
        reports = self._collect()
        self._load_errors |= reports.failed_blocks
        return reports.sent or None, reports.received or None

    if _Results is not None:

        def get_transfer_results(self, finished_req_ids: Iterable[str]) -> Any:
            reports = self._collect()
            if _HAS_FAILED:
                return _Results(finished_sending=reports.sent, finished_recving=reports.received, failed_recving=reports.failed)
            self._load_errors |= reports.failed_blocks
            return _Results(finished_sending=reports.sent, finished_recving=reports.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._load_errors = self._load_errors, set()
        return errors

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.computed.close()
        if self._worker is not None:
            self._worker.close()


# In the place of another connector: what vLLM and others grant or refuse by its name holds for this one.


class NixlConnector(KVConnConnector):
    """kvconn under the name of vLLM's connector for NIXL."""

    _name = "NixlConnector"
    _prom_metrics = NixlPromMetrics


class NixlPullConnector(KVConnConnector):
    """kvconn under the longer name of the same connector."""

    _name = "NixlPullConnector"
    _prom_metrics = NixlPromMetrics


class NixlPushConnector(KVConnConnector):
    """kvconn under the name of vLLM's connector for NIXL that writes instead of reading. kvconn's prefill engine always writes."""

    _name = PUSH
    _prom_metrics = NixlPromMetrics


class MooncakeConnector(KVConnConnector):
    """kvconn under the name of vLLM's connector for Mooncake."""

    _name = "MooncakeConnector"
