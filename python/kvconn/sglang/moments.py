"""How far a GPU has come when its pages may be read or written: moments of SGLang's streams.

SGLang's scheduler queues work and goes on before the GPU has done it: forward passes on one stream, and on its current stream
what prepares them. The scheduler gives pages to a request while a pass that is under way still reads or writes them for
another request. With --pp-size above 1 it sends the pages of a pass that is under way.
"""

from __future__ import annotations

from typing import Any

from kvconn import Memory, Region

_MARK = "kvconn_computed"


class DeviceMoments:
    """The moments of one rank, whose cache is on one GPU."""

    def __init__(self, agent: Any, region: int, scheduler: Any) -> None:
        """region: the index of a region on that GPU."""
        self._agent = agent
        self._region = region
        self._scheduler = scheduler
        self._watched: dict[str, tuple[Any, Any]] = {}  # our methods, and what the scheduler had in their place
        self._computed = 0  # the moment of the pass whose result SGLang processes; 0: none, or its moment is not known
        if not hasattr(scheduler, "forward_stream"):
            raise ValueError("kvconn: SGLang's scheduler has no forward_stream: without it caches on a GPU are not carried")

    def now(self, event: Any = None) -> int:
        """Marks what SGLang has queued up to now, and what an event of SGLang's stands for."""
        forward, current = self._scheduler.forward_stream, self._current()
        if event is not None:
            forward.wait_event(event)
        if current.cuda_stream != forward.cuda_stream:
            # SGLang has each pass wait for its current stream, so the next pass does not begin later than it would.
            forward.wait_stream(current)
        return self._agent.moment(self._region, forward.cuda_stream)  # type: ignore[no-any-return]

    @staticmethod
    def _current() -> Any:
        import torch

        return torch.cuda.current_stream()

    def computed(self, event: Any = None) -> int:
        """The moment after which prefill's pages hold what SGLang now sends.

        SGLang processes a pass's result when the next pass is queued already. What it sends then is of the first pass, so
        it need not wait for the next.
        """
        return self._computed if self._computed and event is None else self.now(event)

    def watch(self) -> None:
        """Takes a moment after each of prefill's passes."""
        scheduler = self._scheduler
        try:
            run, process = scheduler.run_batch, scheduler.process_batch_result_disagg_prefill
        except AttributeError as error:
            raise ValueError(f"kvconn: SGLang's scheduler lacks what kvconn hooks: {error}: caches on a GPU are not carried") from error

        def run_batch(batch: Any, *args: Any, **more: Any) -> Any:
            result = run(batch, *args, **more)
            try:
                moment = self.now()
            except Exception:
                moment = 0  # what is sent takes a moment of its own, and its request fails if that fails too
            # With one stage SGLang processes this result with a copy of the batch; with several, another result with this batch.
            setattr(result, _MARK, moment)
            setattr(batch, _MARK, moment)
            return result

        def process_result(batch: Any, result: Any) -> None:
            self._computed = getattr(result, _MARK, 0) or getattr(batch, _MARK, 0)
            try:
                process(batch, result)
            finally:
                self._computed = 0

        scheduler.run_batch, scheduler.process_batch_result_disagg_prefill = run_batch, process_result
        self._watched = {"run_batch": (run_batch, run), "process_batch_result_disagg_prefill": (process_result, process)}

    def close(self) -> None:
        """Ends watch: the scheduler goes on to decode."""
        for name, (ours, before) in self._watched.items():
            if getattr(self._scheduler, name) is ours:  # else another plugin has put its own around it
                setattr(self._scheduler, name, before)
        self._watched = {}


class HostMoments:
    """In place of DeviceMoments, for caches that the processor writes: they are written when SGLang says so."""

    def now(self, event: Any = None) -> int:
        return 0

    computed = now

    def close(self) -> None:
        return


def moments_of(agent: Any, regions: list[Region], scheduler: Any, prefill: bool) -> DeviceMoments | HostMoments:
    """The moments for a rank's regions, which the agent has registered."""
    region = next((number for number, region in enumerate(regions) if region.memory == Memory.DEVICE), None)
    if region is None:
        return HostMoments()
    moments = DeviceMoments(agent, region, scheduler)
    if prefill:
        moments.watch()
    return moments
