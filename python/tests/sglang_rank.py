"""A rank of SGLang without SGLang: real agents over caches of numpy, as the scheduler would drive them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvconn
from kvconn.sglang.layout import Heads, Layout
from kvconn.sglang.rooms import BOOTSTRAPPING, WAITING, Rooms

LAYERS, PAGES, TOKENS, HEADS, ITEM, ROWS = 3, 64, 4, 4, 8, 16


class Rank:
    """One rank of an engine: its pages are LAYERS keys, then LAYERS values, of TOKENS tokens of some heads."""

    def __init__(
        self,
        role: str,
        *,
        tp: tuple[int, int] = (0, 1),
        layers: range = range(LAYERS),
        mla: bool = False,
        tokens: int = TOKENS,
        states: dict[str, int] | None = None,
        timeouts: tuple[float, float] = (300, 300),
        **config: Any,
    ) -> None:
        rank, size = tp
        here = 1 if mla else max(1, HEADS // size)
        buffers = len(layers) * (1 if mla else 2)
        self.kv = np.zeros((buffers, PAGES * TOKENS // tokens, tokens, here, ITEM), np.uint8)
        self.rows = [np.zeros((ROWS, 64), np.uint8), np.zeros((ROWS, 128), np.uint8)]
        self.states = {kind: np.zeros((2, slots, 24), np.uint8) for kind, slots in (states or {}).items()}
        args = SimpleNamespace(
            page_size=tokens,
            prefill_start_layer=layers.start,
            kv_data_ptrs=[one.ctypes.data for one in self.kv],
            kv_data_lens=[one.nbytes for one in self.kv],
            kv_item_lens=[one[0].nbytes for one in self.kv],
            aux_data_ptrs=[one.ctypes.data for one in self.rows],
            aux_data_lens=[one.nbytes for one in self.rows],
            aux_item_lens=[one[0].nbytes for one in self.rows],
            state_types=list(self.states),
            state_data_ptrs=[[layer.ctypes.data for layer in one] for one in self.states.values()],
            state_data_lens=[[layer.nbytes for layer in one] for one in self.states.values()],
            state_item_lens=[[layer[0].nbytes for layer in one] for one in self.states.values()],
        )
        self.layout = Layout(args, Heads(here, HEADS, rank, size), mla)
        base: dict[str, Any] = {"engine_id": f"sglang-{role}", "role": role, "tp_rank": rank, "tp_size": size}
        if role == "prefill":
            base |= {"report_demands": True, "tcp_listen_host": "127.0.0.1"}
            if "bootstrap_join" not in config:
                base |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0}
        else:
            base |= {"peer_timeout_s": 1.5, "report_claims": True}
        self.agent = kvconn.Agent({**base, **config})
        self.agent.register_kv_caches(self.layout.regions)
        self.rooms = Rooms(self.agent, role, *timeouts)
        self.address = self.agent.bootstrap_address or ""

    def until(self, room: Any, *states: int) -> Any:
        deadline = time.monotonic() + 30
        while room.state not in states:
            self.rooms.tick()
            assert time.monotonic() < deadline, (room.id, room.state, room.reason, self.agent.stats())
            time.sleep(0.001)
        return room

    def offer(self, room: Any, pages: Any, row: int, states: Any = None) -> None:
        blocks = self.layout.blocks(pages, states, row)
        self.rooms.offer(room, blocks, self.layout.first(blocks, room.prefix_pages))

    def load(self, room: Any, address: str, pages: Any, row: int | None, states: Any = None, prefix: int = 0) -> None:
        blocks = self.layout.blocks(pages, states, row)
        self.rooms.load(room, address, "sglang-prefill", blocks, self.layout.first(blocks, prefix))

    def close(self) -> None:
        self.agent.close()


def both(p: Rank, d: Rank, number: int, prompts: tuple[int, int] = (0, 0)) -> tuple[Any, Any]:
    """A room on both sides, which decode has claimed."""
    at_p, at_d = p.rooms.open(number, prompts[0]), d.rooms.open(number, prompts[1])
    p.rooms.announce(at_p)
    d.rooms.claim(at_d, p.address, "sglang-prefill")
    assert (at_p.state, at_d.state) == (BOOTSTRAPPING, WAITING), (at_p.reason, at_d.reason)
    return at_p, at_d


def fill(rank: Rank, seed: int = 1) -> None:
    chosen = np.random.default_rng(seed)
    for array in (rank.kv, *rank.rows, *rank.states.values()):
        array[:] = chosen.integers(1, 255, array.shape, np.uint8)


def empty(*sides: Rank) -> None:
    """No room is left, in Python or in the agent."""
    for side in sides:
        deadline = time.monotonic() + 30
        while side.rooms._owing or side.agent.stats()["outstanding"]:
            side.rooms.tick()
            assert time.monotonic() < deadline, (side.rooms._owing, side.agent.stats())
            time.sleep(0.001)
