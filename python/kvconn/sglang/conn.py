"""SGLang's manager, sender and receiver: what the scheduler calls, passed on to the rooms.

SGLang's base classes change from release to release. This module looks once for what an older release lacks, and never asks
for a version. Our classes inherit from SGLang's because the scheduler uses more of them than the calls below. SGLang's
constructors are not run: they open sockets and threads of their own.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from typing import Any

from sglang.srt.disaggregation.base import conn as _base

try:
    from sglang.srt.disaggregation.common import conn as _common
except ImportError:
    _common = None  # type: ignore[assignment]

from ..errors import KvconnError
from . import recompute
from . import rooms as _rooms
from . import start as begin
from .layout import Layout, ids
from .moments import HostMoments, moments_of
from .parallel import bootstrap_port, heads_of, leaf, parallel_of, refuse_unsupported, stages_group, turns
from .params import Prefill, agent_config, bootstrap_address, engine_name, from_environment, of_rank, prefill_api_key, setting
from .partial import Chunks
from .rooms import Holder, NoAgent, Rooms
from .route import Access, Engine, EveryEngine, RouteError, Router
from .served import Adapters, vouched

logger = logging.getLogger("kvconn.sglang")

_Manager: Any = getattr(_common, "CommonKVManager", _base.BaseKVManager)
_Sender: Any = getattr(_common, "CommonKVSender", _base.BaseKVSender)
_Receiver: Any = getattr(_common, "CommonKVReceiver", _base.BaseKVReceiver)
KVTransferError: Any = getattr(_common, "KVTransferError", RuntimeError)
_SAYS_WHOSE = KVTransferError is not RuntimeError and "is_from_another_rank" in inspect.signature(KVTransferError).parameters
_Metric: Any = getattr(_base, "KVTransferMetric", None)
_DEVICE: Any = getattr(getattr(_base, "KVTransferDestination", None), "DEVICE", None)

for _state in ("Failed", "Bootstrapping", "Transferring", "Success"):
    if getattr(_base.KVPoll, _state) != getattr(_rooms, _state.upper()):
        raise ImportError(f"kvconn: SGLang's KVPoll.{_state} is {getattr(_base.KVPoll, _state)}, want {getattr(_rooms, _state.upper())}")


_NEWS_S = 0.001  # a request that arrives during the wait waits at most this long


class KVConnManager(_Manager):
    """One rank's agent, in the process of its scheduler."""

    supports_deferred_decode_kv_release = True
    supports_role_switch = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False, **_: Any) -> None:
        from kvconn import Agent

        self.kv_args = args
        self.disaggregation_mode = disaggregation_mode
        self.server_args = server_args
        self.is_mla_backend = bool(is_mla_backend)
        self.is_hybrid_mla_backend = bool(getattr(args, "is_hybrid_mla_backend", False))
        prefill = disaggregation_mode.value == "prefill"
        self.parallel = parallel = parallel_of(args, server_args)
        refuse_unsupported(server_args, parallel)
        extra = from_environment()
        start = begin.take(server_args, extra)
        self.adapters = Adapters(start.scheduler, leaf("download_dir", server_args), vouched(extra))
        self.is_dummy_cp_rank = prefill and parallel.cp_rank != 0
        self.enable_all_cp_ranks_for_transfer = False
        self.attn_cp_rank, self.attn_cp_size = parallel.cp_rank, parallel.cp_size
        self.enable_deferred_decode_kv_release = bool(setting("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", 1))
        self.enable_staging = False
        self.bootstrap_timeout = setting("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", 300)
        self.waiting_timeout = setting("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", 300)
        self.prefill_info_table = EveryEngine()
        self.coming: Any = None  # the request that SGLang makes a sender or receiver for
        self.request_status: dict[int, int] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.kv_cache_dtype_str = str(getattr(args, "kv_cache_dtype_str", "") or "").replace("torch.", "")
        self.kv_layout = getattr(args, "kv_layout", None)
        self.layout = Layout(args, start.pool, start.draft, heads_of(parallel, start.pool, start.model_config), parallel.rank.pp_size)
        if parallel.rank.pp_size > 1:
            begin.check_stages(self.layout.layers, self.layout.plain, start.model_config.num_hidden_layers, stages_group())
        self._bootstrap = None
        self.router: Any = None  # a rank with nothing to send asks nobody
        if self.is_dummy_cp_rank:
            self._agent: Any = NoAgent()
            self.moments: Any = HostMoments()
            self.rooms = Rooms(self._agent, "prefill, a rank with nothing to send", self.bootstrap_timeout, self.waiting_timeout)
            return
        port = None
        if prefill:
            self._bootstrap = bootstrap_address(parallel.host, bootstrap_port(parallel), parallel.first_node)
            port = Prefill(self._bootstrap, parallel.route_info(self.kv_layout), self.bootstrap_timeout)
        extra = of_rank(extra, getattr(args, "ib_device", None), args.gpu_id, prefill, turns(server_args))
        config = agent_config(parallel.rank, start.common, self.kv_cache_dtype_str, args.page_size, extra, port)
        self._agent = Agent(config)
        side = f"{config['role']} dp{parallel.rank.dp_rank} tp{parallel.rank.tp_rank} pp{parallel.rank.pp_rank}"
        self.rooms = Rooms(self._agent, side, self.bootstrap_timeout, self.waiting_timeout, 0.0 if parallel.answers else _rooms.TELL_S)
        self.router = Router(self.rooms.inbox, Access(config, own=prefill), "" if prefill else prefill_api_key(config))
        self._agent.register_kv_caches(self.layout.regions)
        self.moments = moments_of(self._agent, self.layout.regions, start.scheduler, prefill)
        logger.info(
            "kvconn %s: engine %s, %d pages of %d tokens and %d bytes, %d regions in %s memory, states %s",
            side,
            config["engine_id"],
            self.layout.pages,
            args.page_size,
            self.layout.page_bytes,
            len(self.layout.regions),
            "host" if isinstance(self.moments, HostMoments) else f"GPU {args.gpu_id}'s",
            self.layout.state_types,
        )

    def wait_for_news(self) -> None:
        """Waits in a step without a batch, for a completion or _NEWS_S.

        While requests wait for their cache, SGLang begins the next step at once. Its loop would take a core from the threads
        that compute the cache and move it.
        """
        if len(self.rooms):
            with contextlib.suppress(KvconnError):  # the next poll reports the error
                self._agent.wait(_NEWS_S)

    def open_room(self, bootstrap_room: Any) -> Any:
        """The room of the request for which SGLang makes a sender or receiver.

        SGLang does not hand the request to them. The prompt's fingerprint is of the tokens as the client sent them: SGLang
        puts other tokens in the place of images, and these may differ from machine to machine.
        """
        request, self.coming = self.coming, None
        if request is None or request.bootstrap_room != bootstrap_room:
            return self.rooms.open(bootstrap_room)
        prompt, turn = recompute.prompt_and_turn(request)
        why = ""
        if getattr(request, "lora_id", None) is not None:
            prompt, why = self.adapters.of_prompt(request, prompt)
        return self.rooms.open(bootstrap_room, prompt, turn, why)

    def register_to_bootstrap(self) -> None:
        return  # the agent registered itself when it registered the caches

    def tell_dp_rank(self, bootstrap_room: int) -> None:
        if self._bootstrap is not None:
            self.router.tell_dp_rank(self._bootstrap, bootstrap_room, self.parallel.rank.dp_rank)

    # -- what SGLang's decode side asks the manager ---------------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        return True

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int = 0) -> bool:
        """Whether no byte can land any more in the pages of a failed request."""
        self.rooms.tick()
        return not self.rooms.under_way(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        return

    def record_failure(self, bootstrap_room: int, failure_reason: str) -> None:
        logger.error("room %s: %s", bootstrap_room, failure_reason)

    def submit_prefill_recompute(self, kv_receiver: Any, payload: dict[str, Any]) -> None:
        """Has the prefill engine compute a retracted request again. All ranks get this call; only the rank that answers asks."""
        if self.parallel.answers:
            recompute.prefill(kv_receiver, payload, self.waiting_timeout)

    def teardown(self) -> None:
        """Ends the manager: SGLang makes another one for the engine's other role. SGLang calls this when no request is left.

        When this returns, no byte of a request lands any more, and the caches are not registered.
        """
        if self.router is not None:
            self.router.close()
        self.moments.close()
        self._agent.close()


class _Half(Holder):
    """What a sender and a receiver have in common. A poll collects the agent's news, then reads an attribute."""

    kv_mgr: Any

    def poll(self) -> int:
        self.kv_mgr.rooms.tick()
        return self.room.told()

    def poll_pp_consensus(self) -> int:
        return self.poll()

    @property
    def conclude_state(self) -> int | None:
        return self.room.state if self.room.state in (_rooms.FAILED, _rooms.SUCCESS) else None

    def fail(self, reason: str) -> None:
        self.kv_mgr.rooms.abort(self.room, reason)

    def failure_exception(self) -> None:
        """Raises the reason of the failure, which may have happened on another rank of this engine."""
        room, rooms = self.room, self.kv_mgr.rooms
        reason = room.reason
        rooms.forget(room)
        elsewhere = f"{rooms.side}, room {room.number}: it failed on another rank of this engine; the log of that rank has the reason"
        values: tuple[Any, ...] = (room.number, reason or elsewhere)
        raise KVTransferError(*values, **({"is_from_another_rank": reason is None} if _SAYS_WHOSE else {}))

    def abort(self) -> None:
        self.kv_mgr.rooms.abort(self.room, "the request was aborted")

    def clear(self) -> None:
        self.kv_mgr.rooms.forget(self.room)


class KVConnSender(_Half, _Sender):
    """Prefill's half of a request."""

    # The sender needs the pages' numbers in host memory at once.
    supports_host_tensor_indices = False

    def __init__(
        self, mgr: KVConnManager, bootstrap_addr: str, bootstrap_room: int, *_: Any, req_has_disagg_prefill_dp_rank: bool = False, **__: Any
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.aux_index: int | None = None
        self._chunks: Chunks | None = None
        self._early_send_wait_event: Any = None
        self._prefix_pages = 0
        self.room = mgr.open_room(bootstrap_room)
        # The scheduler spends memory on a request when the room is in WaitingForInput. The room comes to this state when the
        # decode engine has pages for the request. If it came earlier, two engines could fill up with different requests and
        # wait for each other for ever. SGLang's --optimistic-prefill-attempts begins a prefill earlier, and gives way again.
        mgr.rooms.announce(self.room)
        if mgr.parallel.rank.dp_size > 1 and self.room.state != _rooms.FAILED:
            mgr.tell_dp_rank(bootstrap_room)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self.aux_index = aux_index
        self.num_kv_indices = num_kv_indices
        if num_kv_indices < 0:  # the scheduler would neither send the request nor end it
            tokens = self._prefix_pages * self.kv_mgr.layout.page_size
            self.fail(f"the decode engine has {tokens} tokens already, more than the prompt has here: both need the same prompt")
        self._chunks = Chunks(self.kv_mgr.layout, num_kv_indices, self._prefix_pages)

    def pop_decode_prefix_len(self) -> int:
        """Tokens that the decode engine has already: they are not sent."""
        self._prefix_pages = self.room.prefix_pages
        return self._prefix_pages * self.kv_mgr.layout.page_size

    def get_max_transfer_tokens(self) -> int | None:
        return None

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def mark_prefill_complete(self) -> None:
        return

    def send(self, kv_indices: Any, state_indices: Any = None, num_kv_tokens: int | None = None, **_: Any) -> None:
        room, rooms = self.room, self.kv_mgr.rooms
        # SGLang's event of pages that it sends before their pass's result: of this chunk only.
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if room.state == _rooms.FAILED:
            return
        try:
            if self._chunks is None:
                raise RuntimeError("SGLang has sent pages before it called init")
            pages = ids(kv_indices, "pages")
            if self._chunks.add(pages):
                rooms.offer(room, *self._chunks.offer(state_indices, self.aux_index), after=self.kv_mgr.moments.computed(event))
                self._chunks = None
            elif pages:
                rooms.offer_partial(room, *self._chunks.partial_offer(pages), after=self.kv_mgr.moments.computed(event))
        except Exception as error:
            rooms.abort(room, str(error) or repr(error))

    def failure_exception(self) -> None:
        """Waits until nothing reads the pages: the scheduler uses them again right after this call."""
        try:
            super().failure_exception()
        finally:
            self.kv_mgr.rooms.settle(self.room)

    def get_transfer_metric(self) -> Any:
        done = self.room.completion
        if _Metric is None or done is None:
            return _Metric() if _Metric is not None else None
        return _Metric(transfer_latency_s=done.transfer_s, transfer_total_bytes=done.bytes)


class KVConnReceiver(_Half, _Receiver):
    """Decode's half of a request."""

    require_staging = False
    supports_host_destination = False
    bootstrap_infos = ()

    def __init__(self, mgr: KVConnManager, bootstrap_addr: str, bootstrap_room: int | None = None, *_: Any, **__: Any) -> None:
        self.kv_mgr = mgr
        self.bootstrap_addr = bootstrap_addr
        self.bootstrap_room = bootstrap_room
        self.abort_notified = False
        self._engine = ""
        self._blocks: tuple[Any, ...] = ()  # the blocks that are loaded, and the moment after which
        self.http_port: int | None = None  # the port of the prefill server's own API
        self.room = mgr.open_room(bootstrap_room)

    @property
    def _address(self) -> str:
        return f"http://{self.bootstrap_addr}"

    def init(self, prefill_dp_rank: int | None = None, *_: Any) -> None:
        """Claims the request at its prefill engine, once that engine has said which of its ranks has the request."""
        if self.room.state == _rooms.BOOTSTRAPPING:
            # An answer to an earlier request may still be unread: it may be out of date, so it is collected first.
            self.kv_mgr.rooms.tick()
            self.kv_mgr.router.engine(self.bootstrap_addr, lambda engine: self._found(engine, prefill_dp_rank))

    def _found(self, engine: Engine | RouteError, asked: int | None) -> None:
        mgr, room = self.kv_mgr, self.room
        if isinstance(engine, RouteError):
            mgr.rooms.fail(room, str(engine))
            return
        self.http_port = engine.prefill_http_port
        differs = engine.differs(mgr.kv_args.page_size, mgr.kv_cache_dtype_str, mgr.kv_layout)
        if differs:
            mgr.router.forget(self.bootstrap_addr)
            mgr.rooms.fail(room, f"prefill engine at {self.bootstrap_addr}: {differs}")
        elif engine.dp_size == 1 and not asked:
            self._claim(0)
        elif asked:  # 0 may also mean that nobody has asked for a rank
            if asked >= engine.dp_size or asked < 0:
                mgr.rooms.fail(
                    room, f"prefill engine at {self.bootstrap_addr} has {engine.dp_size} data parallel ranks: there is no rank {asked}"
                )
            else:
                self._claim(asked)
        else:
            # Only the prefill engine's scheduler knows the rank: a router may choose a rank that does not follow from the room.
            if engine.follow_bootstrap_room and not setting("SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK", 0):
                self._claim(self.bootstrap_room % engine.dp_size)
            mgr.router.dp_rank(self.bootstrap_addr, self.bootstrap_room, self._rank_found)

    def _rank_found(self, rank: int | RouteError) -> None:
        rooms = self.kv_mgr.rooms
        if not self._engine and isinstance(rank, RouteError):
            rooms.fail(self.room, str(rank))
        elif not self._engine:
            self._claim(rank)
        elif not isinstance(rank, RouteError) and engine_name(rank) != self._engine:
            self._engine = engine_name(rank)
            rooms.move(self.room, lambda: self._claim(rank), lambda: rooms.load(self.room, self._address, self._engine, *self._blocks))

    def _claim(self, dp_rank: int) -> None:
        self._engine = engine_name(dp_rank)
        self.kv_mgr.rooms.claim(self.room, self._address, self._engine)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        destination: Any = _DEVICE,
        **more: Any,
    ) -> None:
        """Asks for the request, into these pages."""
        mgr, room = self.kv_mgr, self.room
        try:
            if destination != _DEVICE or any(value is not None for value in more.values()):
                raise ValueError(f"destination {destination!r} and {sorted(more)} are not supported")
            prefix, page = decode_prefix_len or 0, mgr.layout.page_size
            if prefix % page:
                raise ValueError(f"decode_prefix_len is {prefix}: a multiple of the page size {page} was expected")
            blocks = mgr.layout.blocks(kv_indices, state_indices, aux_index)
            # A pass that is under way may still use the pages for the request that had them before.
            self._blocks = blocks, mgr.layout.first(blocks, prefix // page), mgr.moments.now()
            mgr.rooms.load(room, self._address, self._engine, *self._blocks)
        except Exception as error:
            mgr.rooms.abort(room, str(error) or repr(error))

    def failure_exception(self) -> None:
        self.kv_mgr.router.forget(self.bootstrap_addr)
        super().failure_exception()

    def is_abort_release_safe(self) -> bool:
        """Whether no byte can land any more."""
        return self.kv_mgr.is_abort_release_safe(self.bootstrap_room)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Another rank of this engine failed. This rank's pages must be held while its own load is under way."""
        self.kv_mgr.rooms.abort(self.room, "failed on another rank")
        self.abort_notified = self.kv_mgr.rooms.under_way(self.bootstrap_room)
