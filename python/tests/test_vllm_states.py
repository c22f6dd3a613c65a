"""States between two engines under vLLM's own schedulers: D goes on from exactly the state that P had before the prompt's last
token, whichever way each engine keeps states."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
from state_sides import Side, run
from vllm_engine import BLOCK, MAX_BATCHED, prefill_kv

MODES = {"none": False, "align": True}
numbers = random.Random(7)


class Pair:
    def __init__(self, model: Path, p: bool, d: bool, attention: bool = True, policy: str = "fail", **more: Any) -> None:
        self.p = Side(model, "kv_producer", align=p, attention=attention, **more)
        self.d = Side(model, "kv_consumer", align=d, attention=attention, policy=policy, **more)

    def close(self) -> None:
        self.p.agent.close()
        self.d.agent.close()

    def add(self, prompt: list[int], max_tokens: int = 20, p_tokens: int = 1, **more: Any) -> tuple[Any, Any]:
        """The request's two halves."""
        kv = prefill_kv()
        decode = {"transfer_id": kv["transfer_id"], "remote_bootstrap_addr": self.p.agent.bootstrap_address}
        decode |= {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine-prefill"}
        theirs = self.p.engine.add(list(prompt), kv, max_tokens=p_tokens, **more)
        return theirs, self.d.engine.add(list(prompt), decode, max_tokens=max_tokens, **more)

    def run(self) -> None:
        run(self.p, self.d)


@pytest.fixture(scope="module")
def pairs(model: Path) -> Iterator[dict[Any, Pair]]:
    """An engine takes a second to make, so tests that want the same ones share them. Each leaves nothing behind."""
    made: dict[Any, Pair] = {}
    yield made
    for pair in made.values():
        pair.close()


@pytest.fixture
def make_pair(model: Path, pairs: dict[Any, Pair]) -> Any:
    def make(p: str = "align", d: str = "align", **more: Any) -> Pair:
        key = (p, d, *sorted(more.items()))
        if key in pairs and any(side.engine.scheduler.has_requests() for side in (pairs[key].p, pairs[key].d)):
            pairs.pop(key).close()  # a test has failed
        if key not in pairs:
            pairs[key] = Pair(model, MODES[p], MODES[d], **more)
        for side in (pairs[key].p, pairs[key].d):
            side.failures.clear()
            side.engine.metas.clear()
        return pairs[key]

    return make


def text(tokens: int) -> list[int]:
    return [numbers.randrange(500) for _ in range(tokens)]


@pytest.mark.parametrize("d", MODES)
@pytest.mark.parametrize("p", MODES)
def test_decode_goes_on_from_the_state_before_the_last_token(make_pair: Any, p: str, d: str) -> None:
    """Of prompts of one step and of several, with a last token that opens a block, fills one, or stands elsewhere."""
    pair = make_pair(p, d)
    lengths = (1, 2, 3, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 40, MAX_BATCHED, MAX_BATCHED + 1, MAX_BATCHED + 2, 200, 305)
    halves = [pair.add(text(tokens)) for tokens in lengths]
    pair.run()
    assert [pair.d.engine.texts[ours.request_id] for _, ours in halves] == [[7] * 20] * len(lengths) and not pair.d.failures
    assert [theirs.num_prompt_tokens for theirs, _ in halves] == [1, *(tokens - 1 for tokens in lengths[1:])]
    loads = {work.req_id: work.silent for meta in pair.d.engine.metas for work in meta.loads}
    # A prompt of one token is computed, not loaded.
    assert [loads[ours.request_id] for _, ours in halves] == [True] + [False] * 12


@pytest.mark.parametrize("mode", MODES)
def test_model_without_attention(make_pair: Any, mode: str) -> None:
    pair = make_pair(mode, mode, attention=False)
    requests = [pair.add(text(tokens))[1] for tokens in (1, 2, BLOCK + 1, 100, 200)]
    pair.run()
    assert [pair.d.engine.texts[ours.request_id] for ours in requests] == [[7] * 20] * 5 and not pair.d.failures
    assert pair.p.agent.stats()["bytes_partial"] == 0


@pytest.mark.parametrize("mode", MODES)
def test_state_is_sent_when_the_prompt_has_ended(make_pair: Any, mode: str) -> None:
    """Attention goes early. A state that went early would be overwritten by the next step, or be of too few tokens."""
    pair = make_pair(mode, mode)
    theirs, _ = pair.add(text(300))
    transfer = theirs.kv_transfer_params["transfer_id"]
    early = 0
    while not pair.p.engine.finished(theirs):
        pair.p.step()
        pair.d.step()
        ready = pair.p.engine.ready.get(transfer)
        assert ready is None or [ready[place] for place, spec in pair.p.layers.values() if "Mamba" in type(spec).__name__] == [0, 0]
        early = max(early, *(ready or [0]))
    assert early == -(-299 // BLOCK)
    pair.p.step()
    (offer,) = pair.p.engine.metas[-1].offers
    assert sorted(map(len, offer.block_ids)) == [1, 1, early] and all(0 not in ids for ids in offer.block_ids)
    pair.run()
    assert not pair.d.failures


def test_many_at_once(make_pair: Any) -> None:
    """Few blocks: requests wait for each other, and are preempted."""
    pair = make_pair(blocks=80)
    texts = [text(60 + 37 * n) for n in range(8)]
    ours = [pair.add(each, max_tokens=30)[1] for each in texts]
    pair.run()
    assert [pair.d.engine.texts[each.request_id] for each in ours] == [[7] * 30] * 8 and not pair.d.failures


def test_prefix_that_each_engine_has(make_pair: Any) -> None:
    """D loads what follows its prefix, and the state whole: that of the prefix is another one."""
    pair = make_pair()
    prefix = text(5 * BLOCK)
    pair.d.engine.add(prefix + text(1), None, max_tokens=1)
    pair.run()
    for more in (3, BLOCK, 2 * BLOCK + 1, 100):
        _, ours = pair.add(prefix + text(more))
        pair.run()
        assert pair.d.engine.texts[ours.request_id] == [7] * 20 and not pair.d.failures
    loads = [work for meta in pair.d.engine.metas for work in meta.loads]
    states = [place for place, spec in pair.d.layers.values() if "Mamba" in type(spec).__name__]
    (attention,) = set(range(3)) - set(states)
    assert [work.first_block[attention] for work in loads] == [5, 5, 5, 5]
    assert all(len(work.block_ids[place]) == 1 and work.first_block[place] == 0 for work in loads for place in states)


def test_prefix_of_which_decode_has_no_state(make_pair: Any) -> None:
    """What came by a load has its state at the prompt's end only. The next prompt with that prefix loads what follows, and a state."""
    pair = make_pair()
    assert pair.d.engine.ours.supports_divergent_local_hybrid_hits
    states = [place for place, spec in pair.d.layers.values() if "Mamba" in type(spec).__name__]
    (attention,) = set(range(3)) - set(states)
    prefix = text(5 * BLOCK)
    for more, first in ((40, 0), (3, 5), (2 * BLOCK + 1, 5), (100, 5)):
        _, ours = pair.add(prefix + text(more))
        pair.run()
        assert pair.d.engine.texts[ours.request_id] == [7] * 20 and not pair.d.failures
        (load,) = [work for meta in pair.d.engine.metas for work in meta.loads if work.req_id == ours.request_id]
        assert load.first_block[attention] == first
        assert all(len(load.block_ids[place]) == 1 and load.first_block[place] == 0 for place in states)
    # Without a transfer such a prefix is computed again: there is no state to go on from.
    alone = pair.d.engine.add(prefix + text(30), None, max_tokens=2)
    pair.run()
    assert pair.d.engine.texts[alone.request_id] == [7] * 2


def test_prefix_that_lacks_only_its_state(make_pair: Any) -> None:
    """There is no token to load but the last, so vLLM goes back to the last state that decode has. Prefill hears that it may free."""
    pair = make_pair()
    prefix = text(5 * BLOCK)
    pair.add(prefix + text(40))
    pair.run()
    _, ours = pair.add(prefix + text(1))
    pair.run()
    assert pair.d.engine.texts[ours.request_id] == [7] * 20 and not pair.d.failures
    assert [work.silent for meta in pair.d.engine.metas for work in meta.loads if work.req_id == ours.request_id] == [True]


def test_load_that_fails_behind_such_a_prefix(make_pair: Any) -> None:
    """Decode computes the prompt from its begin: its state is of no use."""
    pair = make_pair(policy="recompute")
    prefix = text(5 * BLOCK)
    pair.add(prefix + text(40))
    pair.run()
    theirs, ours = pair.add(prefix + text(20))
    pair.d.step()
    pair.p.engine.abort(theirs)
    pair.run()
    assert pair.d.engine.texts[ours.request_id] == [7] * 20 and pair.d.failures == [ours.request_id]


def test_prompt_that_decode_has_whole(make_pair: Any) -> None:
    """Its state came by a load, and vLLM has kept it: decode goes on from it, and loads nothing."""
    pair = make_pair()
    prompt = text(5 * BLOCK + 1)
    for silent in (False, True):
        _, ours = pair.add(prompt)
        pair.run()
        assert pair.d.engine.texts[ours.request_id] == [7] * 20 and not pair.d.failures
        assert [work.silent for meta in pair.d.engine.metas for work in meta.loads if work.req_id == ours.request_id] == [silent]


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_are_scheduled_ahead(make_pair: Any, mode: str) -> None:
    """With async scheduling P might compute a token more before it hears that the request has ended."""
    pair = make_pair(mode, mode, async_scheduling=True)
    requests = [pair.add(text(tokens))[1] for tokens in (2, BLOCK + 1, 100, 200)]
    pair.run()
    assert [pair.d.engine.texts[ours.request_id] for ours in requests] == [[7] * 20] * 4 and not pair.d.failures


@pytest.mark.parametrize("mode", MODES)
def test_preempted(make_pair: Any, mode: str) -> None:
    """P computes the prompt anew. D computes it itself, since its load is gone with its blocks."""
    pair = make_pair(mode, mode)
    before = pair.d.agent.stats()["loads"]
    theirs, ours = pair.add(text(200))
    pair.p.step()
    pair.p.step()
    assert theirs.num_computed_tokens > 0
    pair.p.engine.preempt()
    for _ in range(1000):
        if ours.num_output_tokens > 5:
            break
        pair.p.step()
        pair.d.step()
    pair.d.engine.preempt()
    pair.run()
    assert pair.d.engine.texts[ours.request_id] == [7] * 20 and not pair.d.failures
    assert pair.d.agent.stats()["loads"] == before + 1


@pytest.mark.parametrize("side", ["p", "d"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_aborted(make_pair: Any, side: str, steps: int) -> None:
    pair = make_pair(policy="recompute")
    halves = dict(zip("pd", pair.add(text(300))))
    for _ in range(steps):
        pair.p.step()
        pair.d.step()
    getattr(pair, side).engine.abort(halves[side])
    _, after = pair.add(text(200))  # in the same blocks
    pair.run()
    assert pair.d.engine.texts[after.request_id] == [7] * 20
    assert side == "d" or pair.d.engine.texts[halves["d"].request_id] == [7] * 20


def test_prefill_goes_no_further_than_the_state(make_pair: Any) -> None:
    """A client may ask P for more tokens. The state of more tokens is another one."""
    pair = make_pair()
    theirs, ours = pair.add(text(100), p_tokens=8)
    pair.run()
    assert theirs.num_output_tokens == 1 and pair.d.engine.texts[ours.request_id] == [7] * 20


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("what", ["embeddings", "mixed embeddings"])
def test_prompt_that_cannot_be_compared_is_refused(make_pair: Any, what: str, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = make_pair(policy=policy)
    theirs, ours = pair.add(text(100), embeds=torch.zeros(100, 32), mixed=what.startswith("mixed"))
    pair.run()
    assert "is not carried for a model with states" in caplog.text and pair.d.failures == [ours.request_id]
    assert len(pair.d.engine.texts.get(ours.request_id, [])) == (20 if policy == "recompute" else 0)
    assert "the state is of 100 tokens of the prompt, decode needs that of 99 of 100" in caplog.text and theirs.num_prompt_tokens == 100


def test_prompt_logprobs(make_pair: Any, caplog: pytest.LogCaptureFixture) -> None:
    """D computes such a prompt itself, and P must not cut it: P's state is of all tokens, and nobody gets it."""
    pair = make_pair()
    theirs, ours = pair.add(text(100), skip_reading_prefix_cache=True)
    pair.run()
    assert pair.d.engine.texts[ours.request_id] == [7] * 20
    assert not any(work.block_ids for meta in pair.p.engine.metas for work in meta.offers)
    assert "the state is of 100 tokens of the prompt, decode needs that of 99 of 100" in caplog.text
    assert theirs.num_prompt_tokens == 100
