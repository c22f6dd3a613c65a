"""Ranks of SGLang as SGLang itself starts them: its own classes for pools, settings and queues make our manager.

Only the scheduler is a stand-in. It has the few attributes that SGLang's own method reads; the method fails if one is missing, and
like.py refuses one that SGLang's class has not got.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import like as sglang
import torch
from like import like
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.disaggregation.utils import MetadataBuffers, TransferBackend
from sglang.srt.mem_cache import memory_pool
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_device, get_parallel

from kvconn.sglang.server import KVConnBootstrapServer

load_plugins()
HookRegistry.apply_hooks()

PAGE, HEADS, DIM, ROWS = 4, 2, 8, 16


class Group:
    """A pipeline's ranks, of which each says its layers, or all ranks, of which the first says its port."""

    def __init__(self, stages: list[list[int]], port: int = 0) -> None:
        self.stages, self.port = stages, port

    def all_gather_object(self, obj: Any) -> Any:
        assert obj in self.stages
        return self.stages

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        assert src == 0
        return self.port


class Rank:
    """One rank: its manager is made by SGLang's own queue, and works."""

    def __init__(self, manager: Any, queue: Any) -> None:
        self.manager, self.queue = manager, queue
        self.pool, self.metadata = queue.token_to_kv_pool, queue.metadata_buffers
        self.rooms, self.layout = manager.rooms, manager.layout

    def until(self, room: Any, *states: int) -> int:
        deadline = time.monotonic() + 30
        while room.state not in states:
            self.rooms.tick()
            assert time.monotonic() < deadline, (room.id, room.state, room.reason, self.manager._agent.stats())
            time.sleep(0.001)
        return room.state  # type: ignore[no-any-return]


@contextlib.contextmanager
def settings(role: str, *, tp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1), page: int = PAGE, **more: Any) -> Iterator[Any]:
    """SGLang's own settings of a process, as its launcher would publish them."""
    given = {
        "device": "cpu",
        "page_size": page,
        "host": "127.0.0.1",
        "attention_backend": "torch_native",
        "model_path": str(Path(__file__).resolve().parent),  # a folder that is there; dummy weights need no more
        "load_format": "dummy",
        "tp_size": tp[1],
        "pp_size": pp[1],
    }
    given |= {"disaggregation_mode": role, "disaggregation_transfer_backend": "kvconn", **more}
    ranks = {"tp_rank": tp[0], "attn_tp_rank": tp[0], "attn_tp_size": tp[1], "pp_rank": pp[0], "dp_rank": 0, "attn_dp_rank": 0}
    ranks |= {"attn_dp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "attn_dcp_size": 1, "dp_size": 1}
    with get_context().override_server_args(**given) as server_args, get_parallel().override(**ranks):
        get_device()._set("gpu_id", 0)
        yield server_args


def start(
    role: str,
    make: Callable[[], Any],
    *,
    tp: tuple[int, int] = (0, 1),
    pp: tuple[int, int] = (0, 1),
    stages: list[list[int]] | None = None,
    total_heads: int = HEADS,
    draft: Callable[[], Any] | None = None,
    requests: Any = None,
    world: Group | None = None,
    scheduler: Any = None,
    **more: Any,
) -> Rank:
    """Runs the method by which SGLang's queue makes its manager. make gives the pool, under the settings of the process.

    scheduler: an object with what a test needs of the scheduler beside.
    """
    with settings(role, tp=tp, pp=pp, **more) as server_args, contextlib.ExitStack() as stack:
        if stages is not None:
            stack.enter_context(get_parallel().override(pp_group=Group(stages)))
        if world is not None:
            stack.enter_context(get_parallel().override(world_group=world))
        pool = make()
        metadata = MetadataBuffers(ROWS, 8, torch.float32, 0)
        kind = prefill.PrefillBootstrapQueue if role == "prefill" else decode.DecodePreallocQueue
        queue = object.__new__(kind)
        text_config = SimpleNamespace(full_attention_layer_ids=[1, 3])  # of a model, and no class of SGLang's
        model_config = like(
            sglang.SGLANG_MODEL_CONFIG, num_hidden_layers=4, get_total_num_kv_heads=lambda: total_heads, hf_text_config=text_config
        )
        known = like(
            sglang.SGLANG_SCHEDULER,
            rust_server=None,
            enable_hisparse=False,
            tp_worker=like(sglang.SGLANG_WORKER, model_runner=like(sglang.SGLANG_RUNNER, kv_cache_dtype_str="float32")),
            model_config=model_config,
            req_to_token_pool=requests,
            server_args=server_args,
        )
        if scheduler is None:
            scheduler = known
        vars(scheduler).update(vars(known))
        values = {
            "token_to_kv_pool": pool,
            "draft_token_to_kv_pool": draft() if draft else None,
            "is_mla_backend": utils.is_mla_backend(pool),
        }
        values |= {"metadata_buffers": metadata, "tp_rank": tp[0], "pp_rank": pp[0], "scheduler": scheduler}
        values |= {"transfer_backend": TransferBackend("kvconn")}
        if role == "decode":
            values |= {"enable_staging": False, "req_to_token_pool": requests}
        unknown = sorted(set(values) - sglang.fields_of(f"{kind.__module__}:{kind.__name__}"))
        assert not unknown, f"a {kind.__name__} of the installed SGLang has no {', '.join(unknown)}"
        vars(queue).update(values)
        return Rank(queue._init_kv_manager(), queue)


def mha(first: int, end: int, *, heads: int = HEADS, size: int = 64) -> Any:
    """A pool of the layers from first up to end."""
    return memory_pool.MHATokenToKVPool(size, PAGE, torch.float32, heads, DIM, end - first, "cpu", False, start_layer=first, end_layer=end)


@contextlib.contextmanager
def engine(port: int) -> Iterator[list[Rank]]:
    """Opens the prefill engine's bootstrap port, and closes the ranks that a test puts into the list."""
    server = KVConnBootstrapServer("127.0.0.1", port)
    ranks: list[Rank] = []
    try:
        yield ranks
    finally:
        for rank in reversed(ranks):
            rank.manager.teardown()
        server.close()


def send(ps: list[Rank], ds: list[Rank], port: int, given: Any, taken: Any, number: int = 6) -> tuple[list[int], list[Any]]:
    """A request from its prefill ranks to its decode ranks: the states in which decode ends, and decode's rooms.

    given and taken are the pages, the states and the row.
    """
    address = f"http://127.0.0.1:{port}"
    at_p, at_d = [p.rooms.open(number) for p in ps], [d.rooms.open(number) for d in ds]
    for p, room in zip(ps, at_p):
        p.rooms.announce(room)
    for d, room in zip(ds, at_d):
        d.rooms.claim(room, address, "sglang-dp0")
        blocks = d.layout.blocks(*taken)
        d.rooms.load(room, address, "sglang-dp0", blocks, d.layout.first(blocks, 0))
    for p, room in zip(ps, at_p):
        deadline = time.monotonic() + 30
        while room.state == 1 and any(each.state != 0 for each in at_d):  # decode may refuse a request of which prefill never hears
            for rank in (*ps, *ds):
                rank.rooms.tick()
            assert time.monotonic() < deadline, (room.reason, [each.state for each in at_d])
            time.sleep(0.001)
        if room.state == 2:
            blocks = p.layout.blocks(*given)
            p.rooms.offer(room, blocks, p.layout.first(blocks, 0))
    ends = [d.until(room, 0, 4) for d, room in zip(ds, at_d)]
    return ends, at_d
