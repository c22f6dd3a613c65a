"""When the blocks that vLLM speaks of may be read and written.

vLLM speaks of blocks when it has queued the work that writes or reads them: "this layer is written", "this request has ended",
"load into these blocks". In host memory the work is done by then. A GPU does it later, in the order of the stream: the steps
before may still run, and under async scheduling they do. So with each call to the agent the worker takes a moment of the
stream, and the agent acts on the call when the GPU has come to that moment. 0 says that there is nothing to wait for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from .._moments import current_stream
from ..types import Memory, Region
from .step import Step

# How often a step says that layers are written. Each time costs some microseconds, and a sixteenth of a step is as good as a layer.
_MOST = 16


class HostMoments:
    """The moments of caches in host memory: there is never one to wait for."""

    def __init__(self, agent: Any) -> None:
        self.marks = agent.written  # a byte for each region, by which a layer says that it has written the region
        self.refusal = "" if len(self.marks) else "this system refuses membarrier(2)"  # why layers cannot say so

    def now(self) -> int:
        return 0


class DeviceMoments:
    """The moments of caches on one GPU. vLLM queues the GPU's work on the stream that is current when it calls the connector.

    If a layer has work on another stream, the current stream waits for that work before the layer's attention. If a step has
    such work, the current stream waits for it before the step ends. A model may run two layers beside each other: then vLLM
    calls the connector for each of them with another current stream.
    """

    marks = None
    refusal = ""

    def __init__(self, agent: Any, device: Any, layers: int, region: int) -> None:
        self._agent, self._stream, self._region = agent, current_stream(device.index), region
        self._every = -(-layers // _MOST)
        self._queued_on = 0  # the stream of the layers that the agent has not been told of yet

    def now(self) -> int:
        """A moment that passes when the GPU has done all that vLLM has queued up to now."""
        return self._moment(self._stream())

    def _moment(self, stream: int) -> int:
        moment: int = self._agent.moment(self._region, stream)
        return moment

    def written(self, regions: array[int], step: Step) -> None:
        """The step has queued a layer's work on these regions. The agent gets the news of several layers at once."""
        stream = self._stream()
        if self._every == 1:
            self._agent.written_on(tuple(regions), stream)
            return
        if step.queued and stream != self._queued_on:
            self._say(step)
        self._queued_on = stream
        step.queued.extend(regions)
        if len(step.unwritten) % self._every == 0:
            self._say(step)

    def _say(self, step: Step) -> None:
        told, step.queued = step.queued, array("I")
        self._agent.written_on(tuple(sorted(told)), self._queued_on)  # the agent keeps what it makes of a tuple


def moments_of(agent: Any, device: Any, layers: int, region: int = 0) -> HostMoments | DeviceMoments:
    """region: the index of one that lies on the device."""
    return HostMoments(agent) if device is None or device.type == "cpu" else DeviceMoments(agent, device, layers, region)


def first_on_gpu(regions: Iterable[Region]) -> int:
    """The index of the first region on the caches' GPU. With HiSparse, others lie in host memory."""
    return next((n for n, region in enumerate(regions) if region.memory == Memory.DEVICE), 0)


def device_of(layers: Iterable[tuple[str, Any]], kv_buffer_device: str) -> Any:
    """The device of the layers' caches; ValueError if it is another than vLLM was told, or not one device."""
    found: Any = None
    for name, cache in layers:
        device = getattr(cache, "device", None)
        if device is None:
            continue  # no tensor: make_regions refuses it
        if device.type != kv_buffer_device:
            raise ValueError(
                f"the cache of layer {name} lies on {device}, but kv_buffer_device is {kv_buffer_device!r}: "
                "caches are sent from where they lie. Leave kv_buffer_device out, or name the caches' device"
            )
        if found is not None and device != found[1]:
            raise ValueError(
                f"the cache of layer {found[0]} lies on {found[1]}, that of layer {name} on {device}: "
                "the caches of a worker must lie on one device"
            )
        found = name, device
    if found is None:
        return None
    if found[1].type == "cuda":
        import torch

        if torch.version.hip:
            raise ValueError(f"the cache of layer {found[0]} lies on a GPU of ROCm {torch.version.hip}: only CUDA's are supported yet")
    return found[1]
