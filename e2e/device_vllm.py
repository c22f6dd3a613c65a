"""vLLM's connector on an engine whose cache is device memory: `Pair(connector="device_vllm")`. See device_memory.py.

The connector's own code runs, and so does the agent's. Played are the addresses that it is given, the stream that is current, and
that a prefill engine's writes are done late. Faults: the name of a place where the connector takes moments ("begin", "layer",
"end", "load") has it take them on a stream that is never used, so that they mean nothing. "uncalled" has layers not called,
as a full CUDA graph calls none; "later" has the last writes of a step end tens of milliseconds after the step; "unsaid" has the
connector not hear of a step's end, as vLLM does on some ranks with a drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_engine import LATE_US, LATER_US, Gpu, faults

from kvconn.vllm import moments
from kvconn.vllm.connector import KVConnConnector as Product


class KVConnConnector(Product):
    _gpu: Gpu  # of a worker
    _place = ""  # where the connector takes moments now
    _wrong: frozenset[str] = frozenset()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._late = self._vllm_config.kv_transfer_config.kv_role == "kv_producer"
        self._gpu, self._caches = Gpu(), kv_caches
        moments.current_stream = lambda device: self._stream
        super().register_kv_caches({name: self._gpu.tensor(cache) for name, cache in kv_caches.items()})

    def _stream(self) -> int:
        return self._gpu.idle if self._place in self._wrong else self._gpu.stream

    @contextmanager
    def _at(self, place: str) -> Iterator[None]:
        self._place = place
        yield
        self._place = ""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._gpu.enter()
        self._wrong = faults()
        self._gpu.slow(LATER_US if "later" in self._wrong else LATE_US)
        with self._at("begin"):
            super().bind_connector_metadata(connector_metadata)
        self._gpu.settle()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for work in self._meta.loads if self._meta is not None else ():
            for cache in self._caches.values() if work.block_ids else ():
                self._gpu.scrub(cache[work.block_ids[0][-1]])
        with self._at("load"):
            super().start_load_kv(forward_context, **kwargs)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if self._late:
            slots = attn_metadata.slot_mapping
            for block in torch.unique(slots[slots >= 0] // kv_layer.shape[2]).tolist():
                self._gpu.later(kv_layer[block])
        if "uncalled" not in self._wrong:
            with self._at("layer"):
                super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        if "unsaid" not in self._wrong:
            with self._at("end"):
                super().wait_for_save()
