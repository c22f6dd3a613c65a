"""The worker's side of the connector, with a stand-in for the agent."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm_sides import decode_params, decode_side, finish, ids, loading, offering, request, step, worker

from kvconn import Claim
from kvconn.vllm.metadata import CancelWork, KVConnMetadata, LoadWork, OfferWork, PartialWork, RefusedWork
from kvconn.vllm.worker import Reports


def test_one_bad_announce_hides_no_other() -> None:
    side, agent = worker()
    good: list[str] = []

    def announce(ids: Sequence[str]) -> None:
        if "bad" in ids:
            raise ValueError("bad")
        good.extend(ids)

    agent.announce = announce  # type: ignore[method-assign]
    meta = KVConnMetadata()
    meta.announces = ["a", "bad", "b"]
    side.begin(meta)
    assert good == ["a", "b"]


def test_one_refused_claim_hides_no_other() -> None:
    side, agent = worker()
    agent.refused = {"b"}
    scheduler = decode_side()
    for each in "abc":
        scheduler.on_new_request(request(40, decode_params(each)))
    step(side, scheduler.build_meta(1))
    assert [call for call in agent.calls if call[1] == "c"] and ("claim", "b") not in agent.calls
    assert side.collect(False) == Reports()


def test_load_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvconn.vllm")
    side, agent = worker(rank="dp0 tp1 pp0")
    (req_id,) = loading(side, "t")
    assert side.collect(False).received == set()
    agent.ends("t", "load")
    agent.ends("t", "load")
    reports = side.collect(False)
    assert (reports.received, reports.failed, reports.sent) == ({req_id}, set(), set())
    assert side.collect(False).received == set()
    side.close()  # the line is written beside the step
    assert '"gb_per_s": ' in caplog.text and "kvconn load {" in caplog.text
    assert '"rank": "dp0 tp1 pp0", "engine_id": "engine-p"' in caplog.text


def test_load_says_what_handing_it_over_took() -> None:
    """NIXL calls it the post time. Two loads of one call share it; an offer has none."""
    side, agent = worker()
    began = time.perf_counter()
    loading(side, "t", "u")
    took = time.perf_counter() - began
    offering(side, "o")
    for transfer_id, kind in (("t", "load"), ("u", "load"), ("o", "offer")):
        agent.ends(transfer_id, kind)
    side.collect(False)
    stats = side.stats()
    assert stats is not None
    (one, other, offer) = (row[6] for row in stats.data["moved"])
    assert 0 < one == other <= took / 2 and offer == 0


@pytest.mark.parametrize("kind", ["claim", "demand"])
def test_what_is_no_end_of_a_load_frees_none_of_its_blocks(kind: str) -> None:
    """The agent reports such things if a user sets them in its configuration. A report of a claim may be an earlier request's."""
    side, agent = worker()
    (req_id,) = loading(side, "t")
    agent.ends("t", kind, code=22)
    assert side.collect(False) == Reports()
    agent.ends("t", "load")
    assert side.collect(False).received == {req_id}


def test_failed_load_names_request_and_blocks() -> None:
    side, agent = worker()
    (req_id,) = loading(side, "t")
    agent.ends("t", "load", code=5)
    reports = side.collect(False)
    assert reports.received == reports.failed == {req_id}
    assert reports.failed_blocks == {0, 1, 2}


@pytest.mark.parametrize("nameless", [False, True])
def test_load_that_the_agent_refuses_fails_alone(nameless: bool) -> None:
    side, agent = worker()
    agent.refused, agent.nameless = {"b"}, nameless
    one, two, three = loading(side, "a", "b", "c")
    reports = side.collect(False)
    assert reports.received == reports.failed == {two}
    assert agent.calls == [("load", "a"), ("load", "c")]
    for each in ("a", "c"):
        agent.ends(each, "load")
    assert side.collect(False).received == {one, three}


def test_offer_is_reported_whatever_became_of_it() -> None:
    side, agent = worker()
    reqs = offering(side, "a", "b")
    agent.ends("a", "offer")
    agent.ends("b", "offer", code=9)
    assert side.collect(False).sent == set(reqs)
    assert side.collect(False).sent == set()


def partial(*ids: str, blocks: Sequence[int] = (1, 2), before: int = 0, after: int = 1) -> KVConnMetadata:
    return KVConnMetadata(partials=[PartialWork(each, [list(blocks)], [before], [after]) for each in ids])


def test_what_a_step_computes_is_told_layer_by_layer() -> None:
    side, agent = worker(by_layers=True)
    side.follow_layers({"layer.0": [0, 1], "layer.1": [2, 3], "shared": []})
    step(side, partial("a", "b"), layers=["layer.0", "layer.1", "shared"])
    told = [("offer_partial", "a"), ("offer_partial", "b"), *(("written", ["a", "b"], region) for region in range(4))]
    assert agent.calls == told
    agent.calls.clear()
    step(side, partial("a", "b"), layers=["layer.0", "shared"])
    assert agent.calls == [*told[:4], ("step", ["a", "b"])]  # the layer that did not tell
    agent.calls.clear()
    step(side, KVConnMetadata(), layers=["layer.0"])  # of another step nothing is told
    assert not agent.calls
    side.begin(partial("c"))  # its forward pass fails: nothing that it was to compute is there
    agent.calls.clear()
    step(side, KVConnMetadata(), layers=["layer.0"])
    assert not agent.calls


def test_prompt_is_told_to_the_agent() -> None:
    side, agent = worker()
    partials, offers = [PartialWork("a", [[1]], [0], [1], 7)], [OfferWork("r", "b", [[1]], [0], 8)]
    loads = [LoadWork("s", "c", "http://p:8998", "p", [[1]], [0], 16, 9)]
    step(side, KVConnMetadata(partials=partials, offers=offers, loads=loads, claims=[Claim("d", "http://p:8998", "p")]))
    assert agent.calls[:-1] == [("offer", "b"), ("claim", "d"), ("offer_partial", "a"), ("load", "c")]
    assert agent.prompts == [8, 0, 7, 9]


def test_chunks_are_told_at_the_step_s_end() -> None:
    side, agent = worker()
    side.follow_layers({"layer.0": [0]})
    step(side, partial("a"), layers=["layer.0"])
    assert agent.calls == [("offer_partial", "a"), ("step", ["a"])]


def test_partial_offer_that_the_agent_refuses_does_not_end_the_step() -> None:
    side, agent = worker()
    agent.refused = {"a"}
    step(side, partial("a", "b"))
    assert agent.calls == [("offer_partial", "b"), ("step", ["b"])]


def test_what_was_begun_by_several_calls_is_told_at_the_step_s_end() -> None:
    """The agent follows only the blocks that the last of the calls named as computing."""
    for all_ids, refused, nameless in ("abc", "b", False), ("abc", "bc", False), ("ab", "", True):
        side, agent = worker(by_layers=True)
        side.follow_layers({"layer.0": [0]})
        agent.refused, agent.nameless = set(refused), nameless
        side.begin(partial(*all_ids))
        side.layer_written("layer.0")
        agent.refused, agent.nameless = set(), False
        side.step_written()
        assert agent.calls[-1] == ("step", sorted(set(all_ids) - set(refused)))


def test_what_a_cancel_has_ended_is_told_at_the_step_s_end() -> None:
    side, agent = worker(by_layers=True)
    side.follow_layers({"layer.0": [0]})
    meta = partial("a")
    meta.loads = [LoadWork("r", "x", "http://p:8998", "p", [[5]], [0], 16)]
    meta.cancels = [CancelWork("x", "aborted", of_load=True)]
    step(side, meta, layers=["layer.0"])
    assert agent.calls == [("offer_partial", "a"), ("load", "x"), ("cancel", "x"), ("written", ["a"], 0), ("step", ["a"])]


def test_layers_are_told_at_the_step_s_end_where_nothing_orders_stores(caplog: pytest.LogCaptureFixture) -> None:
    side, agent = worker(by_layers=True)
    agent.written = memoryview(b"")  # type: ignore[assignment]
    side.follow_layers({"layer.0": [0]})
    assert "membarrier" in caplog.text
    step(side, partial("a"), layers=["layer.0"])
    assert agent.calls == [("offer_partial", "a"), ("step", ["a"])]


def test_layer_that_tells_twice_does_not_tell_for_another() -> None:
    side, agent = worker(by_layers=True)
    side.follow_layers({"layer.0": [0], "layer.1": [1]})
    step(side, partial("a"), layers=["layer.0", "layer.0"])
    assert agent.calls[-1] == ("step", ["a"])


def test_no_partial_offer_follows_one_that_was_refused() -> None:
    """Blocks follow the ones before: the next blocks would stand where the refused ones should."""
    side, agent = worker()
    agent.refused = {"a"}
    step(side, partial("a"))
    agent.refused = set()
    step(side, partial("a", blocks=[3], before=1, after=2))
    assert agent.calls == []
    meta = partial("a")
    meta.withdrawals = ["a"]
    step(side, meta)
    assert agent.calls == [("withdraw", "a"), ("offer_partial", "a"), ("step", ["a"])]


def test_blocks_are_taken_back_before_anything_else() -> None:
    side, agent = worker()
    meta = partial("c")
    meta.withdrawals = ["a", "b"]
    meta.cancels = [CancelWork("b", "aborted", of_load=False), CancelWork("x", "aborted", of_load=False)]
    side.withdraw(meta)
    assert agent.calls == [("cancel", "b"), ("withdraw", "a"), ("withdraw", "b")]
    side.withdraw(meta)
    step(side, meta)
    assert agent.calls[3:] == [("cancel", "x"), ("offer_partial", "c"), ("step", ["c"])]


def test_blocks_are_taken_back_whatever_is_wrong_with_those_of_others() -> None:
    side, agent = worker()
    agent.malformed = {"a"}
    side.withdraw(KVConnMetadata(withdrawals=["a", "b", "c"]))
    assert agent.calls == [("withdraw", "b"), ("withdraw", "c")]


def test_engine_ends_rather_than_use_blocks_that_are_still_read() -> None:
    side, agent = worker()
    agent.read = {"a"}
    with pytest.raises(RuntimeError, match="still read"):
        side.withdraw(KVConnMetadata(withdrawals=["a"]))


def test_metadata_stays_as_it_is_and_each_phase_comes_once() -> None:
    """vLLM may call any of these again in a step. The worker tells the agent each thing once."""
    side, agent = worker()
    meta = KVConnMetadata(
        announces=["a"],
        offers=[OfferWork("r", "b", [[1]], [0])],
        partials=[PartialWork("c", [[2]], [0], [1])],
        withdrawals=["d", "e"],
        claims=[Claim("f", "http://p:8998", "p")],
        loads=[LoadWork("s", "g", "http://p:8998", "p", [[3]], [0], 16)],
        refusals=[RefusedWork("t", [[4]])],
        cancels=[CancelWork("g", "why", of_load=True), CancelWork("e", "why", of_load=False), CancelWork("h", "why", of_load=False)],
    )
    before = copy.deepcopy(meta)
    for call, said in (
        (side.withdraw, [("cancel", "e"), ("withdraw", "d"), ("withdraw", "e")]),
        (side.begin, [("announce", "a"), ("offer", "b"), ("claim", "f"), ("cancel", "h"), ("offer_partial", "c")]),
        (side.load, [("load", "g"), ("cancel", "g")]),
        (lambda _: side.step_written(), [("step", ["c"])]),
    ):
        for again in (False, True):
            agent.calls.clear()
            call(meta)
            assert agent.calls == ([] if again else said)
    assert meta == before
    assert side.collect(False) == Reports(received={"t"}, failed={"t"}, failed_blocks={4})


def test_step_without_preemptions_to_handle_withdraws_when_it_begins() -> None:
    side, agent = worker()
    step(side, KVConnMetadata(withdrawals=["a"], announces=["a"]))
    assert agent.calls == [("withdraw", "a"), ("announce", "a")]


def test_offer_that_the_agent_refuses_frees_at_once() -> None:
    side, agent = worker()
    agent.refused = {"a"}
    (req_id,) = offering(side, "a")
    assert side.collect(False).sent == {req_id}
    assert agent.calls == [("cancel", "a"), ("withdraw", "a")]


def test_empty_load_is_never_reported() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    finish(scheduler, req, [[]])
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t")]
    agent.ends("t", "load", code=3)
    reports = side.collect(False)
    assert (reports.received, reports.failed) == (set(), set())


def test_cancel_of_a_load_that_has_ended_is_dropped() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    scheduler.after_alloc(req, ids(3), 40)
    step(side, scheduler.build_meta(0))
    agent.ends("t", "load")
    side.collect(False)
    finish(scheduler, req, ids(3))
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t")]


def test_cancelled_load_is_reported_after_its_completion() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    scheduler.after_alloc(req, ids(3), 40)
    step(side, scheduler.build_meta(0))
    finish(scheduler, req, ids(3))
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t"), ("cancel", "t")]
    assert side.collect(False).received == set()
    agent.ends("t", "load", code=4)
    assert side.collect(False).received == {req.request_id}


def test_load_and_its_cancel_in_one_step() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    scheduler.after_alloc(req, ids(3), 40)
    finish(scheduler, req, ids(3))
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t"), ("cancel", "t")]


def test_waits_only_in_an_empty_step_with_something_to_wait_for() -> None:
    side, agent = worker()
    side.collect(True)
    assert agent.waits == 0
    loading(side, "t")
    side.collect(False)
    assert agent.waits == 0
    side.collect(True)
    assert agent.waits == 1


def test_dead_agent_gives_no_block_back() -> None:
    side, agent = worker()
    loading(side, "a")

    def broken() -> Any:
        raise RuntimeError("closed")

    agent.get_finished = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        side.collect(False)


def test_dead_agent_without_work_is_nobodys_trouble() -> None:
    side, agent = worker()

    def broken() -> Any:
        raise RuntimeError("closed")

    agent.get_finished = broken  # type: ignore[method-assign]
    assert side.collect(False).received == set()
