"""A pair of real SGLang servers whose caches are device memory of the CUDA driver double, at addresses that nobody else can touch.

All tests run on a pair by local, whose decode server's device opens the prefill server's allocations (IPC handles), and on one by tcp.

What a forward pass writes is late, as on a GPU (device_engine.py), and a decode engine's pages are still being written when they
are given to a request. So each moment of the backend is needed, and the tests show it of each. They cannot show what only a GPU
has: kernels, graphs, torch's own streams. The servers run without SGLang's overlap schedule; test_sglang_device.py of python/tests has it.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from device_memory import NOT_BUILT, Faults, environment
from servers import leaving_nothing, wait_ready
from sglang_servers import Alone, SGLangPair, plugin, prompt
from test_sglang import same

HERE = Path(__file__).resolve().parent
CHUNK = 256

pytestmark = pytest.mark.skipif(bool(NOT_BUILT), reason=NOT_BUILT)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults") / "faults.json")


@pytest.fixture(scope="module", params=["local", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(sglang_model: Path, sglang_workdir: Path, alone: Alone, faults: Faults, transport: str) -> Iterator[SGLangPair]:
    env = plugin(sglang_workdir / f"device-plugin-{transport}", "from device_sglang import register\n")
    env["PYTHONPATH"] += os.pathsep + str(HERE)
    the_pair = SGLangPair(
        sglang_model,
        sglang_workdir / "logs" / f"device-{transport}",
        "--page-size",
        "16",
        prefill_args=["--chunked-prefill-size", str(CHUNK)],
        config={"device_ring_bytes": 8 << 20, "transport": transport},
        extra_env={**env, **environment(faults)},
    )
    with leaving_nothing(the_pair):
        wait_ready(alone.servers)
        yield the_pair


@pytest.fixture(autouse=True)
def servers_live(pair: SGLangPair, transport: str) -> Iterator[None]:
    yield
    pair.check()
    assert pair.ways() <= {transport}


def test_caches_are_the_double_s(pair: SGLangPair) -> None:
    for server in pair.servers:
        assert "regions in GPU 0's memory" in server.log_since(0), server.log_tail()


@pytest.mark.parametrize("tokens", [1, 17, CHUNK, 900, 1900])
def test_text_equals_single_server(pair: SGLangPair, alone: Alone, tokens: int) -> None:
    same(pair, alone, prompt(tokens, "device"))


@pytest.mark.parametrize(("wrong", "tokens"), [("pass", 3 * CHUNK + 100), ("chunk", 3 * CHUNK + 100), ("load", 40)])
def test_each_moment_is_needed(pair: SGLangPair, alone: Alone, faults: Faults, wrong: str, tokens: int) -> None:
    """With moments of a stream that does nothing, texts are wrong: so the double is late, and the moments are what helps."""
    with faults.of("long", wrong):
        for n in range(10):
            ids = prompt(tokens, f"without {wrong} {n}")
            if pair.ask(ids).ids != alone.ask(ids).ids:
                break
        else:
            raise AssertionError(f"10 texts are right without the moments of {wrong!r}")
    with faults.of("long"):
        same(pair, alone, prompt(tokens, f"with {wrong}"))


def test_many_at_once(pair: SGLangPair, alone: Alone) -> None:
    """More than there are pages for at a time: pages go from request to request."""
    prompts = [prompt(tokens, f"round {n}") for n, tokens in enumerate((300, 530, 1300, 40, 100, 3, 16, 280) * 2)]
    expected = [alone.ask(ids) for ids in prompts]
    answers = pair.ask_many(prompts)
    assert [answer.error for answer in answers] == [""] * len(prompts)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]


def test_prefix_that_prefill_has_cached(pair: SGLangPair, alone: Alone) -> None:
    ids = prompt(400, "device cached")
    same(pair, alone, ids)
    same(pair, alone, ids + prompt(70, "device more"))


def test_clients_that_go(pair: SGLangPair, alone: Alone) -> None:
    """Pages of aborted requests go to others, whose texts are right."""
    chosen = random.Random("device storm")
    bodies = [(pair.body(prompt(chosen.choice((5, 300, 900)), f"goes {n}"), 4), chosen.uniform(0, 0.6)) for n in range(40)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda work: pair.ask_both(work[0], hang_up_s=(work[1], work[1])), bodies))
    for tokens in (300, 1900, 530):
        same(pair, alone, prompt(tokens, "after the device storm"))


def test_how(pair: SGLangPair, transport: str) -> None:
    """By local both engines say that the decode engine's device copies the pages. What SGLang tells of a request, which lies in host
    memory, is read out of the process."""
    for server in pair.servers:
        said = re.findall(r"pair goes over (\w+).*?(?: how=(.*))?$", server.log_since(0), re.MULTILINE)
        assert said and all(way == transport and ("device" in how) == (way == "local") for way, how in said), said


def test_prefill_in_host_memory(pair: SGLangPair, alone: Alone) -> None:
    """The last test: the two engines' caches need not be in the same memory."""
    pair.prefill.stop()
    ours = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "LD_PRELOAD")}
    for name in ("PYTHONPATH", "LD_PRELOAD", "KVCONN_LIBCUDA"):
        pair.prefill.env.pop(name)
    pair.prefill.env.update(ours)
    position = pair.prefill.log_size()
    pair.prefill.start()
    wait_ready([pair.prefill])
    assert "regions in host memory" in pair.prefill.log_since(position)
    for tokens in (17, 900):
        same(pair, alone, prompt(tokens, "from host memory"))
