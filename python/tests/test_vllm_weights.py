"""Weights that vLLM's worker replaces while it runs, by its own classes: what is counted, and what it means for a transfer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
import torch
from like import like
from test_vllm_served import made
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_sides import loading, offering, step, worker

from kvconn import TransferError, weights
from kvconn.vllm.metadata import KVConnMetadata, LoadWork, OfferWork, PartialWork
from kvconn.vllm.served import count_replacements


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test replaces, the next one has not."""
    monkeypatch.setattr(weights, "engine", weights.Weights())


@pytest.fixture
def config(model: Path) -> Any:
    """vLLM's own configuration, of an engine that counts."""
    config = made(model)
    count_replacements(config)
    return config


def of_vllm(config: Any, **has: Any) -> Any:
    """The worker that vLLM would make, with as much as a call of it needs."""
    kind = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    assert set(has) <= vllm.fields_of(f"{kind.__module__}:{kind.__name__}") | {"model_runner"}
    one = object.__new__(kind)
    vars(one).update(vllm_config=config, **has)
    return one


def runner(**has: Any) -> Any:
    return like(vllm.RUNNER, **has)


def replaced() -> int:
    """How often weights were replaced, all to the end."""
    weights.engine.of_prompt(7)
    return weights.engine.replaced


def test_weights_that_are_read_again(config: Any) -> None:
    calls: list[Any] = []
    one = of_vllm(config, model_runner=runner(reload_weights=lambda *args, **kwargs: calls.append((args, kwargs))))
    assert replaced() == 0
    one.reload_weights(weights_path="elsewhere")
    assert replaced() == 1 and calls == [((), {"weights_path": "elsewhere"})]
    with pytest.raises(AttributeError):  # of vLLM, which finds no runner here
        of_vllm(config).reload_weights()
    with pytest.raises(TransferError, match="their last replacement has failed"):
        replaced()
    one.reload_weights()
    assert replaced() == 3


def test_weights_that_a_worker_s_extension_loads(config: Any) -> None:
    """It has the model, and the runner."""
    kind, _ = get_model_architecture(config.model_config)
    llama = object.__new__(kind)
    torch.nn.Module.__init__(llama)
    llama.config = config.model_config.hf_config
    for times in (1, 2):
        assert llama.load_weights(iter(())) == set()
        assert replaced() == times
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    with pytest.raises(AttributeError):  # of vLLM, which finds nothing of what it needs here
        GPUModelRunner.reload_weights(object.__new__(GPUModelRunner), [], is_checkpoint_format=False)
    assert weights.engine.replaced == 3


def test_weights_that_a_trainer_sends(config: Any) -> None:
    """In parts, between a first and a last call: once. What fails fits no other engine."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    def sends(_: Any, info: Any) -> None:
        with pytest.raises(TransferError, match="are being replaced"):
            replaced()
        if info == "bad":
            raise RuntimeError("the trainer is gone")

    theirs = {name: lambda *_: None for name in WeightTransferEngine.__abstractmethods__}
    source = object.__new__(type("Source", (WeightTransferEngine,), {**theirs, "update_weights": sends}))
    source.reset_weight_update_target = lambda: None
    one = of_vllm(config, model_runner=runner(reset_lora_state=lambda: None), weight_transfer_engine=source)
    one._weight_update_active = one._weight_update_is_draft = False
    for session, (parts, well) in enumerate([("ab", True), (["a", "bad"], False), ("c", True)], 1):
        one.start_weight_update()
        for part in parts:
            if part == "bad":
                with pytest.raises(RuntimeError, match="the trainer is gone"):
                    one.update_weights(part)
            else:
                one.update_weights(part)
        if well:
            one.finish_weight_update()
            assert replaced() == session
        else:
            with pytest.raises(TransferError, match="their last replacement has failed"):
                replaced()


def test_weights_that_are_set_to_zero(config: Any) -> None:
    """Until others come."""
    one = of_vllm(config, model_runner=runner(get_model=torch.nn.Module, reload_weights=lambda: None))
    if hasattr(one, "reset_weights"):  # from 0.32 on
        one.reset_weights()
        with pytest.raises(TransferError):
            replaced()
    one.reload_weights()
    assert replaced() == 1


def test_calls_for_which_no_trainer_is_there(config: Any) -> None:
    """vLLM refuses them, and nothing changes."""
    one = of_vllm(config, weight_transfer_engine=None)
    for call in (one.start_weight_update, lambda: one.update_weights({}), one.finish_weight_update):
        with pytest.raises(RuntimeError, match="Weight transfer not configured"):
            call()
    assert replaced() == 0


def test_engine_counts_from_its_start(config: Any) -> None:
    of_vllm(config, model_runner=runner(reload_weights=lambda: None)).reload_weights()
    count_replacements(config)
    assert replaced() == 0
    of_vllm(config, model_runner=runner(reload_weights=lambda: None)).reload_weights()
    assert replaced() == 1


def test_engine_of_which_nobody_could_tell(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, says in (
        ("vllm.v1.worker.worker_base.WorkerBase", "the worker vllm.v1.worker.worker_base.WorkerBase has no method reload_weights"),
        ("vllm.nowhere.Worker", "the class of vLLM's worker, vllm.nowhere.Worker, is not found: No module named 'vllm.nowhere'"),
        ("auto", "the class of vLLM's worker, auto, is not found"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=says):
            patch.setattr(config.parallel_config, "worker_cls", place)
            count_replacements(config)
    kind, name = get_model_architecture(config.model_config)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"the model {name} has no method load_weights"):
        patch.delattr(kind, "load_weights")
        count_replacements(config)


def test_count_is_told_with_each_prompt() -> None:
    """Not with a load of nothing: by that the prefill engine frees its blocks, whatever they are."""
    weights.engine.replace("model", lambda: None)
    side, agent = worker()
    partials, offers = [PartialWork("a", [[1]], [0], [1], 7)], [OfferWork("r", "b", [[1]], [0], 8)]
    loads = [LoadWork("s", "c", "http://p:8998", "p", [[1]], [0], 16, 9), LoadWork("t", "d", "http://p:8998", "p", [], [])]
    step(side, KVConnMetadata(partials=partials, offers=offers, loads=loads))
    assert agent.prompts == [*map(weights.engine.of_prompt, (8, 7, 9)), 0]


def test_requests_of_an_engine_whose_replacement_has_failed() -> None:
    """They end at once on either side, and the other side hears of it."""
    weights.engine.begin("model")
    side, agent = worker()
    (loads,) = loading(side, "t")
    reports = side.collect(False)
    assert reports.received == reports.failed == {loads} and reports.failed_blocks == {0, 1, 2}
    assert agent.calls == [("load", "t")] and agent.prompts == [0]
    agent.ends("t", "load")
    (offers,) = offering(side, "u")
    reports = side.collect(False)
    assert (reports.sent, reports.received) == ({offers}, set())
    assert agent.calls[1:] == [("cancel", "u"), ("withdraw", "u")]
    agent.calls.clear()
    step(side, KVConnMetadata(partials=[PartialWork("v", [[1]], [0], [1], 7)]))
    assert not agent.calls
