"""Install, and the two machines, of docs/quickstart-vllm.md, by the page's commands as they stand."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import wait_until
from machines import Pair, pair_of
from readme import install
from vllm_pair import environment

PROMPT = " ".join(map(str, range(300)))
ON_CPU = ["--enforce-eager", "--max-model-len", "4096", "--dtype", "float32", "--distributed-executor-backend", "uni"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    where = tmp_path_factory.mktemp("quickstart")
    env = {**environment(""), "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with pair_of("docs/quickstart-vllm.md", where, tiny_model.make(where / "model"), "forked_vllm", ON_CPU, env) as it:
        yield it


def test_pair_on_two_machines(pair: Pair) -> None:
    """A prompt goes over the network, and gets the text of the decode server alone."""
    body = {"model": "MODEL", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    alone = pair.ask(
        "http://decode-host:8200/v1/completions", {**body, "cache_salt": "alone"}
    )  # the first prompt is not a load: see Pair.warm
    assert "kvconn load {" not in pair.decode.log_since(0)
    answer = pair.ask("http://ROUTER:8000/v1/completions", body)
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    wait_until("the load's line", lambda: "kvconn load {" in pair.decode.log_since(0))
    (line,) = [line for line in pair.decode.log_since(0).splitlines() if "kvconn load {" in line]
    load = json.loads(line.partition("kvconn load ")[2])
    assert load["transport"] == "tcp" and load["bytes"] > 0, load


def test_install() -> None:
    said = install("docs/quickstart-vllm.md", ".venv-vllm")
    assert re.search(r"^(?:Successfully installed kvconn-|kvconn is already installed)", said, re.M), said
