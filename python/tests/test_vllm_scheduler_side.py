"""The scheduler's side of the connector, call by call (in test_vllm_scheduler_*.py vLLM's own scheduler calls it)."""

from __future__ import annotations

import importlib.util
import pickle
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm_sides import (
    BLOCK,
    Status,
    decode_params,
    decode_side,
    finish,
    first_step,
    ids,
    prefill_params,
    prefill_side,
    request,
    step,
    worker,
)

from kvconn.vllm import params
from kvconn.vllm.groups import Group

# -- the prefill engine's scheduler ---------------------------------------------------------------------------------


def test_prefill_announces_once_and_offers() -> None:
    side, req = prefill_side(), request(40, prefill_params())
    side.on_new_request(req)
    side.after_alloc(req, ids(3), 0)
    meta = side.build_meta(40)
    assert (meta.announces, meta.offers, meta.empty_step) == (["t"], [], False)
    assert side.matched_tokens(req, 0) == (0, False)
    assert finish(side, req, ids(3)) is True
    assert side.has_unsaid() and side.waits()
    (offer,) = side.build_meta(0).offers
    assert (offer.req_id, offer.transfer_id, offer.block_ids) == (req.request_id, "t", ids(3))
    side.worker_reported({req.request_id}, None)
    assert not side.waits() and not side.has_unsaid()


def test_prefill_without_on_new_request_announces_at_allocation() -> None:
    side, req = prefill_side(), request(40, prefill_params())
    side.after_alloc(req, ids(3), 0)
    assert side.build_meta(40).announces == ["t"]


@pytest.mark.parametrize("kept", [3, 6])
def test_partial_offer_of_a_window_begins_where_it_is_kept(kept: int) -> None:
    """The offer too begins where the partial offers did, though vLLM may have kept more of the window until then."""
    side, req = prefill_side([Group(0, BLOCK), Group(1, BLOCK, window=33)], partial_offers=True), request(140, prefill_params())
    req.max_tokens = 1
    side.on_new_request(req)
    blocks = [list(range(1, 10)), [*[0] * 3, *range(23, 29)]]
    (part,) = side.build_meta(60, first_step(req, blocks, 80, 60)).partials
    assert (part.first_block, part.before, part.after) == ([0, 6], [0, 0], [9, 9])
    assert part.block_ids == [blocks[0], [26, 27, 28]]
    assert finish(side, req, [blocks[0], [*[0] * kept, *blocks[1][kept:]]])
    (offer,) = side.build_meta(0).offers
    assert (offer.first_block, offer.block_ids) == ([0, 6], part.block_ids)


def test_hit_that_has_less_of_the_window_than_is_to_be_sent_has_no_partial_offer() -> None:
    """vLLM does not look in its cache for the tokens that it keeps beside the window: no block is in their place."""
    side, req = (
        prefill_side([Group(0, BLOCK), Group(1, BLOCK, window=33, retained=16)], partial_offers=True),
        request(140, prefill_params()),
    )
    req.max_tokens = 1
    side.on_new_request(req)
    assert not side.build_meta(12, first_step(req, [list(range(1, 10)), [*[0] * 6, 7, 8, 9]], 128, 12)).partials
    assert not finish(side, req, [list(range(1, 10)), [*[0] * 6, 7, 8, 9]])
    meta = side.build_meta(0)
    assert "the window has left the prompt's end" in meta.cancels[0].reason and not meta.withdrawals


@pytest.mark.parametrize("status", [Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_STOPPED])
def test_prefill_offers_only_the_prompt(status: Status) -> None:
    side, req = prefill_side(), request(40, prefill_params(), computed=60)
    req.status = status
    assert finish(side, req, ids(5))
    assert side.build_meta(0).offers[0].block_ids == ids(3)


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
def test_prefill_that_ends_otherwise_is_cancelled(status: Status) -> None:
    side, req = prefill_side(), request(40, prefill_params())
    side.on_new_request(req)
    req.status = status
    assert finish(side, req, ids(3)) is False
    (cancel,) = side.build_meta(0).cancels
    assert (cancel.transfer_id, cancel.of_load) == ("t", False)
    assert status.name in cancel.reason
    assert not side.waits()


def test_prefill_with_part_of_the_prompt_is_cancelled() -> None:
    side, req = prefill_side(), request(40, prefill_params(), computed=16)
    assert finish(side, req, ids(1)) is False
    assert len(side.build_meta(0).cancels) == 1


# -- the decode engine's scheduler ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cached", "first", "count"),
    [(40, 0, 0, 3), (48, 0, 0, 3), (49, 0, 0, 4), (40, 16, 1, 2), (40, 32, 2, 1), (2, 0, 0, 1), (50, 48, 3, 1)],
)
def test_decode_loads_what_it_lacks(tokens: int, cached: int, first: int, count: int) -> None:
    side, req = decode_side(), request(tokens, decode_params())
    side.on_new_request(req)
    assert side.matched_tokens(req, cached) == (tokens - cached, True)
    assert side.matched_tokens(req, cached) == (tokens - cached, True)  # without side effects
    side.after_alloc(req, ids(8), tokens - cached)  # vLLM may have allocated blocks for tokens to come
    side.after_alloc(req, ids(8), 0)  # after the load
    (load,) = side.build_meta(0).loads
    assert load.first_block == [first]
    assert load.block_ids == [ids(8)[0][first : first + count]]
    assert (load.bootstrap_addr, load.engine_id, load.silent) == ("http://p:8998", "engine-p", False)
    assert req.kv_transfer_params["do_remote_prefill"] is False
    assert side.matched_tokens(req, 0) == (0, False)  # preempted, or recomputed after a failure
    assert side.waits()
    side.worker_reported(None, {req.request_id})
    assert not side.waits()
    assert finish(side, req, ids(8)) is False
    assert not side.has_unsaid()


@pytest.mark.parametrize(("tokens", "cached"), [(49, 48), (1, 0)])
def test_decode_that_lacks_nothing_lets_the_prefill_engine_free(tokens: int, cached: int) -> None:
    side, req = decode_side(), request(tokens, decode_params())
    assert side.matched_tokens(req, cached) == (0, False)
    side.after_alloc(req, ids(4), 0)
    (load,) = side.build_meta(1).loads
    assert load.silent and not side.waits()
    assert finish(side, req, ids(4)) is False
    assert not side.has_unsaid()


def test_decode_aborted_before_admission_lets_the_prefill_engine_free() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.on_new_request(req)
    side.matched_tokens(req, 0)
    req.status = Status.FINISHED_ABORTED
    assert finish(side, req, [[]]) is False
    assert side.has_unsaid() and not side.waits()
    assert [load.silent for load in side.build_meta(0).loads] == [True]


def test_decode_claims_what_it_has_no_blocks_for() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.on_new_request(req)
    assert side.has_unsaid()
    (claim,) = side.build_meta(1).claims
    assert (claim.transfer_id, claim.bootstrap_addr, claim.engine_id) == ("t", "http://p:8998", "engine-p")
    assert not side.has_unsaid() and not side.waits()
    side.matched_tokens(req, 0)
    side.after_alloc(req, ids(3), 40)
    meta = side.build_meta(0)
    assert not meta.claims and len(meta.loads) == 1


def test_decode_with_blocks_at_once_claims_nothing() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.on_new_request(req)
    side.after_alloc(req, ids(3), 40)
    meta = side.build_meta(0)
    assert not meta.claims and len(meta.loads) == 1


def test_decode_aborted_during_its_load_is_cancelled() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.matched_tokens(req, 0)
    side.after_alloc(req, ids(3), 40)
    side.build_meta(0)
    req.status = Status.FINISHED_ABORTED
    assert finish(side, req, ids(3)) is False
    (cancel,) = side.build_meta(0).cancels
    assert cancel.of_load
    assert side.waits()  # until the worker says that no byte can land any more


def test_load_of_which_each_block_is_another_request_s_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A load without blocks is silent, so vLLM would wait for ever."""
    side, req = decode_side(), request(40, decode_params())
    side.matched_tokens(req, 0)
    blocks = [KVCacheBlock(block) for block in ids(3)[0]]
    for block in blocks:
        block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"h"), 0))
    side.after_alloc(req, ids(3), 40, [blocks])
    meta = side.build_meta(0)
    assert [work.req_id for work in meta.refusals] == [req.request_id] and all(work.silent for work in meta.loads)
    assert "vLLM has given no block for 40 tokens" in caplog.text


def test_load_at_a_prefill_engine_fails(caplog: pytest.LogCaptureFixture) -> None:
    side, req = prefill_side(), request(40, decode_params())
    side.on_new_request(req)
    assert side.matched_tokens(req, 0) == (40, True)
    side.after_alloc(req, ids(3), 40)
    side.after_alloc(req, ids(3), 0)
    assert side.waits()
    assert [work.block_ids for work in side.build_meta(0).refusals] == [ids(3)]
    assert side.request_finished(req, ids(3)) == (False, None)
    assert caplog.text.count("kv_role is kv_producer") == 1


def test_prefill_at_a_decode_engine_answers_why_not(caplog: pytest.LogCaptureFixture) -> None:
    side, req = decode_side(), request(40, prefill_params())
    side.on_new_request(req)
    assert side.matched_tokens(req, 0) == (0, False)
    side.after_alloc(req, ids(3), 0)
    kept, answer = side.request_finished(req, ids(3))
    assert not kept and not side.has_unsaid()
    with pytest.raises(params.BadParams, match=r"the prefill engine says: .*kv_role is kv_consumer"):
        params.parse(answer)
    assert caplog.text.count("kv_role is") == 1


@pytest.mark.parametrize(
    "kv",
    [
        {"do_remote_prefill": True},
        {**decode_params(), "remote_engine_id": None},
        {**decode_params(), "do_remote_decode": True},
        {**decode_params(), "do_remote_prefill": "yes"},
    ],
)
def test_load_without_sense_fails_as_a_load(kv: dict[str, Any]) -> None:
    side, req = decode_side(), request(40, kv)
    side.on_new_request(req)
    assert side.matched_tokens(req, 16) == (24, True)
    side.after_alloc(req, ids(3), 24)
    meta = side.build_meta(0)
    assert not meta.loads and not meta.claims
    worker_side, agent = worker()
    step(worker_side, meta)
    reports = worker_side.collect(False)
    assert reports.received == reports.failed == {req.request_id}
    assert reports.failed_blocks == set(ids(3)[0])
    assert agent.calls == []
    side.worker_reported(None, reports.received)
    assert not side.waits()
    assert side.matched_tokens(req, 0) == (0, False)  # by the policy recompute


# -- the answer of the prefill engine -------------------------------------------------------------------------------


def answered(kv: dict[str, Any]) -> dict[str, Any]:
    side, req = prefill_side(), request(40, kv)
    side.found_at("http://[fd00::1]:8998")
    side.on_new_request(req)
    kept, answer = side.request_finished(req, ids(3))
    assert kept and answer is not None
    assert side.build_meta(0).offers[0].transfer_id == answer["transfer_id"]
    return answer


def test_answer_is_nixls_and_mooncakes() -> None:
    answer = answered(prefill_params("t"))
    assert answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_bootstrap_addr": "http://[fd00::1]:8998",
        "remote_engine_id": "engine-p",
        "remote_request_id": "t",
        "remote_host": "fd00::1",
        "remote_port": 8998,
        "remote_block_ids": ids(3),
        "remote_num_tokens": 40,
        "tp_size": 1,
    }
    assert params.parse(answer) == params.DecodeParams("t", "http://[fd00::1]:8998", "engine-p")


@pytest.mark.parametrize("dropped", [("transfer_id", "remote_bootstrap_addr"), ("remote_request_id", "remote_host", "remote_port")])
def test_answer_without_the_words_of_one_contract(dropped: tuple[str, ...]) -> None:
    answer = answered(prefill_params("t"))
    kept = {key: value for key, value in answer.items() if key not in dropped}
    assert params.parse(kept) == params.parse(answer)


def test_router_without_a_transfer_id_gets_one() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    one, two = answered(dict(asked)), answered(dict(asked))
    assert one["transfer_id"] != two["transfer_id"]
    assert params.parse(one) == params.DecodeParams(one["transfer_id"], "http://[fd00::1]:8998", "engine-p")


def test_one_x_request_id_names_the_transfer_at_both_engines() -> None:
    """Under the name NixlPushConnector. The prefill engine tells what it has early: the decode engine has the name already."""
    p, d = prefill_side(partial_offers=True), decode_side()
    p.joined_by_request = d.joined_by_request = True
    asks: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
    loads = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine-p", "remote_host": "p", "remote_port": 5600}
    prefill, decode = request(40, asks), request(40, {**loads, "remote_request_id": "9f"}, computed=0)
    prefill.request_id, decode.request_id = "cmpl-9f-0-12345678", "cmpl-9f-0-87654321"
    p.on_new_request(prefill)
    assert p.build_meta(0).announces == ["cmpl-9f-0"]
    d.on_new_request(decode)
    (claim,) = d.build_meta(0).claims
    assert claim.transfer_id == "cmpl-9f-0"


def test_no_answer_while_nobody_knows_the_address() -> None:
    side, req = prefill_side(), request(40, prefill_params())
    assert side.request_finished(req, ids(3)) == (True, None)


# -- windows --------------------------------------------------------------------------------------------------------

WINDOW = 40
HYBRID = (Group(0, BLOCK), Group(1, BLOCK, window=WINDOW))


def with_nulls(total: int, gone: int, start: int) -> list[int]:
    return [0] * gone + list(range(start + gone, start + total))


@pytest.mark.parametrize("tokens", range(2, 160))
def test_window_of_any_prompt_is_there_for_its_last_token(tokens: int) -> None:
    """The decode engine computes the last token again: the window that this token needs must be offered and loaded."""
    p, d = prefill_side(HYBRID), decode_side(HYBRID)
    pr, dr = request(tokens, prefill_params()), request(tokens, decode_params())
    p.on_new_request(pr)
    computed = pr.num_prompt_tokens  # what vLLM's manager has dropped at the end goes by this
    pr.num_computed_tokens = computed
    total = -(-computed // BLOCK)
    held = [list(range(100, 100 + total)), with_nulls(total, HYBRID[1].gone(computed), 200)]
    assert finish(p, pr, held)
    (offer,) = p.build_meta(0).offers

    external, is_async = d.matched_tokens(dr, 0)
    assert is_async and external == tokens - 1
    there = -(-external // BLOCK)
    d.after_alloc(dr, [list(range(300, 300 + there)), with_nulls(there, HYBRID[1].gone(external), 400)], external)
    (load,) = d.build_meta(0).loads
    # What the last token attends to, of what is not computed by then.
    needed = max(0, tokens - WINDOW) // BLOCK
    assert load.first_block[1] <= needed
    for group in (0, 1):
        assert offer.first_block[group] <= load.first_block[group]
        assert offer.first_block[group] + len(offer.block_ids[group]) >= load.first_block[group] + len(load.block_ids[group])
        assert 0 not in offer.block_ids[group] + load.block_ids[group]


def test_prompt_is_cut_only_where_it_must_be() -> None:
    cut = []
    for tokens in range(2, 160):
        side, req = prefill_side(HYBRID), request(tokens, prefill_params())
        side.on_new_request(req)
        if req.num_prompt_tokens != tokens:
            cut.append(tokens)
            assert (req.num_prompt_tokens, len(req.prompt_token_ids), len(req._all_token_ids)) == (tokens - 1,) * 3
            assert req.max_tokens == 1
    assert cut == [tokens for tokens in range(2, 160) if tokens >= WINDOW and (tokens - WINDOW + 1) % BLOCK == 0]


@pytest.mark.parametrize("what", ["resumable", "prompt_embeds", "skip_reading_prefix_cache"])
def test_prompt_of_which_no_token_can_be_taken(what: str) -> None:
    """A session goes on behind its prompt, where the next part would take the lost token's place."""
    tokens = next(n for n in range(WINDOW, 160) if (n - WINDOW + 1) % BLOCK == 0)
    side, req = prefill_side(HYBRID), request(tokens, prefill_params())
    setattr(req, what, True)
    side.on_new_request(req)
    assert req.num_prompt_tokens == len(req.prompt_token_ids) == tokens


def test_window_that_has_moved_on_is_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    side, req = prefill_side(HYBRID), request(100, prefill_params(), computed=130)
    side.on_new_request(req)
    assert not finish(side, req, [list(range(100, 109)), with_nulls(9, HYBRID[1].gone(130), 200)])
    (cancel,) = side.build_meta(0).cancels
    assert "the window has left the prompt's end: 130 tokens are computed of a prompt of 100" in cancel.reason


def test_cached_prefix_and_window() -> None:
    side, req = decode_side(HYBRID), request(100, decode_params())
    assert side.matched_tokens(req, 32) == (67, True)
    side.after_alloc(req, [list(range(300, 307)), with_nulls(7, 3, 400)], 67)
    (load,) = side.build_meta(0).loads
    assert load.first_block == [2, 3]
    assert load.block_ids == [list(range(302, 307)), list(range(403, 407))]
    assert load.num_tokens == 99


def test_metadata_crosses_processes() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.after_alloc(req, ids(3), 40)
    meta = side.build_meta(0)
    assert pickle.loads(pickle.dumps(meta)) == meta
