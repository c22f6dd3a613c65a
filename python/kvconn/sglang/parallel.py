"""A scheduler's place in its engine, and the options of SGLang that kvconn does not support."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from .._engine import Rank
from .layout import Heads
from .params import setting

logger = logging.getLogger("kvconn.sglang")


@dataclass(frozen=True)
class Parallel:
    """This rank's place in its engine, and the address of the engine's bootstrap port."""

    rank: Rank
    cp_rank: int
    cp_size: int
    host: str
    bootstrap_port: int
    first_node: str | None  # None: the engine has one node
    http_port: int | None
    load_balance_method: str

    @property
    def answers(self) -> bool:
        """Whether this rank's scheduler answers the clients of its data parallel rank."""
        return self.rank.tp_rank == self.rank.pp_rank == self.cp_rank == 0

    def route_info(self, layout: str | None) -> dict[str, Any]:
        """What a rank says of itself beside its numbers when the bootstrap port is asked by SGLang's protocol."""
        info = {
            "follow_bootstrap_room": self.load_balance_method == "follow_bootstrap_room",
            "prefill_http_port": self.http_port,
            "kv_layout": layout,
            "decode_allocation_policy": "early",
        }
        return {key: value for key, value in info.items() if value is not None}


def _context(name: str) -> Any:
    """One of the views of its settings that a newer SGLang has; None in an older one."""
    try:
        from sglang.srt import runtime_context

        return getattr(runtime_context, name)()
    except (ImportError, AttributeError):
        return None


def leaf(name: str, server_args: Any, default: Any = None) -> Any:
    """A setting as SGLang has resolved it. An older SGLang resolves settings in place: there it is the setting as it is now."""
    try:
        value = _context("get_context").config_leaf(name)
    except (AttributeError, ValueError):
        value = getattr(server_args, name, None)
    return default if value is None else value


def parallel_of(args: Any, server_args: Any) -> Parallel:
    view, serving, disagg = _context("get_parallel"), _context("get_serving"), _context("get_disagg")

    def known(name: str, default: Any) -> Any:
        for place in (view, server_args):
            value = getattr(place, name, None)
            if value is not None:
                return value
        return default

    tp_size = known("attn_tp_size", None) or server_args.tp_size
    attn_dp = (known("attn_dp_rank", 0) or 0, known("attn_dp_size", 1) or 1)
    system_dp = (getattr(args, "system_dp_rank", None) or 0, known("dp_size", 1) or 1)
    if attn_dp[1] > 1:  # then the ranks of data parallel attention are the data parallel ranks
        system_dp = (0, 1)
    dp_rank, dp_size = attn_dp if system_dp[1] == 1 else system_dp
    nodes = known("nnodes", 1) or 1
    init_address = known("dist_init_addr", None)
    return Parallel(
        rank=Rank(args.engine_rank % tp_size, tp_size, getattr(args, "pp_rank", 0) or 0, known("pp_size", 1) or 1, dp_rank, dp_size),
        cp_rank=known("attn_cp_rank", 0) or 0,
        cp_size=known("attn_cp_size", 1) or 1,
        host=getattr(serving, "host", None) or server_args.host,
        bootstrap_port=getattr(disagg, "disaggregation_bootstrap_port", None) or server_args.disaggregation_bootstrap_port,
        first_node=init_address.rpartition(":")[0].strip("[]") if init_address and nodes > 1 else None,
        http_port=getattr(serving, "port", None) or getattr(server_args, "port", None),
        load_balance_method=str(known("load_balance_method", "follow_bootstrap_room")),
    )


def turns(server_args: Any) -> bool:
    """Whether the engine may go on in the other role (--enable-pd-role-switch)."""
    return leaf("enable_pd_role_switch", server_args, False) is True


def refuse_unsupported(server_args: Any, parallel: Parallel) -> None:
    """Refuses options that would later lead to wrong tokens or to failures."""
    view = _context("get_parallel")

    def option(name: str, default: Any = None) -> Any:
        value = getattr(view, name, None)
        return leaf(name, server_args, default) if value is None else value

    device = str(option("device", "cuda"))
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--disaggregation-transfer-backend kvconn: --device is {device}: only cpu and cuda are supported")
    for flag in ("enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "enable_cp_tp_group_sharing"):
        if option(flag, False) is True:
            raise ValueError(f"--disaggregation-transfer-backend kvconn: {flag} is not supported")
    if (option("attn_dcp_size", 1) or 1) != 1:
        raise ValueError("--disaggregation-transfer-backend kvconn: decode context parallel engines are not supported")
    if turns(server_args) and parallel.cp_size > 1:
        raise ValueError("--enable-pd-role-switch is not supported by kvconn with --attn-cp-size above 1: no such rank decodes")
    policy = option("disaggregation_decode_allocation_policy", "early")
    if policy != "early":
        raise ValueError(f"--disaggregation-decode-allocation-policy {policy} is not supported by kvconn: the default, early, is")
    workers = option("tokenizer_worker_num", 1) or 1
    if workers != 1:
        raise ValueError(
            f"--tokenizer-worker-num {workers} is not supported by kvconn: SGLang's tokenizer workers load no plugins, "
            "and so would not know the backend; give 1, which is the default"
        )
    several = parallel.rank.tp_size > 1 or parallel.rank.pp_size > 1 or parallel.cp_size > 1
    if several and not setting("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE", 1):
        raise ValueError(
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off: with several ranks SGLang would give a failed request's pages "
            "to others while a load still writes into them; switch it on, which is the default"
        )
    if setting("SGLANG_DISAGG_STAGING_BUFFER", 0):
        raise ValueError("SGLANG_DISAGG_STAGING_BUFFER is set: kvconn copies heads between unequal ranks without a staging buffer")


def heads_of(parallel: Parallel, pool: Any, model_config: Any) -> Heads:
    """The KV heads of this rank."""
    full = getattr(pool, "full_kv_pool", pool)
    return Heads(getattr(full, "head_num", 0), model_config.get_total_num_kv_heads(), parallel.rank.tp_rank, parallel.rank.tp_size)


def bootstrap_port(parallel: Parallel) -> int:
    """The port of the engine's first rank, which has the bootstrap server: each host may have reserved another port for itself."""
    if parallel.first_node is None:
        return parallel.bootstrap_port
    world = getattr(_context("get_parallel"), "world_group", None)
    if world is None:
        raise ValueError(
            "kvconn: SGLang does not tell the group of an engine on several hosts, whose ranks must agree on the bootstrap port"
        )
    port = world.broadcast_object(parallel.bootstrap_port, src=0)
    if port != parallel.bootstrap_port:
        logger.info("bootstrap port %d of the first rank, instead of %d that this host has reserved", port, parallel.bootstrap_port)
    return int(port)


def stages_group() -> Any:
    """The ranks of the pipeline that this rank is in."""
    group = getattr(_context("get_parallel"), "pp_group", None)
    if group is None:
        raise ValueError("kvconn: SGLang does not tell the group of its pipeline's stages, so --pp-size above 1 is not supported with it")
    return group
