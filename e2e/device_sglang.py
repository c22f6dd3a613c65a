"""A plugin for SGLang: an engine on the CPU whose cache is device memory. See device_memory.py.

The backend's own code runs, and so does the agent's. Played are the addresses of the cache, the streams of the scheduler, and that
a forward pass's writes are done late. A decode engine's pages are still being written when they are given to a request. Faults:
the name of a place where the backend takes moments ("pass": behind a forward pass, "chunk": with what is sent between passes,
"load") has it take them on a stream that is never used, so that they mean nothing. With
"pass" or "chunk" the last writes of a pass end tens of milliseconds after the pass. With "long" the pages are written for longer
than a short prompt's prefill takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from device_engine import LATE_US, LATER_US, Gpu, faults

LONG = 40


class Engine:
    """SGLang's scheduler, as kvconn sees it: its streams are the double's."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.place = ""  # where the backend takes moments now
        self.wrong: frozenset[str] = frozenset()
        self.pages = 0  # tokens of one
        self._scheduler: Any = None

    def expose(self, region: Any) -> Any:
        from kvconn import Memory

        address = self.gpu.address(SimpleNamespace(data_ptr=lambda: region.address))  # type: ignore[arg-type]
        return region._replace(address=address, memory=Memory.DEVICE)

    @property
    def forward_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=self.gpu.idle if self.place in self.wrong else self.gpu.stream)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        self.place = place
        yield
        self.place = ""

    def take(self, scheduler: Any) -> None:
        """Puts a late forward pass in the place of the scheduler's own."""
        self._scheduler, self._run = scheduler, scheduler.run_batch
        scheduler.run_batch = self._pass

    @property
    def run_batch(self) -> Any:
        return self._scheduler.run_batch

    @run_batch.setter
    def run_batch(self, watched: Callable[..., Any]) -> None:
        @functools.wraps(watched)
        def run_batch(*args: Any, **more: Any) -> Any:
            with self.at("pass"):
                return watched(*args, **more)

        self._scheduler.run_batch = run_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    @property
    def process_batch_result_disagg_prefill(self) -> Any:
        return self._scheduler.process_batch_result_disagg_prefill

    @process_batch_result_disagg_prefill.setter
    def process_batch_result_disagg_prefill(self, watched: Any) -> None:
        self._scheduler.process_batch_result_disagg_prefill = watched

    def _buffers(self) -> list[Any]:
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        return [*pool.k_buffer, *pool.v_buffer]

    def _pass(self, batch: Any, *args: Any, **more: Any) -> Any:
        self.gpu.settle()
        self.wrong = faults()
        self.gpu.slow(LATER_US if {"pass", "chunk"} & self.wrong else LATE_US)
        places = None if batch.forward_mode.is_prebuilt() else batch.out_cache_loc
        result = self._run(batch, *args, **more)
        for first, count in _runs(sorted(places.tolist()) if places is not None else []):
            for buffer in self._buffers():
                self.gpu.later(buffer[first : first + count])
        return result

    def still_used(self, pages: Any) -> None:
        """The pages are given to a request while work for another one that writes the last of them is queued."""
        self.wrong = faults()
        self.gpu.slow(LATE_US)
        for page in list(pages)[-1:] * (LONG if "long" in self.wrong else 1):
            for buffer in self._buffers():
                self.gpu.scrub(buffer[int(page) * self.pages : (int(page) + 1) * self.pages])


def _runs(places: list[int]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for place in places:
        if out and sum(out[-1]) == place:
            out[-1] = out[-1][0], out[-1][1] + 1
        else:
            out.append((place, 1))
    return out


@functools.cache
def engine() -> Engine:
    """Of this process: SGLang starts some that have no cache."""
    return Engine()


def register() -> None:
    from kvconn.sglang import layout, moments

    of_layout, of_moments, computed = layout.Layout.__init__, moments.DeviceMoments.__init__, moments.DeviceMoments.computed

    def make_layout(self: Any, *args: Any) -> None:
        of_layout(self, *args)
        engine().pages = self.page_size
        self.regions = [region if region.group == self.aux_group else engine().expose(region) for region in self.regions]

    def make_moments(self: Any, agent: Any, region: int, scheduler: Any) -> None:
        from kvconn.sglang import conn

        engine().take(scheduler)
        of_moments(self, agent, region, engine())
        send_metadata = conn.KVConnReceiver.send_metadata

        def load(receiver: Any, pages: Any, *args: Any, **more: Any) -> None:
            engine().still_used(pages)
            with engine().at("load"):
                send_metadata(receiver, pages, *args, **more)

        conn.KVConnReceiver.send_metadata = load

    def of_what_is_sent(self: Any, event: Any = None) -> int:
        with engine().at("chunk"):
            return computed(self, event)

    layout.Layout.__init__ = make_layout  # type: ignore[method-assign]
    moments.DeviceMoments.__init__ = make_moments  # type: ignore[method-assign]
    moments.DeviceMoments.computed = of_what_is_sent  # type: ignore[method-assign]
    moments.DeviceMoments._current = staticmethod(lambda: engine().forward_stream)  # type: ignore[method-assign]
