"""A scheduler's place in its engine, and the options of SGLang that kvconn does not support."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from .._engine import Rank
from .layout import Heads

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
        """What SGLang's ranks say of themselves beside their numbers, to those who ask the bootstrap port by SGLang's protocol."""
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


def refuse_unsupported(server_args: Any, parallel: Parallel) -> None:
    """Refuses options that would later lead to wrong tokens or to failures."""
    view, disagg = _context("get_parallel"), _context("get_disagg")

    def option(name: str, default: Any = None) -> Any:
        for place in (view, disagg, server_args):
            value = getattr(place, name, None)
            if value is not None:
                return value
        return default

    device = str(option("device", "cuda"))
    if device != "cpu":
        raise ValueError(f"--disaggregation-transfer-backend kvconn: --device is {device}: only caches in host memory are supported yet")
    for flag in ("enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "enable_cp_tp_group_sharing", "enable_pd_role_switch"):
        if option(flag, False) is True:
            raise ValueError(f"--disaggregation-transfer-backend kvconn: {flag} is not supported")
    if (option("attn_dcp_size", 1) or 1) != 1:
        raise ValueError("--disaggregation-transfer-backend kvconn: decode context parallel engines are not supported")
    policy = option("disaggregation_decode_allocation_policy", "early")
    if policy != "early":
        raise ValueError(f"--disaggregation-decode-allocation-policy {policy} is not supported by kvconn: the default, early, is")
    try:
        from sglang.srt.environ import envs

        staging = bool(envs.SGLANG_DISAGG_STAGING_BUFFER.get())
    except (ImportError, AttributeError):
        staging = False
    if staging:
        raise ValueError("SGLANG_DISAGG_STAGING_BUFFER is set: kvconn copies heads between unequal ranks without a staging buffer")


def heads_of(args: Any, server_args: Any, parallel: Parallel) -> Heads | None:
    """The KV heads of this rank; None if SGLang does not tell them: then both engines need equal ranks."""
    size, rank = parallel.rank.tp_size, parallel.rank.tp_rank
    here, total = getattr(args, "kv_head_num", 0), getattr(args, "total_kv_head_num", 0)
    if not here or not total:
        try:
            from sglang.srt.configs.model_config import ModelConfig

            total = ModelConfig.from_server_args(server_args).get_total_num_kv_heads()
            here = max(1, total // size)
        except Exception as error:
            logger.warning(
                "SGLang does not tell the model's KV heads (%r): the prefill and the decode engine need equal numbers of ranks", error
            )
            return None
    return Heads(here, total, rank, size)
