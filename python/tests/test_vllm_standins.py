"""What the tests play, held against what they play: vLLM's classes (by like.py), vLLM's connector interface, the agent."""

from __future__ import annotations

import importlib.metadata
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
from vllm.v1.request import RequestStatus
from vllm_sides import FakeAgent, Status

from kvconn import Agent
from kvconn.vllm import scheduler
from kvconn.vllm.connector import KVConnConnector
from kvconn.vllm.interface import LEFT, unknown


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


def test_stand_in_with_a_field_that_vllm_does_not_have_is_an_error() -> None:
    like(vllm.REQUEST, request_id="r", num_prompt_tokens=3)
    with pytest.raises(AssertionError, match="has no num_prompts"):
        like(vllm.REQUEST, request_id="r", num_prompts=3)
    paths = [value for name, value in vars(vllm).items() if name.isupper() and str(value).startswith("vllm")]
    assert len(paths) > 15 and all(vllm.fields_of(path) for path in paths)


def test_no_test_has_a_stand_in_of_another_make() -> None:
    here = Path(__file__).parent
    for file in [*here.glob("test_vllm_*.py"), *here.glob("vllm_*.py")]:
        assert file == Path(__file__) or not re.search(r"SimpleNamespace|Mock\b", file.read_text()), file


def test_ends_of_requests_are_vllms() -> None:
    """Of an end that a new release brings must be decided whether the prompt is there."""
    without = {"FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR"}
    theirs = {each.name for each in RequestStatus}
    assert {each.name for each in Status} <= theirs
    decided = {*scheduler._PROMPT_IS_THERE, *without}
    assert {each.name for each in RequestStatus if RequestStatus.is_finished(each)} <= decided
    assert decided - theirs <= {"FINISHED_REPETITION"}  # which older releases do not have


# Methods that no older vLLM calls, with the first release that does.
SINCE = {"get_loaded_kv_cache_group_ids": (0, 32)}


def test_connector_takes_what_vllm_gives() -> None:
    """Each method that vLLM's interface has, with its arguments; none is a name that vLLM would never call."""
    theirs = {**vars(base.SupportsHMA), **vars(base.KVConnectorBase_V1)}
    ours = {name: value for name, value in vars(KVConnConnector).items() if not name.startswith("_") and not isinstance(value, property)}
    installed = tuple(int(part) for part in importlib.metadata.version("vllm").split(".")[:2])
    ours = {name for name in ours if installed >= SINCE.get(name, (0, 0))}
    assert ours <= set(theirs), ours - set(theirs)
    for name in ours:
        given = parameters(getattr(base.SupportsHMA, name, None) or getattr(base.KVConnectorBase_V1, name))
        taken = parameters(getattr(KVConnConnector, name))
        assert taken == given or set(given) - set(taken) <= {"args", "kwargs"}, (name, given, taken)
    abstract = {name for name, value in theirs.items() if getattr(value, "__isabstractmethod__", False)}
    assert abstract <= ours | {"request_finished_all_groups"}


def test_what_of_the_interface_is_left_to_vllm() -> None:
    """Each name of the interface is ours, or is in the table with a reason. None is in both, and none is there for nothing."""
    assert unknown(base.KVConnectorBase_V1, KVConnConnector) == []
    newer = type("Newer", (), {**vars(base.KVConnectorBase_V1), "carry_by_pigeon": lambda self: None})
    assert unknown(newer, KVConnConnector) == ["carry_by_pigeon"]
    assert not set(LEFT) & set(vars(KVConnConnector))
    older = tuple(int(part) for part in importlib.metadata.version("vllm").split(".")[:2]) < (0, 32)
    assert older or set(LEFT) <= set(vars(base.KVConnectorBase_V1))


def test_fake_agent_is_like_the_agent() -> None:
    for name, function in vars(FakeAgent).items():
        if inspect.isfunction(function) and not name.startswith("_") and name != "ends":  # by which a test plays an end
            assert parameters(function) == parameters(getattr(Agent, name)), name
    assert isinstance(Agent.written, property) and hasattr(FakeAgent(), "written")
