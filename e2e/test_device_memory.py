"""A pair of real vLLM servers whose caches are device memory of the CUDA driver double, at addresses that nobody else can touch.

Tests run on a pair by local, whose decode server's device opens the prefill server's allocations (IPC handles), and on one by tcp. Two
are of the prefill engine alone and take long: these run by tcp.

What a prefill engine writes is late, as on a GPU (device_engine.py), and a decode engine's blocks are still being written when
they are given to a load. So the moments of the connector are needed, and the tests show it of a layer's and of a step's end.
They cannot show what only a GPU has: kernels, graphs, and torch's own streams.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask, wait_until
from device_memory import NOT_BUILT, Faults, environment
from pair_tests import BLOCK, CHUNK, TOKEN_BYTES, alone, body, idle, new_loads, progress, serves, words
from servers import leaving_nothing
from test_pair import count, test_preempted_after_partial_offers
from test_pair import test_eight_prompts_with_partial_offers_at_once as eight_prompts
from test_pair_ends import test_client_disconnects, test_client_disconnects_during_prefill
from vllm_pair import Pair

HERE = Path(__file__).resolve().parent
# As they are, on this pair.
__all__ = [
    "test_client_disconnects",
    "test_client_disconnects_during_prefill",
    "test_preempted_after_partial_offers",
]

pytestmark = [pytest.mark.usefixtures("servers_live"), pytest.mark.skipif(bool(NOT_BUILT), reason=NOT_BUILT)]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults") / "faults.json")


@pytest.fixture(scope="module", params=["local", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[Any]:
    workdir = Path(os.environ.get("KVCONN_E2E_WORKDIR") or tmp_path_factory.mktemp("device"))
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    the_pair = Pair(
        tiny_model.make(workdir / "model-fat", fat=True),
        workdir / f"logs-device-{request.param}",
        prefill_config={"lease_s": 5, "transport": request.param},
        prefill_args=["--max-num-batched-tokens", str(CHUNK)],
        extra_env={**environment(faults), "PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1"},
        connector="device_vllm",
        transfer={"kv_buffer_device": "cuda"},
        progress=progress,
        forked=True,
    )
    with leaving_nothing(the_pair):
        yield the_pair


def test_caches_are_the_double_s(pair: Pair) -> None:
    for server in (pair.prefill, pair.decode):
        assert "regions of 8 layers on cuda:0" in server.log_since(0), server.log_tail()


@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK + 1, 2200])
def test_text_equals_single_engine(pair: Pair, tokens: int) -> None:
    """In one step, and in chunks of a prompt, layer by layer."""
    before = count(pair, "kvconn_partial_offers_total")
    request = body(pair, words(tokens))
    expected, position = alone(pair, request), pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok and answer.text == expected.text, (answer, expected)
    (load,) = new_loads(pair, position, 1)
    assert load["bytes"] == -(-tokens // BLOCK) * BLOCK * TOKEN_BYTES
    if tokens > CHUNK:  # decode has asked long before the last chunk
        assert count(pair, "kvconn_partial_offers_total") == before + 1


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_eight_prompts_at_once(pair: Pair) -> None:
    eight_prompts(pair)


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_text_when_layers_are_not_called(pair: Pair, faults: Faults) -> None:
    """What the steps of a prompt compute is sent at their ends. The log says once what that loses."""
    position = pair.prefill.log_size()
    with faults.of("uncalled"):
        for _ in range(2):
            serves(pair)
            request = body(pair, words(2200))
            assert ask(pair.router.url, request).text == alone(pair, request).text
    assert pair.prefill.log_since(position).count("8 of 8 layers, such as") == 1


# By the place of the moments: what the engine does wrong beside, so that the connector has no others for these blocks.
WRONG = {"layer": ["later"], "end": ["later", "uncalled"]}


@pytest.mark.parametrize("place", WRONG)
def test_each_moment_is_needed(pair: Pair, faults: Faults, place: str) -> None:
    """With moments of a stream that does nothing, texts are wrong: so the double is late, and the moments are what helps."""

    def text() -> tuple[str, str]:
        request = body(pair, words(2200 + BLOCK // 2))
        answer = ask(pair.router.url, request)
        assert answer.ok, answer
        return answer.text, alone(pair, request).text

    with faults.of(*WRONG[place]):
        assert len(set(text())) == 1
    with faults.of(place, *WRONG[place]):
        assert any(len(set(text())) == 2 for _ in range(10)), f"10 texts are right without the moments of {place!r}"
    idle(pair)
    serves(pair)


def test_no_load_went_another_way(pair: Pair) -> None:
    """By local both engines say that the decode engine's device copies, and no other way."""
    wait_until("the loads' lines", lambda: len(pair.loads()) > 10)
    assert {load["transport"] for load in pair.loads()} == {pair.transport}
    for server in (pair.prefill, pair.decode):
        said = re.findall(r"pair (?:goes over|goes on over|is back on) (\w+).*?(?: how=(.*))?$", server.log_since(0), re.MULTILINE)
        assert set(said) == {(pair.transport, {"local": "device", "tcp": ""}[pair.transport])}, said
