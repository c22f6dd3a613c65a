"""The answers in proxy/testdata/vllm, out of which the router's tests read a prompt's tokens, held against vLLM's own classes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse, ChatCompletionStreamResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse

FILES = Path(__file__).parents[2] / "proxy/testdata/vllm"
# A text that looks like what the router reads.
TEXT = ' "usage": {"prompt_tokens": 3} ü\n'
COUNTS = {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2}
USAGE = {**COUNTS, "prompt_tokens_details": {"cached_tokens": 4}}
ASSISTANT = {"role": "assistant", "content": TEXT}


def whole(response: Any) -> str:
    """As vLLM's api_router answers it."""
    return bytes(JSONResponse(response.model_dump()).body).decode()


def events(usage: bool, cls: Any, id: str, **choice: Any) -> str:
    """As vLLM's serving streams it: the usage is an event of its own, if the client asks for it."""
    said = {"id": id, "created": 1, "model": "m"}
    steps = [cls(**said, choices=[{"index": 0, **choice}]), cls(**said, choices=[{"index": 0, **choice, "finish_reason": "length"}])]
    texts = [step.model_dump_json(exclude_unset=True) for step in steps]
    if usage:
        texts.append(cls(**said, choices=[], usage=USAGE).model_dump_json(exclude_unset=True, exclude_none=True))
    return "".join(f"data: {text}\n\n" for text in [*texts, "[DONE]"])


def answers() -> dict[str, str]:
    text = {"index": 0, "text": TEXT, "finish_reason": "length"}
    said = {"created": 1, "model": "m", "usage": USAGE}
    chat = {"index": 0, "message": ASSISTANT, "finish_reason": "length"}
    return {
        "completion.json": whole(CompletionResponse(id="cmpl-1", **said, choices=[text])),
        "batch.json": whole(CompletionResponse(id="cmpl-1", **said, choices=[text, {**text, "index": 1}])),
        "chat.json": whole(ChatCompletionResponse(id="chatcmpl-1", **said, choices=[chat], prompt_token_ids=[1, 2, 3])),
        "completion.sse": events(False, CompletionStreamResponse, "cmpl-1", text=TEXT),
        "completion-usage.sse": events(True, CompletionStreamResponse, "cmpl-1", text=TEXT),
        "chat-usage.sse": events(True, ChatCompletionStreamResponse, "chatcmpl-1", delta=ASSISTANT),
    }


def parsed(name: str, text: str) -> list[dict[str, Any]]:
    if name.endswith(".json"):
        return [json.loads(text)]
    parts = text.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts) and parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_files_are_what_vllm_answers() -> None:
    want = answers()
    assert sorted(path.name for path in FILES.iterdir()) == sorted(want)
    for name, text in want.items():
        ours, theirs = parsed(name, (FILES / name).read_text()), parsed(name, text)
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            # A release may have further members, which the router does not look at.
            known = one.keys() & other.keys()
            assert {"id", "choices"} <= known and ("usage" in one) == ("usage" in other)
            for member in known - {"choices", "usage"}:
                assert one[member] == other[member], (name, member)
            assert len(one["choices"]) == len(other["choices"])
            if one.get("usage"):
                for usage in one["usage"], other["usage"]:
                    assert {member: usage[member] for member in COUNTS} == COUNTS, name
                    assert usage["prompt_tokens_details"]["cached_tokens"] == 4, name
