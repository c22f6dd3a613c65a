"""What the tests play, held against what they play: vLLM's classes (by like.py), vLLM's connector interface, the agent."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
from like import like
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm_sides import FakeAgent

from kvconn import Agent
from kvconn.vllm.connector import KVConnConnector


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


def test_stand_in_with_a_field_that_vllm_does_not_have_is_an_error() -> None:
    like(vllm.REQUEST, request_id="r", num_prompt_tokens=3)
    with pytest.raises(AssertionError, match="has no num_prompts"):
        like(vllm.REQUEST, request_id="r", num_prompts=3)
    paths = [value for name, value in vars(vllm).items() if name.isupper() and isinstance(value, str)]
    assert len(paths) > 15 and all(vllm.fields_of(path) for path in paths)


def test_no_test_has_a_stand_in_of_another_make() -> None:
    here = Path(__file__).parent
    for file in [*here.glob("test_vllm_*.py"), *here.glob("vllm_*.py")]:
        assert file == Path(__file__) or not re.search(r"SimpleNamespace|Mock\b", file.read_text()), file


def test_connector_takes_what_vllm_gives() -> None:
    """Each method that vLLM's interface has, with its arguments; none is a name that vLLM would never call."""
    theirs = {**vars(base.SupportsHMA), **vars(base.KVConnectorBase_V1)}
    ours = {name: value for name, value in vars(KVConnConnector).items() if not name.startswith("_") and not isinstance(value, property)}
    assert set(ours) <= set(theirs), set(ours) - set(theirs)
    for name in ours:
        given = parameters(getattr(base.SupportsHMA, name, None) or getattr(base.KVConnectorBase_V1, name))
        taken = parameters(getattr(KVConnConnector, name))
        assert taken == given or set(given) - set(taken) <= {"args", "kwargs"}, (name, given, taken)
    abstract = {name for name, value in theirs.items() if getattr(value, "__isabstractmethod__", False)}
    assert abstract <= set(ours) | {"request_finished_all_groups"}


def test_fake_agent_is_like_the_agent() -> None:
    for name, function in vars(FakeAgent).items():
        if inspect.isfunction(function) and not name.startswith("_") and name != "ends":  # by which a test plays an end
            assert parameters(function) == parameters(getattr(Agent, name)), name
    assert isinstance(Agent.written, property) and hasattr(FakeAgent(), "written")
