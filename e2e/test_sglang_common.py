"""Two real SGLang servers: requests that decode retracts and prefill computes again, engines that do not belong together, and a
server whose cache kvconn does not know.

Run with the Python of an environment that has SGLang, kvconn and pytest.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import wait_until
from servers import Server, ServerError, wait_ready
from sglang_servers import Alone, SGLangPair, plugin, post, prompt
from test_sglang import same

# Without this line of its table kvconn does not know the class in which SGLang keeps the cache of a Llama.
UNKNOWN = """
def register():
    from kvconn.sglang import kinds

    del kinds.POOLS["MHATokenToKVPool"]
"""


@pytest.fixture(scope="module")
def pair(sglang_model: Path, sglang_workdir: Path, alone: Alone) -> Iterator[SGLangPair]:
    the_pair = SGLangPair(sglang_model, sglang_workdir / "logs" / "common", "--page-size", "16")
    try:
        with the_pair:
            wait_ready(alone.servers)
            yield the_pair
    finally:
        left = the_pair.leftovers()
        assert not left, f"left behind: {left}"


def tell(server: Server, path: str, body: dict[str, object]) -> None:
    request = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200


def test_retracted_requests_go_on(pair: SGLangPair, alone: Alone) -> None:
    """Retracted twice: the tokens decoded before are then a part of the prompt, and the text is that of an undisturbed request."""
    prompts = [prompt(tokens, "retracted") for tokens in (20, 160, 333)]
    expected = [alone.ask(ids, 400) for ids in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        position = pair.decode.log_size()
        asked = [pool.submit(pair.ask, ids, 400) for ids in prompts]
        for _ in range(2):
            wait_until("the decode server decodes", lambda at=position: "#running-req: 3" in pair.decode.log_since(at), 120)
            tell(pair.decode, "/pause_generation", {"mode": "retract"})
            position = pair.decode.log_size()
            tell(pair.decode, "/continue_generation", {"torch_empty_cache": False})
        answers = [work.result() for work in asked]
    assert [answer.error for answer in answers] == [""] * len(prompts)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    same(pair, alone, prompt(100, "after all"))


def test_same_name_other_weights(pair: SGLangPair, alone: Alone, sglang_model: Path, sglang_workdir: Path) -> None:
    """Refused with both fingerprints; the servers live, and serve each other again with the right weights, under another name."""
    other = tiny_model.make(sglang_workdir / "other" / sglang_model.name, seed=8)
    copy = sglang_workdir / "copy of the model"
    if not copy.exists():
        copy.symlink_to(sglang_model)
    for weights in (other, copy):
        pair.decode.stop()
        pair.decode.argv[pair.decode.argv.index("--model-path") + 1] = str(weights)
        pair.decode.start()
        wait_ready([pair.decode])
        if weights is other:
            reply = post(pair.decode.url, pair.body(prompt(40, "other weights")), timeout_s=60)
            name = f'model "{sglang_model.name}" with fingerprint 1:'
            assert reply.error.replace("\\", "").count(name) == 2 and "their weights or configurations differ" in reply.error, reply
        else:
            same(pair, alone, prompt(40, "another name"))


def test_cache_that_is_not_known_stops_the_start(pair: SGLangPair, sglang_workdir: Path) -> None:
    pair.decode.stop()
    pair.decode.env.update(plugin(sglang_workdir / "unknown-plugin", UNKNOWN))
    position = pair.decode.log_size()
    pair.decode.start()
    with pytest.raises(ServerError):
        wait_ready([pair.decode])
    assert "keeps the cache in a MHATokenToKVPool, which this kvconn does not know: it carries MLATokenToKVPool" in pair.decode.log_since(
        position
    )
    pair.check([pair.prefill])
