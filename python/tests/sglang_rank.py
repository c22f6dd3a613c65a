"""A rank of SGLang without SGLang: real agents over caches of numpy, as the scheduler would drive them.

What stands in for SGLang's pools and KVArgs here is compared with SGLang's own in test_sglang_stand_ins.py.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

import kvconn
from kvconn.sglang.layout import Heads, Layout
from kvconn.sglang.rooms import BOOTSTRAPPING, WAITING, Rooms

LAYERS, PAGES, TOKENS, HEADS, ITEM, ROWS = 3, 64, 4, 4, 8, 16


class Buffer:
    """As much of a tensor as the backend looks at."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.nbytes = array.nbytes

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape  # type: ignore[no-any-return]

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(n // self.array.itemsize for n in self.array.strides)
        return strides if dim is None else strides[dim]

    @property
    def dtype(self) -> str:
        return f"torch.{self.array.dtype}"

    def __getitem__(self, at: Any) -> Buffer:
        return Buffer(self.array[at])

    def __len__(self) -> int:
        return len(self.array)


class MHATokenToKVPool:
    """SGLang's pool of keys and values, by its name."""

    kv_cache_layout = "nhd"

    def __init__(self, kv: Any, layers: range, heads: int) -> None:
        self.start_layer, self.layer_num, self.head_num = layers.start, len(layers), heads
        self.k_buffer = [Buffer(one) for one in kv[: len(layers)]]
        self.v_buffer = [Buffer(one) for one in kv[len(layers) :]]


class MLATokenToKVPool:
    def __init__(self, kv: Any, layers: range) -> None:
        self.start_layer, self.layer_num = layers.start, len(layers)
        self.kv_buffer = [Buffer(one) for one in kv]


class SWAKVPool:
    """Some layers have a window. Here they have numbers behind the others'."""

    def __init__(self, full: Any, windows: Any) -> None:
        self.full_kv_pool, self.swa_kv_pool = full, windows
        first = full.start_layer
        self.layers_mapping = {first + n: (n, False) for n in range(full.layer_num)}
        self.layers_mapping |= {first + full.layer_num + n: (n, True) for n in range(windows.layer_num)}


class MambaPool:
    """A state of one convolution and none beside it, for a slot of each request."""

    def __init__(self, states: Any, layers: list[int]) -> None:
        self.mamba_layer_ids = layers
        self.mamba_cache = SimpleNamespace(conv=[Buffer(states)], temporal=Buffer(states[:0]))


class HybridLinearKVPool:
    def __init__(self, full: Any, mamba: MambaPool) -> None:
        self.full_kv_pool, self.mamba_pool = full, mamba
        self.full_attention_layer_id_mapping = {full.start_layer + n: n for n in range(full.layer_num)}


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
        pool: Any = MLATokenToKVPool(self.kv, layers) if mla else MHATokenToKVPool(self.kv, layers, here)
        if "swa" in self.states:
            pool = SWAKVPool(pool, MHATokenToKVPool(self.states["swa"], range(1), here))
        if "mamba" in self.states:
            pool = HybridLinearKVPool(pool, MambaPool(self.states["mamba"], [layers.stop, layers.stop + 1]))
        args = kv_args(tokens, self.kv, self.rows, self.states)
        self.layout = Layout(args, pool, None, Heads(here, HEADS, rank, size), config.get("pp_size", 1))
        base: dict[str, Any] = {"engine_id": f"sglang-{role}", "role": role, "tp_rank": rank, "tp_size": size}
        if role == "prefill":
            base |= {"report_demands": True, "tcp_listen_host": "127.0.0.1"}
            if "bootstrap_join" not in config:
                base |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0}
        else:
            base |= {"peer_timeout_s": 15, "report_claims": True}
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


def kv_args(page: int, kv: Any, rows: list[Any], states: dict[str, Any]) -> SimpleNamespace:
    """What the backend reads of SGLang's KVArgs."""

    def infos(arrays: Any) -> tuple[list[int], list[int], list[int]]:
        return [one.ctypes.data for one in arrays], [one.nbytes for one in arrays], [one[0].nbytes for one in arrays]

    args = SimpleNamespace(page_size=page, state_types=list(states))
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = infos(kv)
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = infos(rows)
    all_states = [infos(one) for one in states.values()]
    args.state_data_ptrs, args.state_data_lens, args.state_item_lens = ([one[n] for one in all_states] for n in range(3))
    return args


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
