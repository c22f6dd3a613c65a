"""The bootstrap port of a prefill engine, in the process that starts its schedulers."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.disaggregation.base import conn as _base

from .params import from_environment, server_config

logger = logging.getLogger("kvconn.sglang")


class KVConnBootstrapServer(_base.BaseKVBootstrapServer):
    """SGLang's class of this name, as an agent without caches."""

    def __init__(self, host: str, port: int) -> None:
        from kvconn import Agent

        self.host, self.port = host, port
        self._agent = Agent(server_config(host, port, from_environment()))
        logger.info("kvconn: bootstrap port %s", self._agent.bootstrap_address)

    def close(self) -> None:
        self._agent.close()

    def poll(self) -> Any:
        return None
