"""How bootstrap ports and prefill servers are asked: which hosts, by TLS or not, and with which token."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from .allow import Allow

_ASK_S = 2.0  # for one answer


class Access:
    """The agent's security settings, for the requests that this package makes by itself."""

    def __init__(self, config: Mapping[str, Any], *, own: bool) -> None:
        """own: for the engine's own bootstrap port only, which the operator has named."""
        self.allow = None if own else Allow(config.get("bootstrap_allow") or ())
        # With tls_ca_file the agent speaks TLS to an http:// address too.
        self.tls = bool(config.get("tls_ca_file") or (own and config.get("tls_cert_file")))
        self._ca = config.get("tls_ca_file") or None
        self._token = config.get("nats_token") or ""
        if own and config.get("nats_token_file"):
            with open(config["nats_token_file"], encoding="utf-8") as file:
                self._token = file.read().strip()

    def url(self, address: str, path: str) -> str:
        """Raises RefusedError where the host may not be asked."""
        host, _, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if self.allow is not None:
            self.allow.host(host)
        return f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}{path}"

    def headers(self, address: str) -> dict[str, str]:
        """The token, for the engine's own port only, and never where others could read it."""
        if self.allow is not None or not self._token or not (self.tls or _is_loopback(address.rpartition(":")[0])):
            return {}
        return {"Authorization": f"Bearer {self._token}"}

    def session(self, connections: int = 100) -> Any:
        import aiohttp  # SGLang depends on it: its own bootstrap server uses it
        from aiohttp.resolver import ThreadedResolver

        allow = self.allow

        class Resolver(ThreadedResolver):
            async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
                found = await super().resolve(host, port, family)
                if allow is not None:  # aiohttp dials the addresses that are found here
                    allow.found(host, [one["host"] for one in found])
                return found

        context = ssl.create_default_context(cafile=self._ca) if self.tls else True
        connector = aiohttp.TCPConnector(resolver=Resolver(), ssl=context, limit=connections)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ASK_S))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
