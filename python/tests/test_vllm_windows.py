"""A sliding window's end is sent while the prompt is computed: vLLM's own scheduler says which blocks, agents carry the bytes.

Each step overwrites all blocks that are no request's: if a block that vLLM has given away were sent, the bytes would show it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import numpy as np
from vllm_engine import BLOCK, WINDOW, Engine, prefill_kv

import kvconn
from kvconn.vllm.worker import WorkerSide

BLOCKS, ITEM = 32, 256  # few blocks, so that those which are given back are soon another's; bytes of a token
KINDS = {"full and window": (0, WINDOW), "window": (WINDOW,), "chunks": (0, -3 * BLOCK)}


class Memory:
    """One agent with a layer for each group, whose blocks are tokens of ITEM bytes."""

    def __init__(self, role: str, groups: int) -> None:
        self.cache = np.full((groups, BLOCKS, BLOCK, ITEM), 0xEE, np.uint8)
        at = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"} if role == "prefill" else {}
        self.agent = kvconn.Agent({"engine_id": f"engine-{role}", "role": role, **at})
        regions = []
        for group, layer in enumerate(self.cache):
            regions += kvconn.regions_from_tensor(f"layer.{group}", layer.reshape(BLOCKS, -1), 0, group)
        self.agent.register_kv_caches(regions)

    def done(self) -> kvconn.Completion:
        for _ in range(30):
            if finished := self.agent.get_finished():
                return finished[0]
            self.agent.wait(1)
        raise AssertionError(f"nothing has ended: {self.agent.stats()}")


def values(prompt: list[int], group: int, begin: int, end: int) -> np.ndarray:
    """What tokens leave in a layer's cache."""
    place = np.arange(begin, end)[:, None]
    return ((np.array(prompt[begin:end])[:, None] * 7 + place * 13 + group * 101 + np.arange(ITEM)) % 239).astype(np.uint8)


class Prefill:
    """vLLM's scheduler, the connector's worker side with an agent, and a model that writes what it should."""

    def __init__(self, engine: Engine, groups: int) -> None:
        self.engine, self.memory = engine, Memory("prefill", groups)
        self.worker = WorkerSide(lambda: self.memory.agent, 0.001, by_layers=True)
        self.worker.follow_layers({f"layer.{n}": [n] for n in range(groups)})
        self.prompts: dict[str, list[int]] = {}
        self.output: Any = None
        self.keeps_cache = False  # what vLLM may find again is no request's either

    def add(self, prompt: list[int], **more: Any) -> Any:
        request = self.engine.add(list(prompt), **more)
        self.prompts[request.request_id] = prompt
        return request

    def begin(self) -> None:
        """A step up to where its tokens are computed."""
        self.output = self.engine.schedule()
        meta = self.engine.metas[-1]
        self.worker.withdraw(meta)
        scheduler = self.engine.scheduler
        held = set(range(BLOCKS if self.keeps_cache else 0))
        for req_id in scheduler.requests:
            for blocks in scheduler.kv_cache_manager.get_block_ids(req_id):
                held.update(blocks)
        self.memory.cache[:, [block for block in range(BLOCKS) if block not in held]] = 0xEE
        self.worker.begin(meta)
        for group in range(len(self.memory.cache)):
            for req_id, scheduled in self.output.num_scheduled_tokens.items():
                computed = scheduler.requests[req_id].num_computed_tokens
                blocks = scheduler.kv_cache_manager.get_block_ids(req_id)[group]
                text = self.prompts[req_id] + [1] * 64
                for place in range(computed - scheduled, computed):
                    self.memory.cache[group, blocks[place // BLOCK], place % BLOCK] = values(text, group, place, place + 1)[0]
            self.worker.layer_written(f"layer.{group}")
        self.worker.load(meta)
        self.worker.step_written()

    def end(self) -> None:
        reports = self.worker.collect(False)
        self.engine.update(self.output, sent=reports.sent)

    def run(self, request: Any) -> int:
        """Runs up to the last step of the request's prompt, which has not ended. Returns how many steps there were."""
        for steps in range(1, 100):
            self.begin()
            if request.num_computed_tokens >= request.num_prompt_tokens:
                return steps
            self.end()
        raise AssertionError("its prompt takes for ever")

    def nothing_is_left(self) -> None:
        for _ in range(200):
            if not self.engine.scheduler.has_requests():
                break
            self.begin()
            self.memory.agent.wait(0.01)
            self.end()
        self.engine.nothing_is_left()


@pytest.fixture(params=KINDS)
def windows(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return KINDS[request.param]


@pytest.fixture
def pair(model: Path, windows: tuple[int, ...]) -> Iterator[tuple[Prefill, Memory]]:
    p, d = Prefill(Engine(model, "kv_producer", blocks=BLOCKS, windows=windows), len(windows)), Memory("decode", len(windows))
    yield p, d
    p.memory.agent.close()
    d.agent.close()


class Load:
    """The part of a prompt that a decode engine asks for: of a window only its end."""

    def __init__(self, p: Prefill, d: Memory, kv: dict[str, Any], prompt: list[int], windows: tuple[int, ...]) -> None:
        self.d, self.prompt = d, prompt
        self.tokens = len(prompt) - 1
        groups = p.engine.ours._sched._groups
        assert [group.window - group.chunk for group in groups] == list(windows)
        self.first = [group.gone(self.tokens) for group in groups]
        counts = [-(-self.tokens // BLOCK) - first for first in self.first]
        free = iter(range(1, BLOCKS))
        # The groups' blocks lie in storages of their own here, so that ids may come twice.
        self.blocks = [[next(free) for _ in range(counts[0])], *(list(range(2, 2 + count)) for count in counts[1:])]
        d.cache[:] = 0
        d.agent.start_load(
            [
                kvconn.Load(
                    kv["transfer_id"],
                    p.memory.agent.bootstrap_address,
                    "engine-prefill",
                    self.blocks,
                    self.first,
                    tokens=[self.tokens] * len(windows),
                    prompt=kvconn.fingerprint(prompt),
                )
            ]
        )

    def came(self) -> None:
        done = self.d.done()
        assert done.ok, done
        for group, (first, blocks) in enumerate(zip(self.first, self.blocks)):
            have = self.d.cache[group, blocks].reshape(-1, ITEM)[: self.tokens - first * BLOCK]
            assert np.array_equal(have, values(self.prompt, group, first * BLOCK, self.tokens))
            others = [block for block in range(BLOCKS) if block not in blocks]
            assert not self.d.cache[group, others].any()


def text(tokens: int, seed: int = 0) -> list[int]:
    return [int(n) for n in np.random.default_rng([tokens, seed]).integers(0, 500, tokens)]


# One chunk within the window, one beyond it, and several; those of which vLLM would have the last token's window begin late.
@pytest.mark.parametrize("tokens", [2, WINDOW - 5, 60, 100, WINDOW - 1 + 5 * BLOCK, 200])
def test_window_is_there_before_the_prompt_is_offered(pair: tuple[Prefill, Memory], windows: tuple[int, ...], tokens: int) -> None:
    p, d = pair
    prompt, kv = text(tokens), prefill_kv()
    load = Load(p, d, kv, prompt, windows)
    # It takes the blocks that the window has left.
    beside = p.add(text(20, 1), kv=None, max_tokens=12)
    request = p.add(prompt, kv=kv, max_tokens=1)
    p.run(request)
    load.came()
    assert not p.engine.sending
    p.end()
    p.nothing_is_left()
    assert p.engine.finished(beside) and p.memory.agent.stats()["bytes_partial"] == p.memory.agent.stats()["bytes_out"]


def test_prefix_that_prefill_has_cached(pair: tuple[Prefill, Memory], windows: tuple[int, ...]) -> None:
    p, d = pair
    p.keeps_cache = True
    prompt = text(150)
    for more, steps in ((text(3, 2), 3), (text(60, 3), 2)):
        kv = prefill_kv()
        load = Load(p, d, kv, prompt + more, windows)
        request = p.add(prompt + more, kv=kv, max_tokens=1)
        assert p.run(request) == steps
        load.came()
        p.end()
        p.nothing_is_left()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_preempted_between_chunks(pair: tuple[Prefill, Memory], windows: tuple[int, ...], steps: int) -> None:
    """In the next step its blocks are another request's, and it comes back in other blocks."""
    p, d = pair
    prompt, kv = text(200), prefill_kv()
    load = Load(p, d, kv, prompt, windows)
    request = p.add(prompt, kv=kv, max_tokens=1)
    for _ in range(steps):
        p.begin()
        p.end()
    gave = bool(p.engine.given)
    p.engine.preempt()
    p.engine.scheduler.kv_cache_manager.reset_prefix_cache()
    p.run(request)
    load.came()
    p.end()
    p.nothing_is_left()
    assert p.engine.withdrawn == [kv["transfer_id"]] * gave


@pytest.mark.parametrize("steps", [1, 3])
def test_aborted_between_chunks(pair: tuple[Prefill, Memory], windows: tuple[int, ...], steps: int) -> None:
    p, d = pair
    prompt, kv = text(200), prefill_kv()
    Load(p, d, kv, prompt, windows)
    request = p.add(prompt, kv=kv, max_tokens=1)
    for _ in range(steps):
        p.begin()
        p.end()
    p.engine.abort(request)
    other = p.add(text(200, 1), kv=None, max_tokens=1)  # in its blocks
    p.begin()
    done = d.done()
    assert done.code == kvconn.Status.PEER_CANCELLED and "FINISHED_ABORTED" in done.reason
    assert not (d.cache == 0xEE).all(axis=-1).any()
    p.end()
    p.nothing_is_left()
    assert p.engine.finished(other)


@pytest.mark.parametrize("max_tokens", [2, 60])
def test_request_that_goes_on_after_its_prompt(pair: tuple[Prefill, Memory], windows: tuple[int, ...], max_tokens: int) -> None:
    """Later tokens may cost blocks of the window. So the window comes with the offer, or not at all if its blocks are gone by then."""
    p, d = pair
    prompt, kv = text(100), prefill_kv()
    load = Load(p, d, kv, prompt, windows)
    request = p.add(prompt, kv=kv, max_tokens=max_tokens)
    p.run(request)
    ready = p.engine.ready.get(kv["transfer_id"], [0])  # of a window alone nothing is said
    assert [count > 0 for count in ready] == [window == 0 for window in windows]
    p.end()
    while not p.engine.finished(request):
        p.begin()
        p.end()
    lost = bool(p.engine.ours._sched._next.cancels)
    assert lost == (max_tokens == 60)
    p.nothing_is_left()
    if not lost:
        load.came()
    else:
        done = d.done()
        assert done.code == kvconn.Status.PEER_CANCELLED and "the window has left the prompt's end" in done.reason
