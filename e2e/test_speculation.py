"""Pairs of real vLLM servers with a draft model, with n-grams on decode alone, and with adapters (LoRA): texts equal a single engine's.

The pair with n-grams is only run when it is named: KVCONN_E2E_SPECULATION="ngram,lora".
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask, metric
from pair_tests import alone, body, idle, new_loads, progress, reasons, words
from servers import leaving_nothing
from vllm_pair import Pair

LAYERS, RANK = 4, 8  # layers of the model, and of its draft; rank of the adapters
LAYER_BYTES = 128 * 4 * 32 * 2 * 4  # of a block: tokens, KV heads, head size, K and V, float32


def adapter(where: Path, seed: int) -> Path:
    """An adapter of the tiny model that changes what is computed for a prompt."""
    import torch
    from safetensors.torch import save_file

    where.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 4 * RANK, "target_modules": ["q_proj", "v_proj"]}
    (where / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "base_model_name_or_path": "tiny"}))
    torch.manual_seed(seed)
    sizes = {"q_proj": 256, "v_proj": 128}
    tensors = {}
    for layer in range(LAYERS):
        for part, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, 256) * 0.2
            tensors[f"{at}.lora_B.weight"] = torch.randn(size, RANK) * 0.2
    save_file(tensors, where / "adapter_model.safetensors")
    return where


# What a pair has: a draft model on both engines, n-grams on decode alone, adapters on both.
PAIRS = os.environ.get("KVCONN_E2E_SPECULATION", "draft,lora").split()


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    parts = request.param.split(",")
    where = tmp_path_factory.mktemp("-".join(parts))
    model, p, d = tiny_model.make(where / "model"), [], []
    if "draft" in parts:
        draft = tiny_model.make(where / "draft")  # the same weights: with a right cache nearly all of its drafts are accepted
        said = ["--speculative-config", json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})]
        p, d = [*p, *said], [*d, *said]
    if "ngram" in parts:
        d = [*d, "--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})]
    if "lora" in parts:
        one, two = adapter(where / "one", 1), adapter(where / "two", 2)
        lora = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2", "--lora-modules", f"one={one}"]
        p, d = [*p, *lora, f"mixed={one}"], [*d, *lora, f"mixed={two}"]
    the_pair = Pair(model, where / "logs", prefill_args=p, decode_args=d, forked=True, progress=progress)
    with leaving_nothing(the_pair):
        yield the_pair


@pytest.fixture(autouse=True)
def servers_live(pair: Pair) -> Iterator[None]:
    yield
    for server in pair.servers:
        server.check_alive()
    idle(pair)


def through(pair: Pair, request: dict[str, Any]) -> dict[str, Any]:
    """A request through the pair gives the single engine's text. Returns its load."""
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, (answer, pair.decode.log_tail())
    assert answer.text == alone(pair, request).text
    return new_loads(pair, position, 1)[0]


@pytest.mark.parametrize("tokens", [2, 128, 300, 900])
def test_text_equals_a_single_engines(pair: Pair, tokens: int) -> None:
    """The layers of a draft model are carried too."""
    load = through(pair, body(pair, words(tokens), max_tokens=32))
    layers = LAYERS * (2 if "draft_model" in " ".join(pair.prefill.argv) else 1)
    assert load["bytes"] == load["blocks"] * layers * LAYER_BYTES, load


def test_as_many_drafts_are_accepted(pair: Pair) -> None:
    """As by a single engine: a draft model with a wrong cache would draft other tokens, and the text would hide it."""

    def accepted() -> float:
        return metric(pair.decode.url, "vllm:spec_decode_num_accepted_tokens_total", absent=0)

    for text in ("again and " * 40, words(300)):
        request, before = body(pair, text + words(20), max_tokens=64), accepted()
        alone(pair, request)
        by_itself, before = accepted() - before, accepted()
        position = pair.decode.log_size()
        assert ask(pair.router.url, request).ok
        new_loads(pair, position, 1)
        assert accepted() - before == by_itself


def test_adapter(pair: Pair) -> None:
    request = body(pair, words(400))
    plain = alone(pair, request).text
    through(pair, {**request, "model": "one"})
    assert alone(pair, {**request, "model": "one"}).text != plain


def test_other_adapter_of_the_same_name(pair: Pair) -> None:
    """Nothing is loaded; the reason has both fingerprints of what was asked for."""
    position = pair.decode.log_size()
    answer = ask(pair.router.url, {**body(pair, words(300)), "model": "mixed"})
    assert not answer.ok
    said = reasons(pair, position, "was not loaded")
    assert re.search("decode asks for another prompt than prefill has .fingerprints [0-9a-f]{16} and [0-9a-f]{16}", said), said
