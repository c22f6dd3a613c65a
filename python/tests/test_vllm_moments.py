"""Moments: what the worker says of blocks on a GPU is true when the engine's stream has come so far."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
from vllm_sides import FakeAgent, step, worker

from kvconn.vllm import moments
from kvconn.vllm.connector import KVConnConnector
from kvconn.vllm.metadata import KVConnMetadata, LoadWork, OfferWork, PartialWork
from kvconn.vllm.worker import WorkerSide

GPU = torch.device("cuda", 0)


class Stream:
    """The engine's stream."""

    def __init__(self, given: dict[int, int]) -> None:
        self._given = given
        given[7] = 100

    def queue(self) -> int:
        """What a moment has to cover from now on."""
        self._given[7] += 1
        return self._given[7]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    def current_stream(device: int) -> Any:
        assert device == GPU.index
        return lambda: 7

    monkeypatch.setattr(moments, "current_stream", current_stream)
    monkeypatch.setattr(FakeAgent, "streams", {})
    return Stream(FakeAgent.streams)


def gpu_worker(by_layers: bool = True) -> tuple[WorkerSide, FakeAgent]:
    side, agent = worker(by_layers)
    side.follow_layers({"layer.0": [0, 1], "layer.1": [2]}, GPU)
    return side, agent


def partial(*ids: str) -> KVConnMetadata:
    return KVConnMetadata(partials=[PartialWork(each, [[1, 2]], [1], [2]) for each in ids])


def test_what_earlier_steps_fill_is_read_after_them(stream: Stream) -> None:
    """An offer's request has ended, and the blocks before a chunk are told, when their steps are queued."""
    side, agent = gpu_worker()
    earlier = stream.queue()  # a step, and a drafter after its output
    meta = partial("c")
    meta.offers = [OfferWork("r", "a", [[1]], [0])]
    side.begin(meta)
    assert agent.after == {"a": earlier, "c": earlier}
    later = stream.queue()
    side.begin(KVConnMetadata(offers=[OfferWork("s", "b", [[1]], [0])]))
    assert agent.after["b"] == later


def test_each_layer_has_its_moment(stream: Stream) -> None:
    side, agent = gpu_worker()
    side.begin(partial("a", "b"))
    agent.calls.clear()
    first = stream.queue()
    side.layer_written("layer.0")
    second = stream.queue()
    side.layer_written("layer.1")
    side.step_written()
    assert agent.calls == [("written_on", ["a", "b"], [0, 1], first), ("written_on", ["a", "b"], [2], second)]


def test_many_layers_are_told_in_groups(stream: Stream) -> None:
    """In the order of the engine, which need not be that of the regions; a group that a step leaves open ends with it."""
    side, agent = worker(by_layers=True)
    side.follow_layers({f"layer.{n}": [n] for n in range(20)}, GPU)
    for called in (5, 20):
        agent.calls.clear()
        side.begin(partial("a"))
        queued = []
        for n in range(called):
            queued.append(stream.queue())
            for _ in range(1 + n % 2):  # a drafter runs a layer more than once
                side.layer_written(f"layer.{n ^ 1}")
        side.step_written()
        told = [("written_on", ["a"], [n - 1, n], queued[n]) for n in range(1, called, 2)]
        assert agent.calls[1:] == told + ([("step", ["a"])] if called < 20 else [])


def test_layers_on_two_streams_have_a_moment_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 0
    monkeypatch.setattr(moments, "current_stream", lambda device: lambda: current)
    side, agent = worker(by_layers=True)
    side.follow_layers({f"layer.{n}": [n] for n in range(48)}, GPU)  # three at once
    side.begin(partial("a"))
    for n, current in enumerate([7, 8, 7, 7]):  # noqa: B007
        side.layer_written(f"layer.{n}")
    assert agent.calls[1:] == [("written_on", ["a"], [0], 7), ("written_on", ["a"], [1], 8), ("written_on", ["a"], [2], 7)]


@pytest.mark.parametrize("by_layers", [False, True])
def test_layers_that_are_not_called_are_read_after_the_step(stream: Stream, by_layers: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A full CUDA graph calls none."""
    caplog.set_level("INFO", "kvconn.vllm")
    side, agent = gpu_worker(by_layers)
    for _ in range(2):
        side.begin(partial("a"))
        last = stream.queue()
        side.step_written()
        assert agent.calls[-1] == ("step", ["a"]) and agent.after["a"] == last
    assert caplog.text.count("2 of 2 layers, such as layer.0, were not called") == by_layers  # once


def test_blocks_are_written_after_what_is_queued_for_those_who_had_them(stream: Stream) -> None:
    side, agent = gpu_worker()
    meta = KVConnMetadata(loads=[LoadWork("r", "a", "http://p:8998", "p", [[1]], [0], 16)])
    stream.queue()
    side.begin(meta)
    queued = stream.queue()  # the step that vLLM may have begun before it starts loads
    side.load(meta)
    assert agent.after == {"a": queued}


def test_no_work_waits_for_what_has_no_moment(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """If the agent gives none, nothing is said of the blocks, and the requests end."""
    side, agent = gpu_worker()
    agent.no_moments = True
    meta = partial("a")
    meta.offers = [OfferWork("r", "b", [[1]], [0]), OfferWork("s", "c", [[2]], [0])]
    meta.loads = [LoadWork("t", "d", "http://p:8998", "p", [[7]], [0], 16)]
    step(side, meta, layers=["layer.0"])
    assert not agent.after and not [call for call in agent.calls if call[0] not in ("cancel", "withdraw")]
    reports = side.collect(False)
    assert (reports.sent, reports.received, reports.failed, reports.failed_blocks) == ({"r", "s"}, {"t"}, {"t"}, {7})
    assert "4096 moments have not passed" in caplog.text


def test_layer_without_a_moment_goes_with_the_step(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    side, agent = gpu_worker()
    side.begin(partial("a"))
    agent.no_moments = True
    side.layer_written("layer.0")
    side.layer_written("layer.1")
    agent.no_moments = False
    last = stream.queue()
    side.step_written()
    assert agent.calls[1:] == [("step", ["a"])] and agent.after["a"] == last
    assert caplog.text.count("is not sent when it is written") == 1


def test_host_memory_has_no_moments(stream: Stream) -> None:
    side, agent = worker(by_layers=True)
    side.follow_layers({"layer.0": [0], "layer.1": [2]}, torch.device("cpu"))
    agent.no_moments = True
    meta = partial("a")
    meta.offers, meta.loads = [OfferWork("r", "b", [[1]], [0])], [LoadWork("t", "d", "http://p:8998", "p", [[7]], [0], 16)]
    step(side, meta, layers=["layer.0", "layer.1"])
    assert agent.after == {"a": 0, "b": 0, "d": 0} and agent.calls[-2:] == [("written", ["a"], 0), ("written", ["a"], 2)]


def test_the_stream_is_torch_s_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to ask torch for it, as torch declares them."""
    asked: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: asked.append(index) or 77, raising=False)
    assert moments.current_stream(3)() == 77 and asked == [3]
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")

    class Current:
        cuda_stream = 78

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or Current())
    assert moments.current_stream(3)() == 78 and asked[-1] == 3


class Cache:
    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_caches_lie_where_vllm_was_told() -> None:
    def of(told: str, *devices: str) -> Any:
        return moments.device_of([(f"layer.{n}", Cache(device)) for n, device in enumerate(devices)], told)

    assert of("cpu", "cpu", "cpu") == torch.device("cpu") and of("cuda", "cuda:1", "cuda:1") == torch.device("cuda:1")
    for told, devices, said in (
        ("cpu", ["cuda:0"], "layer.0 lies on cuda:0, but kv_buffer_device is 'cpu'"),
        ("cuda", ["cpu"], "layer.0 lies on cpu, but kv_buffer_device is 'cuda'"),
        ("cuda", ["cuda:0", "cpu"], "layer.1 lies on cpu, but kv_buffer_device is 'cuda'"),
        ("cuda", ["cuda:0", "cuda:1"], "layer.0 lies on cuda:0, that of layer layer.1 on cuda:1"),
    ):
        with pytest.raises(ValueError, match=said):
            of(told, *devices)


def test_rocm_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(ValueError, match=r"ROCm 7\.1"):
        moments.device_of([("layer.0", Cache("cuda:0"))], "cuda")


def test_full_graphs_stay_unless_layers_are_asked_for() -> None:
    asks = KVConnConnector.requires_piecewise_for_cudagraph
    assert asks({"send_early": "layers"}) and not any(asks(extra) for extra in ({}, {"send_early": "chunks"}, {"send_early": "off"}))
