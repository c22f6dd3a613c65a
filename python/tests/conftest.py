"""Shared by the tests: agents over numpy caches, in one process, engines of both kinds without their models."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Iterator

import pytest
from side import Side


@pytest.fixture
def prefill() -> Iterator[Side]:
    side = Side("prefill").register()
    yield side
    side.agent.close()


@pytest.fixture
def decode() -> Iterator[Side]:
    side = Side("decode", peer_timeout_s=15).register()
    yield side
    side.agent.close()


_numbers = itertools.count()


@pytest.fixture
def transfer_id() -> str:
    return f"xfer-{next(_numbers)}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a model as vLLM's configuration needs."""
    where = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    (where / "config.json").write_text(json.dumps(config))
    return where


@pytest.fixture
def make(model: Path) -> Iterator[Any]:
    """Makes vLLM's scheduler with the connector, and ends what the connector has begun."""
    from vllm_engine import Engine

    made: list[Engine] = []

    def make(role: str, **more: Any) -> Engine:
        made.append(Engine(model, role, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.ours.shutdown()


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Makes ranks of SGLang, and closes them."""
    from sglang_rank import Rank

    made: list[Rank] = []

    def make(role: str, **more: Any) -> Rank:
        made.append(Rank(role, **more))
        return made[-1]

    yield make
    for rank in reversed(made):
        rank.close()
