"""The scheduler side: which requests take part in a transfer, and with which blocks.

It holds no connection and no memory, only what is still to be said to the worker (KVConnMetadata) and what the worker
has not answered yet.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from .metadata import BlockIds, CancelWork, ClaimWork, KVConnMetadata, LoadWork, OfferWork
from .params import BadParams, DecodeParams, PrefillParams, parse

logger = logging.getLogger("kvconn.vllm")

# A request that ended in one of these ways has its whole prompt in the cache. STOPPED belongs to them: a first token
# that happens to be the end of the text stops the prefill request before its length does, and the decode engine waits
# for the cache all the same.
_PROMPT_IS_THERE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION")

# How many transfer ids are remembered, so that a second request with one of them is noticed.
_REMEMBERED = 16384


class _Taken(BadParams):
    """The transfer id has an owner."""


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class SchedulerSide:
    def __init__(self, kv_role: str, group_block_sizes: list[int], transfer_groups: list[int]) -> None:
        self._can_prefill = kv_role in ("kv_producer", "kv_both")
        self._can_decode = kv_role in ("kv_consumer", "kv_both")
        self._kv_role = kv_role
        self._block_sizes = group_block_sizes
        self._groups = transfer_groups
        self._next = KVConnMetadata()
        # The requests alive, by id; None: no part in a transfer (nothing asked, or bad parameters, said once).
        self._known: dict[str, PrefillParams | DecodeParams | None] = {}
        self._announced: set[str] = set()
        self._asked: set[str] = set()  # decode: update_state_after_alloc has been through
        self._loading: dict[str, str] = {}  # decode: request id -> transfer id, until the worker reports it
        self._offered: dict[str, str] = {}  # prefill: the same
        self._owners: OrderedDict[str, str] = OrderedDict()  # transfer id -> the request that has it

    # -- requests ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params = self._learn(request)
        if isinstance(params, PrefillParams):
            self._announce(request.request_id, params)
        elif isinstance(params, DecodeParams):
            self._next.claims.append(ClaimWork(params.transfer_id, params.bootstrap_addr, params.engine_id))

    def _learn(self, request: Any) -> PrefillParams | DecodeParams | None:
        req_id = request.request_id
        if req_id not in self._known:
            try:
                self._known[req_id] = self._accept(req_id, parse(request.kv_transfer_params))
            except _Taken as taken:
                # No fault of anybody's: the other samples of one prompt, and the request with which vLLM itself lets the
                # connector clean up after one that failed.
                logger.info("request %s: %s: no transfer for this one", req_id, taken)
                self._known[req_id] = None
            except BadParams as error:
                logger.warning("request %s: %s: it is computed here, without a transfer", req_id, error)
                self._known[req_id] = None
        return self._known[req_id]

    def _accept(self, req_id: str, params: PrefillParams | DecodeParams | None) -> PrefillParams | DecodeParams | None:
        if params is None:
            return None
        if isinstance(params, PrefillParams) and not self._can_prefill:
            raise BadParams(f"do_remote_decode is true, but this engine's kv_role is {self._kv_role}")
        if isinstance(params, DecodeParams) and not self._can_decode:
            raise BadParams(f"do_remote_prefill is true, but this engine's kv_role is {self._kv_role}")
        # Several samples of one prompt (n > 1) are several requests with one transfer id: the first one has it.
        # An engine of both roles may be P and D of one transfer, hence the kind in the key.
        key = f"{type(params).__name__}:{params.transfer_id}"
        owner = self._owners.setdefault(key, req_id)
        if owner != req_id:
            raise _Taken(f"transfer_id {params.transfer_id!r} belongs to request {owner} already")
        while len(self._owners) > _REMEMBERED:
            self._owners.popitem(last=False)
        return params

    def _announce(self, req_id: str, params: PrefillParams) -> None:
        if req_id not in self._announced:
            self._announced.add(req_id)
            self._next.announces.append(params.transfer_id)

    # -- decode -----------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = self._learn(request)
        if not isinstance(params, DecodeParams) or request.request_id in self._asked:
            return 0, False
        missing = int(request.num_prompt_tokens) - num_computed_tokens
        # The last token is computed here whatever is loaded, because its logits are needed.
        return (missing, True) if missing > 1 else (0, False)

    def after_alloc(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        params = self._learn(request)
        req_id = request.request_id
        if isinstance(params, PrefillParams):
            self._announce(req_id, params)  # for a vLLM without on_new_request
            return
        if not isinstance(params, DecodeParams) or req_id in self._asked:
            return
        self._asked.add(req_id)
        _clear_flag(request)
        if num_external_tokens <= 0:
            self._next.loads.append(self._load(req_id, params, [], []))
            return
        prompt = int(request.num_prompt_tokens)
        cached = prompt - num_external_tokens
        wanted: BlockIds = []
        first: list[int] = []
        for group in self._groups:
            size = self._block_sizes[group]
            # A cached prefix ends on a block's boundary, unless vLLM says otherwise: then that block is loaded whole.
            start = cached // size
            first.append(start)
            wanted.append(list(block_ids[group][start : _cdiv(prompt, size)]))
        self._loading[req_id] = params.transfer_id
        self._next.loads.append(self._load(req_id, params, wanted, first))

    def _load(self, req_id: str, params: DecodeParams, block_ids: BlockIds, first_block: list[int]) -> LoadWork:
        # Nothing to claim first when there are blocks in the very step in which the request came.
        self._next.claims = [claim for claim in self._next.claims if claim.transfer_id != params.transfer_id]
        return LoadWork(req_id, params.transfer_id, params.bootstrap_addr, params.engine_id, block_ids, first_block)

    # -- ends -------------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: BlockIds) -> bool:
        """Whether vLLM must keep the request's blocks until the worker reports it as sent."""
        req_id = request.request_id
        params = self._learn(request)
        self._known.pop(req_id, None)
        self._announced.discard(req_id)
        asked = req_id in self._asked
        self._asked.discard(req_id)
        status = getattr(request.status, "name", str(request.status))
        if isinstance(params, PrefillParams):
            return self._prefill_finished(request, params, status, block_ids)
        if not isinstance(params, DecodeParams):
            return False
        if not asked:
            # Aborted before it had blocks: the prefill engine need not keep its own for it.
            _clear_flag(request)
            self._next.loads.append(self._load(req_id, params, [], []))
        elif req_id in self._loading:
            # Its blocks stay vLLM's until the worker reports it, which it does when no byte can land any more.
            self._next.cancels.append(CancelWork(params.transfer_id, f"decode: {status}", of_load=True))
        return False

    def _prefill_finished(self, request: Any, params: PrefillParams, status: str, block_ids: BlockIds) -> bool:
        prompt = int(request.num_prompt_tokens)
        computed = int(getattr(request, "num_computed_tokens", prompt))
        if status in _PROMPT_IS_THERE and computed >= prompt:
            blocks = [list(block_ids[group][: _cdiv(prompt, self._block_sizes[group])]) for group in self._groups]
            if any(blocks):
                self._offered[request.request_id] = params.transfer_id
                self._next.offers.append(OfferWork(request.request_id, params.transfer_id, blocks))
                return True
        self._next.cancels.append(CancelWork(params.transfer_id, f"prefill: {status}", of_load=False))
        return False

    def worker_reported(self, sent: Any, received: Any) -> None:
        for req_id in sent or ():
            self._offered.pop(req_id, None)
        for req_id in received or ():
            self._loading.pop(req_id, None)

    # -- steps ------------------------------------------------------------------------------------------------------

    def build_meta(self, num_scheduled_tokens: int) -> KVConnMetadata:
        meta, self._next = self._next, KVConnMetadata()
        meta.empty_step = num_scheduled_tokens == 0
        return meta

    def has_unsaid(self) -> bool:
        meta = self._next
        return bool(meta.announces or meta.offers or meta.claims or meta.loads or meta.cancels)

    def waits(self) -> bool:
        """Whether a report of the worker is outstanding."""
        return bool(self._offered or self._loading)


def _clear_flag(request: Any) -> None:
    # vLLM itself, and connectors beside us in a MultiConnector, take the flag for "still to be loaded".
    if isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params["do_remote_prefill"] = False
