"""What a prefill engine says of itself at its bootstrap address: data parallel ranks, page size, data type.

A thread beside the scheduler asks each address once; a room stays in the state Bootstrapping meanwhile. The paths and words
are SGLang's own, so an engine with another backend is recognised by its answer, or by giving none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from .access import Access
from .allow import RefusedError, RouteError
from .params import MAX_TRANSFERS
from .recompute import Prefills

logger = logging.getLogger("kvconn.sglang")

_GONE_S = 2.5  # while nobody listens
_READY_S = 15.0  # while the engine answers that its ranks are not all there
_RANK_S = 30.0  # for the prefill engine to name a request's data parallel rank
_AGAIN_S = 0.2
_KNOWN_S = 5.0  # for an answer to be believed: an engine needs longer to come back with other options
_LIMIT = 1024  # remembered addresses
_LIMITS = {"questions": 1024, "prefills": MAX_TRANSFERS}  # questions and prefills that are under way
_ROOMS = MAX_TRANSFERS  # rooms that one address is asked for, or told of, at a time
_BATCH = 1024  # rooms in one question: 19 digits each go into the 32 KiB that the port reads
_CLOSE_S = 5.0  # for the thread to end
_AT_ONCE = 32  # rooms that the bootstrap port is told of at once
_BYTES = 1 << 20  # of an answer


@dataclass(frozen=True)
class Engine:
    """A prefill engine."""

    dp_size: int = 1
    follow_bootstrap_room: bool = True
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_layout: str | None = None
    prefill_http_port: int | None = None

    @classmethod
    def of(cls, said: Any) -> Engine:
        if not isinstance(said, dict):
            raise RouteError(f"its answer is {said!r:.100}, not an object")
        values: dict[str, Any] = {}
        kinds = {"dp_size": int, "follow_bootstrap_room": bool, "page_size": int, "kv_cache_dtype": str, "kv_layout": str}
        kinds["prefill_http_port"] = int
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
        """In which way this rank's caches differ, in words; None if they do not."""
        pairs = (
            ("page_size", self.page_size, page_size, "--page-size"),
            ("kv_cache_dtype", self.kv_cache_dtype, dtype, "--kv-cache-dtype"),
        )
        for key, theirs, ours, flag in pairs:
            if theirs is not None and theirs != ours:
                return f"{key} is {theirs} at the prefill engine, {ours} at this one: give both the same {flag}"
        if self.kv_layout is not None and layout is not None and self.kv_layout != layout:
            return f"kv_layout is {self.kv_layout} at the prefill engine, {layout} at this one: give both the same --attention-backend"
        return None


class EveryEngine(dict):  # type: ignore[type-arg]
    """Takes the place of SGLang's table of prefill engines, which SGLang fills by asking them on the scheduler's thread.

    It says of every address that an engine with a single data parallel rank is there. So SGLang initialises a receiver at
    once, and the receiver asks the Router for the truth.
    """

    class _Known:
        attn_tp_size = attn_cp_size = dp_size = pp_size = 1
        follow_bootstrap_room = True
        prefill_http_port = None
        decode_allocation_policy = "early"

    def __init__(self) -> None:
        super().__init__()
        self._known = self._Known()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._known

    def __contains__(self, key: Any) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._known


class Router:
    """Asks bootstrap addresses in a thread of its own. Answers come by the inbox, so they run in the scheduler's thread."""

    def __init__(self, inbox: Any, access: Access | None = None, prefill_key: str = "") -> None:
        self._inbox = inbox
        self._access = access or Access({}, own=False)
        self._known: dict[str, tuple[Engine, float]] = {}  # with the time until which the answer is believed
        self._asked: dict[str, list[Callable[[Engine | RouteError], None]]] = {}
        self._asking: dict[str, dict[int, Any]] = {}
        self._telling: dict[str, dict[int, Any]] = {}
        self._lock = threading.Lock()  # guards the queues in _asking and _telling
        self._under_way: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: Any = None
        self._prefills = Prefills(self._access, prefill_key)

    # -- the scheduler's thread -------------------------------------------------------------------------------------

    def engine(self, address: str, then: Callable[[Engine | RouteError], None]) -> None:
        """Calls ``then`` with the engine: at once if the engine is known, else in a later tick."""
        known, until = self._known.get(address, (None, 0.0))
        if known is not None and time.monotonic() < until:
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
        self.forget(address)
        if isinstance(result, Engine):
            if len(self._known) >= _LIMIT:
                del self._known[next(iter(self._known))]
            self._known[address] = result, time.monotonic() + _KNOWN_S
        for then in self._asked.pop(address, []):
            then(result)

    def close(self) -> None:
        """Ends the thread. Questions under way get no answer any more."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        asyncio.run_coroutine_threadsafe(self._end(), loop)
        thread.join(_CLOSE_S)
        if thread.is_alive():
            logger.error("the thread that asks bootstrap addresses has not ended within %g s", _CLOSE_S)

    def forget(self, address: str) -> None:
        """Forgets an engine, which may have been restarted with other options."""
        self._known.pop(address, None)

    def dp_rank(self, address: str, room: int, then: Callable[[int | RouteError], None]) -> None:
        """Calls ``then``, in a later tick, with the data parallel rank to which the prefill engine has given a request."""
        self._queue(self._asking, address, room, (then, time.monotonic()), self._ask_ranks)

    def tell_dp_rank(self, address: str, room: int, rank: int) -> None:
        """Prefill: tells the bootstrap port which data parallel rank has a request."""
        self._queue(self._telling, address, room, (rank, _log_error), self._tell_ranks)

    def prefill_again(self, address: str, payload: dict[str, Any], bound_s: float, then: Callable[[RouteError | None], None]) -> None:
        """Has a prefill server compute a request, by its own API. Calls ``then`` with what went wrong, or with None when the
        request is computed."""
        self._start(self._prefills.ask(address, payload, bound_s), then, "prefills")

    def _queue(self, queues: dict[str, dict[int, Any]], address: str, room: int, item: Any, work: Callable[..., Any]) -> None:
        """Puts many rooms into one question, so that a burst of requests costs the scheduler's interpreter little."""
        with self._lock:
            queue = queues.get(address)
            begin = queue is None
            if queue is None:
                queue = queues[address] = {}
            full = len(queue) >= _ROOMS
            if not full:
                queue[room] = item
        if full:
            _callback(item)(RouteError(f"{_ROOMS} rooms are under way at {address} already"))
        elif begin:
            self._start(work(address, queue), lambda result: self._ended(queues, address, queue, result))

    def _ended(self, queues: dict[str, dict[int, Any]], address: str, queue: dict[int, Any], result: Any) -> None:
        """Tells the rooms that are left in the queue why they get no answer."""
        with self._lock:
            if queues.get(address) is queue:
                del queues[address]
        error = result if isinstance(result, RouteError) else RouteError(f"prefill engine at {address} does not answer for this request")
        for item in queue.values():
            _callback(item)(error)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None], what: str = "questions") -> None:
        if self._under_way[what] >= _LIMITS[what]:
            work.close()
            then(RouteError(f"{_LIMITS[what]} {what} are under way already"))
            return
        try:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(loop,), name="kvconn-route", daemon=True)
                self._thread.start()
                self._loop = loop
            asyncio.run_coroutine_threadsafe(self._run(work, then, what), self._loop)
        except Exception as error:  # without a thread this request ends, and the scheduler goes on
            work.close()
            then(RouteError(repr(error)))
            return
        self._under_way[what] += 1

    async def _end(self) -> None:
        try:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for session in (self._session, self._prefills.session):
                if session is not None:
                    await session.close()
        finally:
            asyncio.get_running_loop().stop()

    async def _run(self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None], what: str) -> None:
        try:
            result = await work
        except RouteError as error:
            result = error
        except RefusedError as error:
            result = RouteError(str(error))
        except Exception as error:
            result = RouteError(repr(error))
        self._inbox.put(lambda _rooms: self._done(result, then, what))

    def _done(self, result: Any, then: Callable[[Any], None], what: str) -> None:
        self._under_way[what] -= 1
        then(result)

    async def _request(self, method: str, address: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = self._access.url(address, path)
        if self._session is None:
            self._session = self._access.session()
        async with self._session.request(method, url, json=body, headers=self._access.headers(address), allow_redirects=False) as answer:
            read = bytearray()
            while (part := await answer.content.readany()) and len(read) <= _BYTES:  # one read seldom gives the whole answer
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
                if status == 503:  # some of the engine's ranks are not there yet
                    bound = _READY_S
            if time.monotonic() - began + _AGAIN_S > bound:
                raise RouteError(f"prefill engine at {address}: {why}")
            await asyncio.sleep(_AGAIN_S)

    async def _ask_ranks(self, address: str, queue: dict[int, Any]) -> None:
        while rooms := self._left(self._asking, address, queue):
            for at in range(0, len(rooms), _BATCH):
                batch = rooms[at : at + _BATCH]
                try:
                    status, said = await self._request("POST", address, "/query_dp_ranks", {"bootstrap_rooms": batch})
                    why = f"it answers {status}: {said!s:.200}"
                except (RouteError, RefusedError):
                    raise
                except Exception as error:
                    status, said, why = 0, None, f"nobody answers there: {str(error) or repr(error)}"
                late = time.monotonic() - (_RANK_S if status == 200 else _GONE_S)
                for room in batch:
                    then, began = queue[room]
                    answer: Any = said.get(str(room)) if isinstance(said, dict) else None
                    if not isinstance(answer, int) or isinstance(answer, bool) or answer < 0:
                        if began > late:
                            continue
                        answer = RouteError(
                            f"prefill engine at {address} does not say which of its data parallel ranks has the request: {why}"
                        )
                    self._take(queue, room)
                    self._inbox.put(lambda _rooms, then=then, answer=answer: then(answer))
            await asyncio.sleep(_AGAIN_S / 4)

    async def _tell_ranks(self, address: str, queue: dict[int, Any]) -> None:
        while rooms := self._left(self._telling, address, queue):
            batch = {room: self._take(queue, room)[0] for room in rooms[:_AT_ONCE]}
            told = (self._post(address, "/register_dp_rank", {"bootstrap_room": room, "dp_rank": rank}) for room, rank in batch.items())
            for result in await asyncio.gather(*told, return_exceptions=True):
                _log_error(result)

    def _left(self, queues: dict[str, dict[int, Any]], address: str, queue: dict[int, Any]) -> list[int]:
        with self._lock:
            if not queue:
                del queues[address]  # the next room begins a new question
            return list(queue)

    def _take(self, queue: dict[int, Any], room: int) -> Any:
        with self._lock:
            return queue.pop(room)

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


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _callback(item: tuple[Any, Any]) -> Callable[[Any], None]:
    return item[0] if callable(item[0]) else item[1]


def _log_error(result: Any) -> None:
    if isinstance(result, Exception):
        logger.error("%s", result)
