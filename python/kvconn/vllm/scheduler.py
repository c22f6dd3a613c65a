"""The scheduler side: which requests take part in a transfer, and with which blocks.

The scheduler side has no connection and no cache memory. It keeps one record per request (records.py), and collects what to
tell the workers with the next step (KVConnMetadata).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

from . import params as _params
from .computed import Computed
from .groups import Group, first_kept, first_unhashed
from .metadata import BlockIds, CancelWork, KVConnMetadata, LoadWork, OfferWork, RefusedWork
from .params import BadParams, DecodeParams, PrefillParams, Refused, parse
from .partial import PartialOffers
from .records import (
    ANNOUNCED,
    ASIDE,
    CLAIMED,
    ENDING,
    FAILING,
    LOADING,
    OFFERED,
    REFUSED,
    SETTLED,
    TO_LOAD,
    TO_PREFILL,
    Record,
    Records,
    State,
)
from .requests import Owners, Prompts, Taken

logger = logging.getLogger("kvconn.vllm")

# A prefill request that ended in one of these ways has its whole prompt in the cache. STOPPED is one of them: if the first
# token is the end of the text, the request stops before its length does, and the decode engine waits for the cache all the
# same.
_PROMPT_IS_THERE = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION")

Params = Optional[Union[PrefillParams, DecodeParams, Refused]]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


class SchedulerSide:
    def __init__(
        self,
        kv_role: str,
        groups: list[Group],
        engine_id: str = "",
        sizes: Mapping[str, int] | None = None,
        partial_offers: bool = False,
        batches: int = 1,
        cache_dir: str | None = None,
        recompute_below: int = 0,
    ) -> None:
        self._can_prefill = kv_role in ("kv_producer", "kv_both")
        self._can_decode = kv_role in ("kv_consumer", "kv_both")
        self._kv_role = kv_role
        self._groups = groups
        self._states = any(group.state for group in groups)
        self._leaves_last = self._states or any(group.loses_blocks for group in groups)
        self._recompute_below = recompute_below  # tokens
        self.joined_by_request = False  # see params.parse
        self._engine_id, self._sizes = engine_id, dict(sizes or {})
        self._bootstrap_addr = ""  # where decode engines find this engine; the workers tell it
        self._next = KVConnMetadata()
        self._partials = PartialOffers(groups) if partial_offers else None
        self._batches, self._empty_steps = batches, 0  # that vLLM has under way at once; steps without tokens, one after the other
        self._prompts = Prompts(cache_dir)
        self._requests = Records()
        self.computed = Computed(kv_role)
        self._new_claims: list[Record] = []  # CLAIMED since the last step, unless they have gone on since
        self._owners = Owners()

    @property
    def loads_states(self) -> bool:
        """Whether requests come with states, and no group of another kind lacks a part of its prefix."""
        others = [group for group in self._groups if not group.state]
        return self._can_decode and self._states and len(others) <= 1 and not any(group.loses_blocks for group in others)

    def found_at(self, bootstrap_addr: str) -> None:
        self._bootstrap_addr = bootstrap_addr

    # -- records ----------------------------------------------------------------------------------------------------

    def _learn(self, request: Any) -> Record:
        req_id = request.request_id
        record = self._requests.get(req_id)
        if record is None:
            params, state, sibling = self._judge(req_id, request)
            record = Record(req_id, params, state, int(request.num_prompt_tokens), sibling)
            asked = request.kv_transfer_params
            record.short = state is ASIDE and isinstance(asked, Mapping) and asked.get(_params.ALONE) is True
            self._requests.add(record)
            if state is not ASIDE:
                self.computed.named()
        return record

    def _judge(self, req_id: str, request: Any) -> tuple[Params, State, bool]:
        """What a request asks for, the state in which it begins, and whether another sample of the same request has its transfer."""
        asked = request.kv_transfer_params
        try:
            params = self._accept(request, parse(asked, _params.base_of(req_id) if self.joined_by_request else ""))
            if params is not None:
                self._prompts.check(request)
            if self._states and isinstance(params, DecodeParams) and not self._prompts.fingerprint(request):
                raise BadParams("a prompt of embeddings, or of a session, is not carried for a model with states: its end is not known")
        except Taken as taken:  # an ordinary case
            logger.info("request %s takes no part in a transfer: %s", req_id, taken)
            return None, ASIDE, True
        except BadParams as error:
            logger.warning("request %s: kv_transfer_params: %s", req_id, getattr(error, "for_the_log", error))
            return Refused(str(error), loads=_params.asks_for_load(asked)), REFUSED, False
        if params is None:
            return None, ASIDE, False
        return params, TO_PREFILL if isinstance(params, PrefillParams) else TO_LOAD, False

    def _accept(self, request: Any, params: PrefillParams | DecodeParams | None) -> PrefillParams | DecodeParams | None:
        if params is None:
            return None
        if isinstance(params, PrefillParams) and not self._can_prefill:
            raise BadParams(f"do_remote_decode is true, but this engine's kv_role is {self._kv_role}")
        if isinstance(params, DecodeParams) and not self._can_decode:
            raise BadParams(f"do_remote_prefill is true, but this engine's kv_role is {self._kv_role}")
        self._owners.take(params, request)
        return params

    # -- requests ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        record = self._learn(request)
        if record.state is TO_PREFILL:
            record.prompt = self._prompts.fingerprint(request)  # of the prompt before it is cut
            self._cut_last(record, request)
            self._announce(record, request)
        elif record.state is TO_LOAD:
            self._requests.move(record, CLAIMED)
            self._new_claims.append(record)

    def _announce(self, record: Record, request: Any) -> None:
        params = record.params
        self._requests.move(record, ANNOUNCED)
        self._next.announces.append(params.transfer_id)
        # A session's next prompt begins in the last block of this one, so that block cannot be offered early.
        if self._partials is not None and params.early and not getattr(request, "resumable", False):
            tokens = int(request.num_prompt_tokens)
            loaded = self._loaded_tokens(tokens + record.cut)
            record.partial = self._partials.begin(params.transfer_id, tokens, record.prompt, loaded, request.max_tokens == 1)

    def _loaded_tokens(self, prompt: int) -> int:
        """How much of a prompt the decode engine loads.

        The decode engine computes the last token itself. A window that ends after that token may lack the block at the
        window's far end that this token attends to; a window that ends before the token has it. A state must be that before
        the token.
        """
        return prompt - 1 if self._leaves_last and prompt > 1 else prompt

    def _cut_last(self, record: Record, request: Any) -> None:
        """Prefill: cuts the prompt's last token off if that token would cost what the decode engine needs: a block, or a state."""
        prompt = int(request.num_prompt_tokens)
        loaded = self._loaded_tokens(prompt)
        if prompt == loaded or (not self._states and all(group.gone(prompt) == group.gone(loaded) for group in self._groups)):
            return
        # Embeddings would be longer than the tokens beside them. A session goes on behind its prompt. A request that reads
        # no cache is computed on the decode engine.
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return
        if getattr(request, "resumable", False) or getattr(request, "skip_reading_prefix_cache", False):
            return
        # vLLM's own connectors cut the prompt in this way for states.
        request.prompt_token_ids = request.prompt_token_ids[:-1]
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        record.cut = True

    # -- decode -----------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        record = self._learn(request)
        state = record.state
        if not (state is CLAIMED or state is TO_LOAD or (state is REFUSED and record.params.loads)):
            return 0, False
        if self._states and getattr(request, "skip_reading_prefix_cache", False):
            return 0, False  # prefill has not cut such a prompt; before 0.31 vLLM would load it
        prompt = int(request.num_prompt_tokens)
        missing = self._loaded_tokens(prompt) - num_computed_tokens
        record.short = missing < self._recompute_below and state is not REFUSED
        if record.short:
            return 0, False
        # The last token is computed here whatever is loaded, because its logits are needed.
        return (missing, True) if missing > 0 and prompt - num_computed_tokens > 1 else (0, False)

    def after_alloc(self, request: Any, block_ids: BlockIds, num_external_tokens: int, blocks: Sequence[Sequence[Any]] = ()) -> None:
        """blocks: vLLM's own, per group, of block_ids."""
        record = self._learn(request)
        if record.state is TO_PREFILL:  # a vLLM without on_new_request
            record.prompt = self._prompts.fingerprint(request)
            self._announce(record, request)
        elif record.state is REFUSED:
            self._fail(record, request, block_ids, num_external_tokens)
        elif record.state in (TO_LOAD, CLAIMED):
            _clear_flag(request)
            if num_external_tokens > 0:
                self._load(record, request, block_ids, num_external_tokens, blocks)
            else:
                self._need_nothing(record)
                self._requests.move(record, SETTLED)

    def _fail(self, record: Record, request: Any, block_ids: BlockIds, num_external_tokens: int) -> None:
        if record.params.loads:
            _clear_flag(request)
        if num_external_tokens > 0:
            self._next.refusals.append(RefusedWork(record.req_id, [list(block_ids[group.number]) for group in self._groups]))
            self._requests.move(record, FAILING)
        else:
            self._requests.move(record, SETTLED)

    def _load(self, record: Record, request: Any, block_ids: BlockIds, num_external_tokens: int, blocks: Sequence[Sequence[Any]]) -> None:
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
            if blocks:
                start = first_unhashed(blocks[group.number], start, len(ids))
            first.append(0 if group.state else start)
            wanted.append(group.of_state(ids, tokens) if group.state else list(ids[start:]))
        params, prompt = record.params, self._prompts.fingerprint(request)
        work = LoadWork(record.req_id, params.transfer_id, params.bootstrap_addr, params.engine_id, wanted, first, tokens, prompt)
        self._requests.move(record, LOADING)
        if any(wanted) and all(ids for group, ids in zip(self._groups, wanted) if group.state):
            self._next.loads.append(work)
            return
        # Without its state the request would go on from another one's, and a load of no block is one that vLLM never hears of.
        logger.error("request %s: vLLM has given no block for %d tokens, or none for their state: %s", record.req_id, tokens, block_ids)
        self._next.refusals.append(RefusedWork(record.req_id, wanted))
        self._need_nothing(record)

    def _need_nothing(self, record: Record) -> None:
        """Tells the prefill engine that it may free the request's blocks."""
        params = record.params
        self._next.loads.append(LoadWork(record.req_id, params.transfer_id, params.bootstrap_addr, params.engine_id, [], []))

    # -- ends -------------------------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the request's blocks until the worker reports it as sent; and what vLLM answers."""
        record = self._learn(request)
        params, state = record.params, record.state
        status = getattr(request.status, "name", str(request.status))
        if state in (TO_PREFILL, ANNOUNCED):
            return self._prefill_finished(record, request, status, block_ids)
        if state is OFFERED:
            return True, None
        if state is LOADING:
            # Its blocks stay vLLM's until the worker reports the request: then no byte can land any more.
            self._next.cancels.append(CancelWork(params.transfer_id, f"decode: {status}", of_load=True))
            self._requests.move(record, ENDING)
        elif state is FAILING:
            self._requests.move(record, ENDING)
        elif state is not ENDING:
            if state in (TO_LOAD, CLAIMED):  # it was aborted before it had blocks
                _clear_flag(request)
                self._need_nothing(record)
            self._requests.forget(record)
        # With this answer the decode engine fails the request for the right reason, and not for want of parameters.
        refused = isinstance(params, Refused) and not params.loads
        return False, _params.refusal(params.reason) if refused else None

    def _prefill_finished(self, record: Record, request: Any, status: str, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        params, prompt = record.params, int(request.num_prompt_tokens)
        whole = prompt + record.cut
        given = self._partials.end(record.partial) if self._partials is not None else {}
        record.partial = None
        computed = int(getattr(request, "num_computed_tokens", prompt))
        reason = f"prefill: {status}"
        if status in _PROMPT_IS_THERE and computed >= prompt:
            tokens = self._loaded_tokens(whole)
            held: BlockIds = []
            first: list[int] = []
            for n, group in enumerate(self._groups):
                ids = block_ids[group.number][: _cdiv(prompt, group.block_size)]
                kept = first_kept(ids) if group.loses_blocks else 0
                first.append(given.get(n, kept))  # as the partial offers said
                held.append(group.of_state(ids, prompt) if group.state else list(ids[first[-1] :]))
                if group.state and (computed != tokens or not held[-1]):
                    reason = f"prefill: the state is of {computed} tokens of the prompt, decode needs that of {tokens} of {whole}"
                    break
                if kept > group.gone(tokens):
                    reason = f"prefill: the window has left the prompt's end: {computed} tokens are computed of a prompt of {whole}"
                    break
            else:
                if any(held):
                    self._next.offers.append(OfferWork(record.req_id, params.transfer_id, held, first, record.prompt))
                    self._requests.move(record, OFFERED)
                    return True, self._answer(params, held, whole)
        if status in _PROMPT_IS_THERE:
            logger.warning("request %s: %s", record.req_id, reason)
        self._next.cancels.append(CancelWork(params.transfer_id, reason, of_load=False))
        if given:
            self._next.withdrawals.append(params.transfer_id)
        self._requests.forget(record)
        return False, _params.refusal(reason)

    def _answer(self, params: PrefillParams, block_ids: BlockIds, tokens: int) -> dict[str, Any] | None:
        if not self._bootstrap_addr:
            return None  # a router that speaks Mooncake's contract knows the address by itself
        return _params.answer(params.transfer_id, self._engine_id, self._bootstrap_addr, block_ids, self._sizes, tokens)

    def worker_reported(self, sent: Any, received: Any, failed: Any = ()) -> None:
        """Each argument may also name requests of another connector that runs beside this one.

        failed: those of received whose load has failed.
        """
        for req_id in sent or ():
            record = self._requests.get(req_id)
            if record is not None and record.state is OFFERED:
                self._requests.forget(record)
                self.computed.moved = True
        for req_id in received or ():
            record = self._requests.get(req_id)
            if record is None:
                continue
            if record.state is ENDING:
                self._requests.forget(record)
            elif record.state in (LOADING, FAILING):
                record.failed = record.state is FAILING or (failed is not None and req_id in failed)
                record.loaded = not record.failed
                self.computed.moved |= record.loaded
                self._requests.move(record, SETTLED)

    # -- steps ------------------------------------------------------------------------------------------------------

    def build_meta(self, num_scheduled_tokens: int, output: Any = None) -> KVConnMetadata:
        """What the workers are told with a step; output is vLLM's SchedulerOutput, which the partial offers follow."""
        meta, self._next = self._next, KVConnMetadata()
        if self._new_claims:
            # A request that got blocks, or ended, since it came needs no claim.
            meta.claims = [record.params for record in self._new_claims if record.state is CLAIMED]
            self._new_claims = []
        self._empty_steps = 0 if num_scheduled_tokens else self._empty_steps + 1
        # While a batch is under way, the next one must find the worker ready.
        meta.empty_step = self._empty_steps >= self._batches
        if output is not None:
            self.computed.step(output, self._requests)
        if self._partials is not None and output is not None:
            self._partials.step(output, self._requests, meta)
            if self._empty_steps > self._batches:
                self._partials.stop(self._requests, meta)
        return meta

    def has_unsaid(self) -> bool:
        return self._next.says_something or bool(self._new_claims)

    def waits(self) -> bool:
        """Whether the worker has still to report a request, or reads blocks of one that is being computed.

        A pause of vLLM waits for this, and a sleep after it throws the cache away.
        """
        return bool(self._requests.offers or self._requests.loads or (self._partials is not None and self._partials.given))

    def in_flight(self) -> tuple[int, int]:
        """Loads and offers that no worker has reported yet."""
        return self._requests.loads, self._requests.offers


def _clear_flag(request: Any) -> None:
    # vLLM itself, and connectors beside us in a MultiConnector, take the flag for "still to be loaded".
    if isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params["do_remote_prefill"] = False
