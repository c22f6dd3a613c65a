"""What a prefill engine says of itself at its bootstrap address: data parallel ranks, page size, data type.

Asked for beside the scheduler, once per address; a room waits in the state Bootstrapping meanwhile. The paths and words
are SGLang's own, so that an engine with another backend is told apart by what it says, or by not being there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from .allow import Allow, RefusedError

logger = logging.getLogger("kvconn.sglang")

_ASK_S = 2.0  # for one answer
_GONE_S = 2.5  # nobody listens
_READY_S = 15.0  # somebody does, whose ranks are not all there
_RANK_S = 30.0  # for the prefill engine to name a request's data parallel rank
_AGAIN_S = 0.2
_LIMIT = 1024  # addresses that are remembered, and questions under way
_BYTES = 1 << 20  # of an answer


class RouteError(Exception):
    """The prefill engine cannot be used; the message says why."""


@dataclass(frozen=True)
class Engine:
    """A prefill engine."""

    dp_size: int = 1
    follow_bootstrap_room: bool = True
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_layout: str | None = None

    @classmethod
    def of(cls, said: Any) -> Engine:
        if not isinstance(said, dict):
            raise RouteError(f"its answer is {said!r:.100}, not an object")
        values: dict[str, Any] = {}
        kinds = {"dp_size": int, "follow_bootstrap_room": bool, "page_size": int, "kv_cache_dtype": str, "kv_layout": str}
        for key, kind in kinds.items():
            value = said.get(key)
            if value is None:
                continue
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise RouteError(f"its {key} is {value!r:.100}")
            values[key] = value
        if not 1 <= values.get("dp_size", 1) <= 65536:
            raise RouteError(f"its dp_size is {values['dp_size']}")
        return cls(**values)

    def differs(self, page_size: int, dtype: str, layout: str | None) -> str | None:
        """What this rank's caches have otherwise, in words."""
        pairs = (
            ("page_size", self.page_size, page_size, "--page-size"),
            ("kv_cache_dtype", self.kv_cache_dtype, dtype, "--kv-cache-dtype"),
        )
        for key, theirs, ours, flag in pairs:
            if theirs is not None and theirs != ours:
                return f"{key} is {theirs} at the prefill engine, {ours} at this one: give both the same {flag}"
        if self.kv_layout is not None and layout is not None and self.kv_layout != layout:
            return f"kv_layout is {self.kv_layout} at the prefill engine, {layout} at this one: the attention backends must be alike"
        return None


class Access:
    """How bootstrap ports are asked, by the agent's own settings: whom, with TLS or without, and what for a token."""

    def __init__(self, config: Mapping[str, Any], *, own: bool) -> None:
        """own: it asks nothing but its engine's own bootstrap port, which the operator has named."""
        self.allow = None if own else Allow(config.get("bootstrap_allow") or ())
        # As the agent takes an http:// address with tls_ca_file.
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

    def session(self) -> Any:
        import aiohttp  # SGLang's own bootstrap server is made of it
        from aiohttp.resolver import ThreadedResolver

        allow = self.allow

        class Resolver(ThreadedResolver):
            async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
                found = await super().resolve(host, port, family)
                if allow is not None:  # what is found here is what is dialled
                    allow.found(host, [one["host"] for one in found])
                return found

        context = ssl.create_default_context(cafile=self._ca) if self.tls else True
        connector = aiohttp.TCPConnector(resolver=Resolver(), ssl=context)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ASK_S))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


class Router:
    """Asks bootstrap addresses in a thread of its own. Answers come by the inbox, that is, in the scheduler's thread."""

    def __init__(self, inbox: Any, access: Access | None = None) -> None:
        self._inbox = inbox
        self._access = access or Access({}, own=False)
        self._known: dict[str, Engine] = {}
        self._asked: dict[str, list[Callable[[Engine | RouteError], None]]] = {}
        self._under_way = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: Any = None

    # -- the scheduler's thread -------------------------------------------------------------------------------------

    def engine(self, address: str, then: Callable[[Engine | RouteError], None]) -> None:
        """Calls then with the engine at once if it is known, else in a later tick."""
        known = self._known.get(address)
        if known is not None:
            then(known)
            return
        waiting = self._asked.get(address)
        if waiting is not None:
            waiting.append(then)
            return
        if len(self._asked) >= _LIMIT:
            then(RouteError(f"{_LIMIT} bootstrap addresses are being asked already"))
            return
        self._asked[address] = [then]
        self._start(self._ask_engine(address), lambda result: self._answered(address, result))

    def _answered(self, address: str, result: Any) -> None:
        if isinstance(result, Engine):
            if len(self._known) >= _LIMIT:
                del self._known[next(iter(self._known))]
            self._known[address] = result
        for then in self._asked.pop(address, []):
            then(result)

    def forget(self, address: str) -> None:
        """What was known of it may be wrong: it may have been restarted with other options."""
        self._known.pop(address, None)

    def dp_rank(self, address: str, room: int, then: Callable[[int | RouteError], None]) -> None:
        """Calls then, in a later tick, with the data parallel rank that the prefill engine has given a request to."""
        self._start(self._ask_rank(address, room), then)

    def tell_dp_rank(self, address: str, room: int, rank: int) -> None:
        """Prefill: where a request is."""
        self._start(self._post(address, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": rank}), _log_error)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        if self._under_way >= _LIMIT:
            work.close()
            then(RouteError(f"{_LIMIT} questions to bootstrap addresses are under way already"))
            return
        self._under_way += 1
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="kvconn-route", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._run(work, then), self._loop)

    async def _run(self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None]) -> None:
        try:
            result = await work
        except RouteError as error:
            result = error
        except RefusedError as error:
            result = RouteError(str(error))
        except Exception as error:
            result = RouteError(repr(error))
        self._inbox.put(lambda _rooms: self._done(result, then))

    def _done(self, result: Any, then: Callable[[Any], None]) -> None:
        self._under_way -= 1
        then(result)

    async def _request(self, method: str, address: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self._access.url(address, path)
        if self._session is None:
            self._session = self._access.session()
        async with self._session.request(method, url, json=body, headers=self._access.headers(address), allow_redirects=False) as answer:
            read = bytearray()
            while (part := await answer.content.readany()) and len(read) <= _BYTES:  # a read gives what is there, seldom all
                read += part
            if len(read) > _BYTES:
                raise RouteError(f"http://{address}{path}: the answer has more than {_BYTES} bytes")
            text = read.decode("utf-8", "replace")
            if answer.status != 200:
                return answer.status, text[:200]
            with contextlib.suppress(ValueError):
                return 200, json.loads(text)
            return 200, text[:200]

    async def _ask_engine(self, address: str) -> Engine:
        began = time.monotonic()
        path = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
        while True:
            bound = _GONE_S
            try:
                status, said = await self._request("GET", address, path)
            except (RouteError, RefusedError):
                raise
            except Exception as error:
                why = f"nobody answers there: {str(error) or repr(error)}"
            else:
                if status == 200:
                    try:
                        return Engine.of(said)
                    except RouteError as error:
                        raise RouteError(f"prefill engine at {address}: {error}") from error
                why = f"it answers {status}: {said}"
                if status == 503:  # not all of its ranks are there yet
                    bound = _READY_S
            if time.monotonic() - began + _AGAIN_S > bound:
                raise RouteError(f"prefill engine at {address}: {why}")
            await asyncio.sleep(_AGAIN_S)

    async def _ask_rank(self, address: str, room: int) -> int:
        began = time.monotonic()
        while True:
            try:
                status, said = await self._request("POST", address, "/query_dp_ranks", {"bootstrap_rooms": [room]})
                why = f"it answers {status}: {said}"
            except (RouteError, RefusedError):
                raise
            except Exception as error:
                status, said, why = 0, None, f"nobody answers there: {str(error) or repr(error)}"
            rank = said.get(str(room)) if isinstance(said, dict) else None
            if isinstance(rank, int) and rank >= 0:
                return rank
            if time.monotonic() - began > (_RANK_S if status == 200 else _GONE_S):
                raise RouteError(f"prefill engine at {address} does not say which of its data parallel ranks has the request: {why}")
            await asyncio.sleep(_AGAIN_S / 4)

    async def _post(self, address: str, path: str, body: Any) -> None:
        for attempt in range(3):
            try:
                status, said = await self._request("POST", address, path, body)
            except Exception as error:
                status, said = 0, repr(error)
            if status == 200:
                return
            await asyncio.sleep(_AGAIN_S * (attempt + 1))
        raise RouteError(f"http://{address}{path}: {status} {said}")


def _log_error(result: Any) -> None:
    if isinstance(result, RouteError):
        logger.error("%s", result)
