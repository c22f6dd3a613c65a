"""Shared by the tests: agents over numpy caches, in one process, engines of both kinds without their models."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest

import kvconn

LAYERS, BLOCKS, BLOCK = 3, 16, 4096


class Side:
    """One agent with its cache: LAYERS arrays of BLOCKS blocks of BLOCK bytes."""

    def __init__(self, role: str, **config: object) -> None:
        self.cache = np.zeros((LAYERS, BLOCKS, BLOCK), np.uint8)
        base: dict[str, object] = {"engine_id": f"engine-{role}", "role": role, "log_level": "debug"}
        if role != "decode":
            base |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
        self.agent = kvconn.Agent({**base, **config})
        self.collected: dict[str, kvconn.Completion] = {}

    def register(self) -> Side:
        regions = []
        for i, layer in enumerate(self.cache):
            regions += kvconn.regions_from_tensor(f"layer.{i}", layer, block_dim=0)
        self.agent.register_kv_caches(regions)
        return self

    def finished(self, transfer_id: str) -> kvconn.Completion:
        """Waits for one transfer's completion."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for done in self.agent.get_finished():
                assert done.transfer_id not in self.collected, f"{done} came twice"
                self.collected[done.transfer_id] = done
            if transfer_id in self.collected:
                return self.collected[transfer_id]
            self.agent.wait(1)
        raise AssertionError(f"no completion of {transfer_id} within 30 s: {self.agent.stats()}")

    def until(self, what: str, value: int) -> None:
        """Waits until a gauge of the statistics has a value."""
        deadline = time.monotonic() + 30
        while self.agent.stats()[what] != value:
            assert time.monotonic() < deadline, (what, value, self.agent.stats())
            self.agent.wait(0.005)


@pytest.fixture
def prefill() -> Iterator[Side]:
    side = Side("prefill").register()
    yield side
    side.agent.close()


@pytest.fixture
def decode() -> Iterator[Side]:
    side = Side("decode", peer_timeout_s=1.5).register()
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
def make(model: Path) -> Any:
    """Makes vLLM's scheduler with the connector."""
    from vllm_engine import Engine

    return lambda role, **more: Engine(model, role, **more)


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
