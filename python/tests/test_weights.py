"""Engines that replace their weights while they run: what they say with a prompt, and which of them exchange caches."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import numpy as np
import pytest
from sglang_rank import both, empty, fill
from side import Side

import kvconn
from kvconn import Status, TransferError, weights
from kvconn.sglang.layout import ids
from kvconn.sglang.partial import Chunks
from kvconn.sglang.rooms import FAILED, SUCCESS, WAITING
from kvconn.weights import Weights

PROMPT = kvconn.fingerprint([1, 2, 3])


def replace(engine: Weights, result: Any = None) -> None:
    engine.replace("model", lambda: result)


def test_fingerprint_without_a_replacement_is_the_prompt_s() -> None:
    engine = Weights()
    assert [engine.of_prompt(each) for each in (PROMPT, 0)] == [PROMPT, 0]


def test_each_replacement_makes_another_fingerprint() -> None:
    one, other, seen = Weights(), Weights(), {PROMPT}
    for _ in range(3):
        replace(one)
        seen.add(one.of_prompt(PROMPT))
        replace(other)
        assert one.of_prompt(PROMPT) == other.of_prompt(PROMPT)
    assert len(seen) == 4 and 0 not in seen
    mark = Weights()
    replace(mark)
    assert mark.of_prompt(mark.of_prompt(PROMPT) ^ PROMPT) == 1, "0 is not said"


def test_fingerprints_that_cannot_be_compared_are_not_said() -> None:
    """0 is equal to each fingerprint."""
    engine = Weights()
    replace(engine)
    with pytest.raises(TransferError, match=r"replaced its weights since its start, and the prompt has no fingerprint \(embeddings"):
        engine.of_prompt(0)


def test_replacement_counts_before_it_is_made() -> None:
    engine, said = Weights(), []

    def look() -> None:
        said.append(engine.replaced)
        with pytest.raises(TransferError, match="are being replaced") as raised:
            engine.of_prompt(PROMPT)
        assert raised.value.code == Status.REFUSED

    engine.replace("model", look)
    assert said == [1] and engine.of_prompt(PROMPT)


def fails() -> None:
    raise RuntimeError("half of them are replaced")


@pytest.mark.parametrize("failure", [fails, lambda: (False, "half of them are replaced")], ids=["raises", "says so"])
def test_replacement_that_fails_fits_no_other_engine(failure: Callable[[], Any]) -> None:
    """Until the next one ends well."""
    engine, other = Weights(), Weights()
    with contextlib.suppress(RuntimeError):
        engine.replace("model", failure)
    with pytest.raises(TransferError, match="their last replacement has failed"):
        engine.of_prompt(PROMPT)
    replace(engine, (True, ""))
    replace(other)
    replace(other)
    assert engine.of_prompt(PROMPT) == other.of_prompt(PROMPT), "each call counts, so that all ranks count the same"


def test_calls_within_a_call_count_once() -> None:
    engine = Weights()
    engine.replace("model", lambda: engine.replace("model", lambda: replace(engine)))
    assert engine.replaced == 1 and engine.of_prompt(PROMPT)


def test_parts_of_a_session_count_once() -> None:
    engine = Weights()
    engine.open("model", lambda: None)
    for _ in range(3):
        replace(engine)
        with pytest.raises(TransferError):
            engine.of_prompt(PROMPT)
    engine.close("model", lambda: None)
    assert engine.replaced == 1 and engine.of_prompt(PROMPT)


@pytest.mark.parametrize("part", [True, False])
def test_session_of_which_a_part_has_failed(part: bool) -> None:
    """The engine may end it as if all were there."""
    engine = Weights()
    engine.open("model", lambda: None)
    with pytest.raises(RuntimeError):
        engine.part(fails) if part else engine.replace("model", fails)
    replace(engine)
    engine.close("model", lambda: None)
    with pytest.raises(TransferError):
        engine.of_prompt(PROMPT)
    engine.open("model", lambda: None)
    engine.close("model", lambda: None)
    assert engine.replaced == 2 and engine.of_prompt(PROMPT)


def test_session_that_does_not_open() -> None:
    """A call for a session that is open already changes nothing. One that fails otherwise may have begun."""
    engine = Weights()
    with pytest.raises(RuntimeError):
        engine.open("model", fails)
    with pytest.raises(TransferError):
        engine.of_prompt(PROMPT)
    engine.open("model", lambda: None)
    with pytest.raises(RuntimeError):
        engine.open("model", fails)
    engine.close("model", lambda: None)
    assert engine.replaced == 2 and engine.of_prompt(PROMPT)


def test_draft_model_that_is_not_there_to_the_end() -> None:
    engine = Weights()
    for model in ("target", "draft"):
        engine.open(model, lambda: None)
    engine.close("target", lambda: None)
    with pytest.raises(TransferError):
        engine.of_prompt(PROMPT)
    engine.close("draft", lambda: None)
    assert engine.of_prompt(PROMPT)


def test_weights_that_are_gone() -> None:
    engine = Weights()
    engine.lose("model")
    with pytest.raises(TransferError):
        engine.of_prompt(PROMPT)
    replace(engine)
    assert engine.replaced == 1 and engine.of_prompt(PROMPT)


class Base:
    def load(self, what: str) -> str:
        """Its own words."""
        return f"{what}s"


class Derived(Base):
    def reload(self) -> str:
        return self.load("part")


def test_methods_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "engine", Weights())
    said: list[Any] = []

    def how(call: Callable[[], Any], base: Any, *args: Any) -> Any:
        said.append((type(base), *args))
        return weights.engine.replace("model", call)

    assert not weights.follow(Base, "no method", how)
    assert all(weights.follow(each, "load", how) for each in (Base, Derived, Base))
    assert Derived().load("whole") == "wholes" and said == [(Derived, "whole")] and Base.load.__doc__ == "Its own words."
    assert weights.follow(Derived, "reload", how) and Derived().reload() == "parts"
    assert weights.engine.replaced == 2
    weights.started()
    assert weights.engine.replaced == 0


def test_agents_of_engines_that_replace_their_weights(prefill: Side, decode: Side) -> None:
    """One load for each number of replacements: neither engine, the decode engine, both, the prefill engine, both."""
    p, d = Weights(), Weights()
    prefill.cache[:, 3] = np.arange(1, 4, dtype=np.uint8)[:, None]
    for n, (engine, fits) in enumerate([(None, True), (d, False), (p, True), (p, False), (d, True)]):
        if engine is not None:
            replace(engine)
        decode.cache[:] = 0
        prefill.agent.offer([kvconn.Offer(f"w{n}", [[3]], prompt=p.of_prompt(PROMPT))])
        address = prefill.agent.bootstrap_address
        decode.agent.start_load([kvconn.Load(f"w{n}", address, "engine-prefill", [[1]], prompt=d.of_prompt(PROMPT))])
        for done in (decode.finished(f"w{n}"), prefill.finished(f"w{n}")):
            assert done.code == (0 if fits else Status.REFUSED), (n, done)
            if not fits:
                assert "decode asks for another prompt than prefill has" in done.reason
                assert "both need the same request, under a transfer_id of its own, and weights replaced as often" in done.reason
        assert (decode.cache[:, 1] == prefill.cache[:, 3]).all() == fits and decode.cache.any() == fits


class Engines:
    """Two ranks of SGLang in one process, each with weights of its own."""

    def __init__(self, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.p, self.d = ranks("prefill"), ranks("decode")
        self.weights = {self.p: Weights(), self.d: Weights()}
        self._set = lambda side: monkeypatch.setattr(weights, "engine", self.weights[side])
        fill(self.p)

    def of(self, side: Any) -> Any:
        self._set(side)
        return side

    def ended(self, at_p: Any, at_d: Any) -> tuple[int, str]:
        """The state in which both rooms have ended, and decode's reason."""
        for side, room in ((self.d, at_d), (self.p, at_p)):
            side.until(room, SUCCESS, FAILED)
            side.rooms.forget(room)
        assert at_p.state == at_d.state
        return at_d.state, at_d.reason


@pytest.fixture
def engines(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(ranks, monkeypatch)


def test_rooms_of_engines_that_replace_their_weights(engines: Engines) -> None:
    p, d = engines.p, engines.d
    for number, (replaces, fits) in enumerate([((), True), ((d,), False), ((p,), True), ((p, d), True), ((p,), False)], 1):
        for side in replaces:
            replace(engines.weights[side])
        at_p, at_d = both(p, d, number, (7, 7))
        engines.of(d).load(at_d, p.address, [1, 2], 1)
        p.until(at_p, WAITING)
        engines.of(p).offer(at_p, [4, 5], 1)
        state, reason = engines.ended(at_p, at_d)
        assert state == (SUCCESS if fits else FAILED), (number, reason)
        assert fits or "weights replaced as often" in reason
    empty(p, d)


@pytest.mark.parametrize("between", [True, False])
def test_weights_that_are_replaced_between_a_prompt_s_chunks(engines: Engines, between: bool) -> None:
    """The first chunk's pages are of other weights than the rest."""
    p, d = engines.p, engines.d

    def replace_all(now: bool) -> None:
        for each in engines.weights.values() if now else ():
            replace(each)

    replace_all(not between)
    at_p, at_d = both(p, d, 1, (7, 7))
    engines.of(d).load(at_d, p.address, [1, 2], 1)
    p.until(at_p, WAITING)
    chunks = Chunks(p.layout, 2, 0)
    chunks.add(ids([4], "pages"))
    engines.of(p).rooms.offer_partial(at_p, *chunks.partial_offer(ids([4], "pages")))
    replace_all(between)
    chunks.add(ids([5], "pages"))
    p.rooms.offer(at_p, *chunks.offer([], 1))
    state, reason = engines.ended(at_p, at_d)
    assert state == (FAILED if between else SUCCESS), reason
    empty(p, d)


def test_room_of_an_engine_whose_replacement_has_failed(engines: Engines) -> None:
    """On either side: both sides hear why."""
    p, d = engines.p, engines.d
    for number, side in enumerate((p, d), 1):
        replace(engines.weights[side], (False, "no such file"))
        at_p, at_d = both(p, d, number, (7, 7))
        engines.of(d).load(at_d, p.address, [1, 2], 1)
        if side is p:
            p.until(at_p, WAITING)
            engines.of(p).offer(at_p, [4, 5], 1)
        assert "their last replacement has failed" in (at_p if side is p else at_d).reason
        state, reason = engines.ended(at_p, at_d)
        assert state == FAILED and "their last replacement has failed" in reason
        for each in engines.weights.values():
            while each.replaced < number or each._unsure:
                replace(each)
    empty(p, d)
