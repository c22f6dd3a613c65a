"""SGLang's caches on a GPU, on the tests' CUDA driver: pages wait for the passes that write and read them; in the environment of
`make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import socket
from array import array
from collections.abc import Callable, Iterator
from ctypes import c_uint64, c_void_p
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import like as sglang
import torch
from like import like
from sglang.srt.disaggregation.decode import DecodeRequest
from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_engine import PAGE, engine, mha, start
from sglang_gpu import Event, Pass, Scheduler, Stream, on_gpu, request
from sglang_sides import until
from test_device import DOUBLE, Gpu

import kvconn
from kvconn.sglang.conn import KVConnReceiver, KVConnSender
from kvconn.sglang.moments import DeviceMoments, HostMoments

pytestmark = pytest.mark.skipif(not DOUBLE.is_file(), reason="NOT RUN: the driver double is not built, see `make gpu-double`")

FAILED, WAITING, SUCCESS = 0, 2, 4
SIZE = PAGE * 2 * 8 * 4  # bytes of a page: tokens, heads, numbers


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


class Pair:
    """A prefill and a decode rank of SGLang, whose caches are on a GPU."""

    def __init__(self, gpu: Gpu, port: int, ranks: list[Any], current: list[Stream], sleeps: bool) -> None:
        self.gpu, self.address, self._current = gpu, f"127.0.0.1:{port}", current
        self.forward_p, self.forward_d, self.scheduling_p, self.scheduling_d = (Stream(gpu) for _ in range(4))
        current[:] = [self.scheduling_p]
        self.scheduler = Scheduler(self.forward_p)
        more = {"disaggregation_bootstrap_port": port, "scheduler": self.scheduler}
        self.p = start("prefill", lambda: on_gpu(gpu, mha(0, 2), sleeps), **more)
        ranks.append(self.p)
        self.d = start(
            "decode", lambda: on_gpu(gpu, mha(0, 2), sleeps), scheduler=like(sglang.SGLANG_SCHEDULER, forward_stream=self.forward_d)
        )
        ranks.append(self.d)
        self.scheduler.ready(self.p, PAGE, list(range(4 * PAGE, 12 * PAGE)))  # pages 4 to 11

    def pages(self, rank: Any, first: int, count: int) -> list[int]:
        return [buffer.address + page * SIZE for buffer in rank.pool.k_buffer + rank.pool.v_buffer for page in range(first, first + count)]

    def sleep_and_wake(self, rank: Any) -> None:
        """SGLang has no request: its memory saver gives the memory back, and takes other memory at the same addresses."""
        for buffer in rank.pool.k_buffer + rank.pool.v_buffer:
            buffer.sleeper.sleep()
            buffer.sleeper.wake()

    def begin(self, room: int) -> tuple[Any, Any]:
        """A request up to where decode has pages for it."""
        sender, receiver = KVConnSender(self.p.manager, self.address, room), KVConnReceiver(self.d.manager, self.address, room)
        receiver.init(0)
        assert until(receiver, FAILED, WAITING) == WAITING, receiver.room.reason
        return sender, receiver

    def take(self, receiver: Any, first: int, count: int) -> None:
        """SGLang's decode gives the request pages from first on."""
        queue = self.d.queue
        queue.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(2)
        queue.transfer_queue, queue._num_published_destinations = like(sglang.SGLANG_TRANSFERS, enable_staging=False), 0
        asked = DecodeRequest(Req("r", "", array("q", [1, 2]), SamplingParams()), receiver)
        self._current[:] = [self.scheduling_d]
        queue._send_kv_metadata(asked, torch.arange(first * PAGE, (first + count) * PAGE), PAGE, decode_prefix_len=0)
        self._current[:] = [self.scheduling_p]

    def run(self, kernels: Callable[[], None], processed: Callable[[], None]) -> tuple[Any, Any]:
        """A pass that prefill queues: the batch and the result."""
        batch = Pass(kernels, processed)
        return batch, self.scheduler.run_batch(batch)

    def arrived(self, sender: Any, receiver: Any, patterns: dict[int, int]) -> None:
        """Both ends end well. patterns: what each page of decode has."""
        for half in (receiver, sender):
            assert until(half, SUCCESS, FAILED) == SUCCESS, half.room.reason
            half.clear()
        for stream in (self.forward_p, self.forward_d, self.scheduling_d):
            stream.synchronize()
        for page, pattern in patterns.items():
            wrong = [self.gpu.lib.kvgpu_wrong(*(c_uint64(n) for n in (at, SIZE, pattern, 0))) for at in self.pages(self.d, page, 1)]
            assert wrong == [0] * len(wrong), page


@pytest.fixture
def pair(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The test's parameter says whether the engines can sleep."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    current: list[Stream] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(gpu))
    monkeypatch.setenv(
        "KVCONN_SGLANG_CONFIG", '{"tcp_listen_host": "127.0.0.1", "device_ring_bytes": 4194304, "device_slot_bytes": 131072}'
    )
    with engine(port) as ranks:
        yield Pair(gpu, port, ranks, current, getattr(request, "param", False))


def test_regions_are_where_the_pool_is(pair: Pair) -> None:
    for rank in (pair.p, pair.d):
        kinds = {region.group: region.memory for region in rank.layout.regions}
        assert kinds == {0: kvconn.Memory.DEVICE, 1: kvconn.Memory.HOST}, "the auxiliary rows are in host memory"
        assert isinstance(rank.manager.moments, DeviceMoments)


def test_scheduler_that_goes_on_to_decode_has_its_methods_back(pair: Pair) -> None:
    scheduler = pair.scheduler
    watched = scheduler.run_batch, scheduler.process_batch_result_disagg_prefill
    pair.p.manager.teardown()
    own = scheduler.run_batch, scheduler.process_batch_result_disagg_prefill
    assert own == (Scheduler.run_batch.__get__(scheduler), scheduler._process)
    assert all(now != then for now, then in zip(own, watched))


@pytest.mark.parametrize("another_result", [False, True])
def test_pages_are_sent_after_their_pass_and_not_after_the_next(pair: Pair, another_result: bool) -> None:
    """SGLang processes a result when the next pass is queued already. With several stages, the result comes from another one."""
    sender, receiver = pair.begin(1)
    pair.take(receiver, 5, 2)
    assert until(sender, FAILED, WAITING) == WAITING
    sender.init(2, 0)
    asked = request(sender, 2 * PAGE)
    pair.forward_p.slow()
    batch, result = pair.run(
        lambda: pair.forward_p.write(pair.pages(pair.p, 4, 2), SIZE, 77), lambda: pair.scheduler.send_kv_chunk(asked, last_chunk=True)
    )
    behind = Stream(pair.gpu)
    pair.gpu.call("kvgpu_hold", c_void_p(behind.cuda_stream))
    behind.write(pair.pages(pair.p, 14, 1), SIZE, 1)
    pair.run(lambda: pair.forward_p.wait_stream(behind), lambda: None)
    try:
        pair.scheduler.process_batch_result_disagg_prefill(batch, GenerationBatchResult() if another_result else result)
        assert until(receiver, SUCCESS, FAILED) == SUCCESS, receiver.room.reason
    finally:
        pair.gpu.call("kvgpu_release", c_void_p(behind.cuda_stream))
    pair.arrived(sender, receiver, {5: 77, 6: 77})


def test_chunks(pair: Pair) -> None:
    """Each chunk waits for its own pass. Between passes, as with several stages, it waits for all that is queued."""
    sender, receiver = pair.begin(2)
    pair.take(receiver, 5, 3)
    assert until(sender, FAILED, WAITING) == WAITING
    sender.init(3, 0)
    asked = request(sender, 3 * PAGE)
    pair.forward_p.slow()
    chunk = pair.scheduler.send_kv_chunk
    first = pair.run(lambda: pair.forward_p.write(pair.pages(pair.p, 4, 1), SIZE, 11), lambda: chunk(asked, last_chunk=False, end_idx=PAGE))
    pair.scheduler.process_batch_result_disagg_prefill(*first)
    second = pair.run(lambda: pair.forward_p.write(pair.pages(pair.p, 5, 1), SIZE, 12), lambda: None)
    chunk(asked, last_chunk=False, end_idx=2 * PAGE)
    third = pair.run(lambda: pair.forward_p.write(pair.pages(pair.p, 6, 1), SIZE, 13), lambda: chunk(asked, last_chunk=True))
    for each in (second, third):
        pair.scheduler.process_batch_result_disagg_prefill(*each)
    pair.arrived(sender, receiver, {5: 11, 6: 12, 7: 13})


def test_prefix_that_is_sent_early(pair: Pair) -> None:
    """SGLang sends a prefix of its cache before the pass of the rest; the pass before may still write the prefix."""
    sender, receiver = pair.begin(3)
    pair.take(receiver, 5, 2)
    assert until(sender, FAILED, WAITING) == WAITING
    sender.init(2, 0)
    asked = request(sender, 2 * PAGE, prefix_len=PAGE, host_hit_length=0, early_send_prefix_end=None)
    pair.forward_p.slow()
    pair.forward_p.write(pair.pages(pair.p, 4, 1), SIZE, 21)
    pair.scheduler.maybe_send_cached_prefix_chunk(asked)
    assert asked.start_send_idx == PAGE and sender._early_send_wait_event is None
    rest = pair.run(
        lambda: pair.forward_p.write(pair.pages(pair.p, 5, 1), SIZE, 22), lambda: pair.scheduler.send_kv_chunk(asked, last_chunk=True)
    )
    pair.scheduler.process_batch_result_disagg_prefill(*rest)
    pair.arrived(sender, receiver, {5: 21, 6: 22})


def test_event_on_a_stream_of_its_own(pair: Pair) -> None:
    """SGLang's event is waited for, whatever it stands for."""
    sender, receiver = pair.begin(4)
    pair.take(receiver, 5, 1)
    assert until(sender, FAILED, WAITING) == WAITING
    sender.init(1, 0)
    other = Stream(pair.gpu)
    other.slow()
    other.write(pair.pages(pair.p, 4, 1), SIZE, 31)
    sender._early_send_wait_event = event = Event(pair.gpu)
    event.record(other)
    sender.send([4])
    pair.arrived(sender, receiver, {5: 31})


@pytest.mark.parametrize("stream", ["forward_d", "scheduling_d"])
def test_pages_are_written_after_what_still_uses_them(pair: Pair, stream: str) -> None:
    """Decode gives a request the pages of one that has ended, and a pass that is under way still writes them."""
    sender, receiver = pair.begin(5)
    used: Stream = getattr(pair, stream)
    used.slow()
    used.write(pair.pages(pair.d, 5, 1), SIZE, 1)
    used.write(pair.pages(pair.d, 5, 1), SIZE, 2)
    pair.take(receiver, 5, 1)
    done = pair.run(lambda: pair.forward_p.write(pair.pages(pair.p, 4, 1), SIZE, 41), lambda: None)
    assert until(sender, FAILED, WAITING) == WAITING
    sender.init(1, 0)
    asked = request(sender, PAGE)
    done[0].processed = lambda: pair.scheduler.send_kv_chunk(asked, last_chunk=True)
    pair.scheduler.process_batch_result_disagg_prefill(*done)
    pair.arrived(sender, receiver, {5: 41})


def test_moment_that_cannot_be_taken_fails_its_request(pair: Pair) -> None:
    sender, receiver = pair.begin(6)
    pair.take(receiver, 5, 1)
    assert until(sender, FAILED, WAITING) == WAITING
    sender.init(1, 0)
    real, pair.p.manager._agent.moment = pair.p.manager._agent.moment, _no_moment
    asked = request(sender, PAGE)
    one = pair.run(lambda: None, lambda: pair.scheduler.send_kv_chunk(asked, last_chunk=True))
    pair.scheduler.process_batch_result_disagg_prefill(*one)
    for half in (sender, receiver):
        assert until(half, SUCCESS, FAILED) == FAILED
        assert "the stream is gone" in half.room.reason
        half.clear()
    pair.p.manager._agent.moment = real


def _no_moment(*_: Any) -> int:
    raise kvconn.KvconnError("the stream is gone")


@pytest.mark.parametrize("pair", [True], indirect=True)
def test_engines_that_slept_go_on(pair: Pair) -> None:
    """Nobody tells their managers of it. Each request after a sleep has the bytes of the new memory."""
    for room, pattern in enumerate((71, 72, 73), start=11):
        sender, receiver = pair.begin(room)
        pair.take(receiver, 5, 1)
        assert until(sender, FAILED, WAITING) == WAITING
        sender.init(1, 0)
        asked = request(sender, PAGE)
        one = pair.run(
            lambda number=pattern: pair.forward_p.write(pair.pages(pair.p, 4, 1), SIZE, number),
            lambda whose=asked: pair.scheduler.send_kv_chunk(whose, last_chunk=True),
        )
        pair.scheduler.process_batch_result_disagg_prefill(*one)
        pair.arrived(sender, receiver, {5: pattern})
        pair.sleep_and_wake(pair.p)
        pair.sleep_and_wake(pair.d)


def test_indices_on_a_gpu(pair: Pair) -> None:
    """SGLang leaves some indices where its tables are."""

    class OnGpu:
        def cpu(self) -> torch.Tensor:
            return torch.tensor([3, 5])

        def __array__(self) -> Any:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    assert list(pair.p.layout.blocks(OnGpu(), None, 0)[0]) == [3, 5]


def test_scheduler_without_streams(gpu: Gpu) -> None:
    with pytest.raises(ValueError, match="has no forward_stream"):
        start("decode", lambda: on_gpu(gpu, mha(0, 2)))


def test_host_memory_has_no_moments(gpu: Gpu) -> None:
    """And the scheduler's methods are its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    scheduler = Scheduler(Stream(gpu))
    with engine(port) as ranks:
        ranks.append(start("prefill", lambda: mha(0, 2), scheduler=scheduler, disaggregation_bootstrap_port=port))
        assert isinstance(ranks[0].manager.moments, HostMoments)
        assert "run_batch" not in vars(scheduler) and scheduler.process_batch_result_disagg_prefill == scheduler._process
