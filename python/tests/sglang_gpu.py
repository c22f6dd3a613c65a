"""SGLang's pools and streams on the tests' CUDA driver: its own objects, where torch for CUDA would have its own."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import like as sglang
import torch
from like import like
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.managers.utils import GenerationBatchResult
from sleeper import Sleeper
from test_device import Gpu


class Buffer:
    """A tensor of a pool, in device memory: what SGLang and the backend look at."""

    def __init__(self, gpu: Gpu, host: torch.Tensor, sleeps: bool) -> None:
        self.device, self.nbytes, self._host = torch.device("cuda", 0), host.nbytes, host
        self.sleeper = Sleeper(gpu, host.nbytes) if sleeps else None
        address = c.c_uint64(self.sleeper.address if self.sleeper else 0)
        if not self.sleeper:
            gpu.call("cuMemAlloc_v2", c.byref(address), c.c_size_t(host.nbytes))
        self.address = address.value

    def data_ptr(self) -> int:
        return self.address


def on_gpu(gpu: Gpu, pool: Any, sleeps: bool = False) -> Any:
    """SGLang's pool, with its buffers in device memory. If it sleeps, the buffers lie where SGLang's memory saver would have them."""
    for buffers in (pool.k_buffer, pool.v_buffer):
        buffers[:] = [Buffer(gpu, host, sleeps) for host in buffers]
    return pool


class Event:
    """torch.cuda.Event"""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.handle = gpu, c.c_void_p()
        gpu.call("cuEventCreate", c.byref(self.handle), 2)

    def record(self, stream: Stream) -> None:
        self.gpu.call("cuEventRecord", self.handle, c.c_void_p(stream.cuda_stream))


class Stream:
    """torch.cuda.Stream"""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.cuda_stream = gpu, gpu.stream()

    def wait_event(self, event: Event) -> None:
        self.gpu.call("cuStreamWaitEvent", c.c_void_p(self.cuda_stream), event.handle, 0)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.call("cuStreamSynchronize", c.c_void_p(self.cuda_stream))

    def slow(self) -> None:
        """Each operation waits for up to 50 milliseconds: some of them take longer than a whole transfer."""
        self.gpu.call("kvgpu_slow", c.c_void_p(self.cuda_stream), 50_000)

    def write(self, addresses: list[int], size: int, pattern: int) -> None:
        """A kernel for each address."""
        for at in addresses:
            self.gpu.call("kvgpu_kernel_fill", c.c_void_p(self.cuda_stream), *(c.c_uint64(n) for n in (at, size, pattern, 0)))


@dataclass
class Pass:
    """In place of a batch: the kernels that its forward pass queues, and what is done with its result."""

    kernels: Callable[[], None]
    processed: Callable[[], None]


class Scheduler(SchedulerDisaggregationPrefillMixin):
    """SGLang's scheduler on a prefill engine: the methods that send are its own."""

    def __init__(self, forward: Stream) -> None:
        self.forward_stream = forward
        self.enable_overlap, self.enable_staging, self.kv_checksum_computer = True, False, None
        self.disagg_prefill_pending_chunk_rids: set[str] = set()
        self.process_batch_result_disagg_prefill = self._process  # type: ignore[method-assign]

    def ready(self, rank: Any, page: int, row: list[int]) -> None:
        """What a manager's making does not need. row: the places of the request's tokens."""
        self.token_to_kv_pool_allocator = like(
            sglang.SGLANG_ALLOCATOR,
            page_size=page,
            get_kvcache=lambda: rank.pool,
            translate_kv_indices_for_transfer=lambda indices: indices,
        )
        self.req_to_token_pool = like(sglang.SGLANG_REQUESTS, req_to_token=torch.tensor([row], dtype=torch.int32))
        self.disagg_prefill_bootstrap_queue = rank.queue
        rank.queue.kv_manager = rank.manager
        self.disagg_metadata_buffers = rank.metadata
        rank.metadata.set_buf = lambda _request: None
        ours = {"kvconn_common"}  # which kvconn.sglang.start sets
        like(sglang.SGLANG_SCHEDULER, **{name: value for name, value in vars(self).items() if name not in ours})

    def run_batch(self, batch: Pass) -> Any:
        """A forward pass: its kernels are queued, and not done."""
        batch.kernels()
        return GenerationBatchResult()

    def _process(self, batch: Pass, result: Any) -> None:
        batch.processed()


def request(sender: Any, tokens: int, **more: Any) -> Any:
    """As much of SGLang's request as its methods that send look at."""
    about = {"origin_input_ids": range(tokens), "extend_end": tokens, "start_send_idx": 0, "disagg_kv_sender": sender, "rid": "r"}
    about |= {"kv": ReqKvInfo(req_pool_idx=0), "metadata_buffer_index": 0, "pending_bootstrap": False, "disagg_decode_prefix_len": 0}
    return like(sglang.SGLANG_REQUEST, **{**about, **more})
