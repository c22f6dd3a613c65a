"""One agent of a test, with its cache. Not in conftest.py: in a run with e2e/, that name is of another file."""

from __future__ import annotations

import time

import numpy as np

import kvconn

LAYERS, BLOCKS, BLOCK = 3, 16, 4096


class Side:
    """One agent with its cache: LAYERS arrays of BLOCKS blocks of BLOCK bytes."""

    def __init__(self, role: str, **config: object) -> None:
        self.cache = np.zeros((LAYERS, BLOCKS, BLOCK), np.uint8)
        base: dict[str, object] = {"engine_id": f"engine-{role}", "role": role, "log_level": "debug"}
        if role != "decode":
            base |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
        self.agent = kvconn.Agent({**base, **config})
        self.collected: dict[str, kvconn.Completion] = {}

    def register(self) -> Side:
        regions = []
        for i, layer in enumerate(self.cache):
            regions += kvconn.regions_from_tensor(f"layer.{i}", layer, block_dim=0)
        self.agent.register_kv_caches(regions)
        return self

    def finished(self, transfer_id: str) -> kvconn.Completion:
        """Waits for one transfer's completion."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for done in self.agent.get_finished():
                assert done.transfer_id not in self.collected, f"{done} came twice"
                self.collected[done.transfer_id] = done
            if transfer_id in self.collected:
                return self.collected[transfer_id]
            self.agent.wait(1)
        raise AssertionError(f"no completion of {transfer_id} within 30 s: {self.agent.stats()}")

    def until(self, what: str, value: int) -> None:
        """Waits until a gauge of the statistics has a value."""
        deadline = time.monotonic() + 30
        while self.agent.stats()[what] != value:
            assert time.monotonic() < deadline, (what, value, self.agent.stats())
            self.agent.wait(0.005)
