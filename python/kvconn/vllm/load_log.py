"""Writes a line to the log for each load, in a thread beside the engine's step."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from typing import Any

from .metadata import LoadWork
from .shards import WHOLE, Shard

logger = logging.getLogger("kvconn.vllm")


class LoadLog:
    """Writes the lines in a thread of its own: in the step, a line would cost more than all of the connector's other work."""

    _LIMIT = 4096  # lines that may wait; further loads are in the statistics only
    _POLL_S = 0.1  # between two polls of the queue: waking the thread is what costs the step most

    def __init__(self, rank: str, shard: Shard = WHOLE) -> None:
        self._rank, self._shard = rank, shard
        self._queue: queue.SimpleQueue[tuple[Any, LoadWork, float, float] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def put(self, completion: Any, work: LoadWork, since: float) -> None:
        if not completion.transport:
            return  # this rank has none of the tokens
        if not logger.isEnabledFor(logging.INFO) or self._queue.qsize() > self._LIMIT:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvconn-load-log", daemon=True)
            self._thread.start()
        self._queue.put((completion, work, since, time.monotonic()))

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            logger.info("kvconn load %s", json.dumps(_load_line(self._rank, self._shard, *entry)))
            if self._queue.empty():
                self._closing.wait(self._POLL_S)

    def close(self) -> None:
        if self._thread is not None:
            self._closing.set()
            self._queue.put(None)
            self._thread.join(5)


def _load_line(rank: str, shard: Shard, completion: Any, work: LoadWork, since: float, until: float) -> dict[str, Any]:
    took = completion.transfer_s
    block_ids, _ = shard.cut(work.num_tokens, work.block_ids, work.first_block)
    return {
        "transfer_id": completion.transfer_id,
        "request_id": work.req_id,
        "rank": rank,
        "engine_id": work.engine_id,
        "bytes": completion.bytes,
        "blocks": sum(len(group) for group in block_ids),
        "first_block": list(work.first_block),
        "segments": completion.segments,
        "transport": completion.transport,
        "ms": round(took * 1e3, 3),
        "gb_per_s": round(completion.bytes / took / 1e9, 3) if took > 0 else 0.0,
        "wait_ms": round(completion.wait_s * 1e3, 3),
        "total_ms": round((until - since) * 1e3, 3),
    }
