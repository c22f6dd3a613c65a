"""Shared by both connectors: a rank's place in its engine, and how addresses are written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """A worker's place in its engine. The defaults are the place of an engine's only worker."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def name(self) -> str:
        """In the form in which agents write it."""
        return f"dp{self.dp_rank} tp{self.tp_rank} pp{self.pp_rank}"


def host_port(host: str, port: int | None) -> str:
    """host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
