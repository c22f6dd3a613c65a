"""What test_kinds.py and test_states.py ask of their pairs."""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

from asking import Answer, ask, wait_until
from vllm_pair import Pair

BLOCK = 128  # tokens, vLLM's on CPU
numbers = itertools.count(1)


def progress(name: str, seconds: float, text: str) -> None:
    print(f"  [{seconds:4.0f} s] {name}: {text}", file=sys.stderr, flush=True)


def words(tokens: int) -> str:
    """A prompt that no cache has seen."""
    text = f"{next(numbers)} of {time.monotonic_ns()}: the woods are lovely, dark and deep, but I have promises to keep. "
    return (text * (tokens // len(text) + 1))[:tokens]


def body(pair: Pair, prompt: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": pair.served, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def alone(pair: Pair, request: dict[str, Any]) -> Answer:
    answer = ask(pair.decode.url, {**request, "cache_salt": f"alone-{next(numbers)}"})
    assert answer.ok, (answer, pair.decode.log_tail())
    return answer


def asked(pair: Pair, tokens: int) -> tuple[dict[str, Any], str]:
    """A request with a prompt of so many tokens, and the text that a single engine gives."""
    if "mla" not in pair.model:
        request = body(pair, words(tokens))
        return request, alone(pair, request).text
    # vLLM's MLA computes a token of the prompt by another formula than one that it decodes, and rounds differently; the
    # decode engine computes the prompt's last token by the latter. So that token is one that the single engine decodes.
    begin = words(tokens - 1)
    text = alone(pair, body(pair, begin, max_tokens=17)).text
    return body(pair, begin + text[0]), text[1:]


def tries(pair: Pair) -> int:
    """How many prompts a text may take to equal a single engine's. vLLM's MLA on CPU caches other values for a prompt of
    n tokens than for its first n - 1 (in float32, by up to their own size). So one text in some twenty differs, each time in
    the same way. With a wrong cache every text differs."""
    return 3 if "mla" in pair.model else 1


def through(pair: Pair, request: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, (answer, pair.decode.log_tail())
    wait_until("the load's line in the decode server's log", lambda: bool(pair.loads(position)))
    (load,) = pair.loaded(position)
    return answer, load
