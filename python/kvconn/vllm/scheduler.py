"""The scheduler side: which requests take part in a transfer, and with which blocks.

It holds no connection and no memory, only what is still to be said to the worker (KVConnMetadata) and what the worker
has not answered yet.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Optional, Union

from ..prompt import fingerprint
from . import params as _params
from .groups import Group, first_kept
from .growing import Growing
from .metadata import BlockIds, CancelWork, KVConnMetadata, LoadWork, OfferWork, RefusedWork
from .params import BadParams, DecodeParams, PrefillParams, Refused, parse

logger = logging.getLogger("kvconn.vllm")

# A request that ended in one of these ways has its whole prompt in the cache. STOPPED belongs to them: a first token
# that happens to be the end of the text stops the prefill request before its length does, and the decode engine waits
# for the cache all the same.
_PROMPT_IS_THERE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION")

# How many transfer ids are remembered, so that a second request with one of them is noticed.
_REMEMBERED = 16384

Params = Optional[Union[PrefillParams, DecodeParams, Refused]]


class _Taken(BadParams):
    """The transfer id has an owner."""


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class SchedulerSide:
    def __init__(
        self, kv_role: str, groups: list[Group], engine_id: str = "", sizes: Mapping[str, int] | None = None, grows: bool = False
    ) -> None:
        self._can_prefill = kv_role in ("kv_producer", "kv_both")
        self._can_decode = kv_role in ("kv_consumer", "kv_both")
        self._kv_role = kv_role
        self._groups = groups
        self._loses_blocks = any(group.loses_blocks for group in groups)
        self._engine_id, self._sizes = engine_id, dict(sizes or {})
        self._bootstrap_addr = ""  # where decode engines find this one; the workers tell
        self._next = KVConnMetadata()
        self._growing = Growing(groups) if grows else None
        self._claims: dict[str, DecodeParams] = {}  # of those too; by transfer id
        # The requests alive, by id; None: no part in a transfer (nothing asked, or another request has it).
        self._known: dict[str, Params] = {}
        self._announced: set[str] = set()
        self._cut: set[str] = set()  # prefill: their prompt ends one token early
        self._prompts: dict[str, int] = {}  # prefill: fingerprints of the prompts that requests came with
        self._asked: set[str] = set()  # decode: update_state_after_alloc has been through
        self._loading: dict[str, str] = {}  # decode: request id -> transfer id, until the worker reports it
        self._offered: dict[str, str] = {}  # prefill: the same
        self._owners: OrderedDict[str, str] = OrderedDict()  # transfer id -> the request that has it

    def found_at(self, bootstrap_addr: str) -> None:
        self._bootstrap_addr = bootstrap_addr

    # -- requests ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        params = self._learn(request)
        if isinstance(params, PrefillParams):
            self._prompt_of(request)  # before it is cut
            self._keep_window(request)
            self._announce(request, params)
        elif isinstance(params, DecodeParams):
            self._claims[params.transfer_id] = params

    def _learn(self, request: Any) -> Params:
        req_id = request.request_id
        if req_id not in self._known:
            self._known[req_id] = self._judge(req_id, request.kv_transfer_params)
        return self._known[req_id]

    def _judge(self, req_id: str, asked: Any) -> Params:
        try:
            return self._accept(req_id, parse(asked))
        except _Taken as taken:
            # No fault of anybody's: the other samples of one prompt, and the request with which vLLM itself lets the
            # connector clean up after one that failed.
            logger.info("request %s: %s: no transfer for this one", req_id, taken)
            return None
        except BadParams as error:
            logger.warning("request %s: kv_transfer_params: %s", req_id, error)
            return Refused(str(error), loads=_params.wants_load(asked))

    def _accept(self, req_id: str, params: PrefillParams | DecodeParams | None) -> PrefillParams | DecodeParams | None:
        if params is None:
            return None
        if isinstance(params, PrefillParams) and not self._can_prefill:
            raise BadParams(f"do_remote_decode is true, but this engine's kv_role is {self._kv_role}")
        if isinstance(params, DecodeParams) and not self._can_decode:
            raise BadParams(f"do_remote_prefill is true, but this engine's kv_role is {self._kv_role}")
        # Several samples of one prompt (n > 1) are several requests with one transfer id: the first one has it.
        # An engine of both roles may be P and D of one transfer, hence the kind in the key.
        key = f"{'P' if isinstance(params, PrefillParams) else 'D'}:{params.transfer_id}"
        owner = self._owners.setdefault(key, req_id)
        if owner != req_id:
            raise _Taken(f"transfer_id {params.transfer_id!r} belongs to request {owner} already")
        while len(self._owners) > _REMEMBERED:
            self._owners.popitem(last=False)
        return params

    def _announce(self, request: Any, params: PrefillParams) -> None:
        if request.request_id not in self._announced:
            self._announced.add(request.request_id)
            prompt = self._prompt_of(request)
            self._next.announces.append(params.transfer_id)
            # A session's prompt goes on where it seemed to end, in a block that would be there already.
            if self._growing and params.early and not getattr(request, "resumable", False):
                tokens = int(request.num_prompt_tokens)
                loaded = self._loaded_tokens(tokens + (request.request_id in self._cut))
                self._growing.add(request.request_id, params.transfer_id, tokens, prompt, loaded, request.max_tokens == 1)

    def _prompt_of(self, request: Any) -> int:
        """Prefill: the fingerprint of the prompt that the request came with."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._prompts[request.request_id] = _fingerprint(request)
        return prompt

    def _loaded_tokens(self, prompt: int) -> int:
        """How much of a prompt the decode engine loads.

        It computes the last token itself. A window that ends after that token may lack the block that this token needs
        of the window's far end; one that ends before it does not.
        """
        return prompt - 1 if self._loses_blocks and prompt > 1 else prompt

    def _keep_window(self, request: Any) -> None:
        """Prefill: ends the prompt one token early where that token would cost a block that the decode engine needs."""
        prompt = int(request.num_prompt_tokens)
        if all(group.gone(prompt) == group.gone(self._loaded_tokens(prompt)) for group in self._groups):
            return
        # Embeddings would be longer than the tokens beside them, and a session goes on behind its prompt. A request that
        # reads no cache is computed on the decode engine.
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return
        if getattr(request, "resumable", False) or getattr(request, "skip_reading_prefix_cache", False):
            return
        # vLLM's own connectors do this for states.
        request.prompt_token_ids = request.prompt_token_ids[:-1]
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        self._cut.add(request.request_id)

    # -- decode -----------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = self._learn(request)
        loads = isinstance(params, DecodeParams) or (isinstance(params, Refused) and params.loads)
        if not loads or request.request_id in self._asked:
            return 0, False
        prompt = int(request.num_prompt_tokens)
        missing = self._loaded_tokens(prompt) - num_computed_tokens
        # The last token is computed here whatever is loaded, because its logits are needed.
        return (missing, True) if missing > 0 and prompt - num_computed_tokens > 1 else (0, False)

    def after_alloc(self, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        params = self._learn(request)
        req_id = request.request_id
        if isinstance(params, PrefillParams):
            self._announce(request, params)  # for a vLLM without on_new_request
            return
        if params is None or req_id in self._asked:
            return
        self._asked.add(req_id)
        if isinstance(params, Refused):
            if params.loads:
                _clear_flag(request)
            if num_external_tokens > 0:
                self._loading[req_id] = ""
                self._next.refusals.append(RefusedWork(req_id, [list(block_ids[group.number]) for group in self._groups]))
            return
        _clear_flag(request)
        if num_external_tokens <= 0:
            self._next.loads.append(self._load(req_id, params, [], []))
            return
        tokens = self._loaded_tokens(int(request.num_prompt_tokens))
        cached = tokens - num_external_tokens
        wanted: BlockIds = []
        first: list[int] = []
        for group in self._groups:
            ids = block_ids[group.number][: _cdiv(tokens, group.block_size)]
            # A cached prefix ends on a block's boundary, unless vLLM says otherwise: then that block is loaded whole.
            start = cached // group.block_size
            if group.loses_blocks:
                start = max(start, first_kept(ids))
            first.append(start)
            wanted.append(list(ids[start:]))
        self._loading[req_id] = params.transfer_id
        self._next.loads.append(self._load(req_id, params, wanted, first, tokens, _fingerprint(request)))

    def _load(
        self, req_id: str, params: DecodeParams, block_ids: BlockIds, first_block: list[int], num_tokens: int = 0, prompt: int = 0
    ) -> LoadWork:
        # Nothing to claim first when there are blocks in the very step in which the request came.
        self._claims.pop(params.transfer_id, None)
        return LoadWork(req_id, params.transfer_id, params.bootstrap_addr, params.engine_id, block_ids, first_block, num_tokens, prompt)

    # -- ends -------------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the request's blocks until the worker reports it as sent; and what it answers."""
        req_id = request.request_id
        params = self._learn(request)
        self._known.pop(req_id, None)
        self._announced.discard(req_id)
        prompt = self._prompts.pop(req_id, 0)
        asked, cut = req_id in self._asked, req_id in self._cut
        self._asked.discard(req_id)
        self._cut.discard(req_id)
        status = getattr(request.status, "name", str(request.status))
        if isinstance(params, PrefillParams):
            return self._prefill_finished(request, params, status, block_ids, int(request.num_prompt_tokens) + cut, prompt)
        if isinstance(params, Refused):
            # The decode engine fails the request with this reason rather than for want of parameters.
            return False, None if params.loads else _params.refusal(params.reason)
        if params is None:
            return False, None
        if not asked:
            # Aborted before it had blocks: the prefill engine need not keep its own for it.
            _clear_flag(request)
            self._next.loads.append(self._load(req_id, params, [], []))
        elif req_id in self._loading:
            # Its blocks stay vLLM's until the worker reports it, which it does when no byte can land any more.
            self._next.cancels.append(CancelWork(params.transfer_id, f"decode: {status}", of_load=True))
        return False, None

    def _prefill_finished(
        self, request: Any, params: PrefillParams, status: str, block_ids: BlockIds, whole: int, fingerprinted: int
    ) -> tuple[bool, dict[str, Any] | None]:
        prompt = int(request.num_prompt_tokens)
        grew = self._growing.forget(request.request_id) if self._growing is not None else {}
        computed = int(getattr(request, "num_computed_tokens", prompt))
        reason = f"prefill: {status}"
        if status in _PROMPT_IS_THERE and computed >= prompt:
            tokens = self._loaded_tokens(whole)
            held: BlockIds = []
            first: list[int] = []
            for n, group in enumerate(self._groups):
                ids = block_ids[group.number][: _cdiv(prompt, group.block_size)]
                kept = first_kept(ids) if group.loses_blocks else 0
                first.append(grew.get(n, kept))  # as it was said while it grew
                held.append(list(ids[first[-1] :]))
                if kept > group.gone(tokens):
                    reason = f"prefill: the window has left the prompt's end: {computed} tokens are computed of a prompt of {whole}"
                    break
            else:
                if any(held):
                    self._offered[request.request_id] = params.transfer_id
                    self._next.offers.append(OfferWork(request.request_id, params.transfer_id, held, first, fingerprinted))
                    return True, self._answer(params, held, whole)
        if status in _PROMPT_IS_THERE:
            logger.warning("request %s: %s", request.request_id, reason)
        self._next.cancels.append(CancelWork(params.transfer_id, reason, of_load=False))
        if grew:
            self._next.retracts.append(params.transfer_id)
        return False, _params.refusal(reason)

    def _answer(self, params: PrefillParams, block_ids: BlockIds, tokens: int) -> dict[str, Any] | None:
        if not self._bootstrap_addr:
            return None  # nobody knows it yet; a router that speaks Mooncake's contract does
        return _params.answer(params.transfer_id, self._engine_id, self._bootstrap_addr, block_ids, self._sizes, tokens)

    def worker_reported(self, sent: Any, received: Any) -> None:
        for req_id in sent or ():
            self._offered.pop(req_id, None)
        for req_id in received or ():
            self._loading.pop(req_id, None)

    # -- steps ------------------------------------------------------------------------------------------------------

    def build_meta(self, num_scheduled_tokens: int, output: Any = None) -> KVConnMetadata:
        """What the workers are told with a step; output is vLLM's SchedulerOutput, of which requests that grow are told."""
        meta, self._next = self._next, KVConnMetadata()
        if self._claims:
            meta.claims, self._claims = list(self._claims.values()), {}
        meta.empty_step = num_scheduled_tokens == 0
        if self._growing is not None and output is not None:
            self._growing.step(output, meta)
        return meta

    def has_unsaid(self) -> bool:
        return self._next.says_something or bool(self._claims)

    def waits(self) -> bool:
        """Whether a report of the worker is outstanding."""
        return bool(self._offered or self._loading)

    def in_flight(self) -> tuple[int, int]:
        """Loads and offers that no worker has reported yet."""
        return len(self._loading), len(self._offered)


def _fingerprint(request: Any) -> int:
    """Of a prompt that its tokens describe, and that stays as it is: not of embeddings, nor of a session, which goes on."""
    tokens = request.prompt_token_ids
    if tokens is None or getattr(request, "prompt_embeds", None) is not None or getattr(request, "resumable", False):
        return 0
    return fingerprint(tokens)


def _clear_flag(request: Any) -> None:
    # vLLM itself, and connectors beside us in a MultiConnector, take the flag for "still to be loaded".
    if isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params["do_remote_prefill"] = False
