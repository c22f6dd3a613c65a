"""The agent: one open kvconn instance of one rank of an engine."""

from __future__ import annotations

import ctypes as c
import json
import os
import select
import weakref
from typing import Any, Iterable, Mapping, Optional, Sequence

from . import _lib, _pack, _structs
from ._moments import _CLOSED, DeviceCalls, number
from .errors import ClosedError, ConfigError, InvalidError, Status, error_for
from .logs import start_logging
from .types import Claim, Completion, Load, Offer, PartialOffer, Region

_NOTHING: tuple[Completion, ...] = ()
# Takes the place of an agent's count after close and in a forked child: get_finished then calls the library, which refuses.
_ASK = c.c_uint32(1)
_NO_BYTES = memoryview(b"")
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for agent in _agents:
        agent._count, agent._written = _ASK, _NO_BYTES


os.register_at_fork(after_in_child=_after_fork_in_child)


class Agent(DeviceCalls):
    """One open kvconn instance.

    ``config`` is a mapping with the keys of docs/configuration.md. ``engine_id``
    and ``role`` ("prefill", "decode" or "both") are required; unknown keys
    raise :class:`~kvconn.ConfigError`. An agent of the role "bootstrap" serves the
    bootstrap port that an engine's ranks join (``bootstrap_join``); it needs no
    ``engine_id`` and registers nothing. The first agent of a process loads the
    library. Methods may be called from any thread; only the constructor,
    :meth:`register_kv_caches`, :meth:`withdraw`, :meth:`wait` and :meth:`close`
    wait.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._handle = 0
        self._written = _NO_BYTES
        self._pid = os.getpid()
        self._lib: Any = _lib.load()
        try:
            text = json.dumps(dict(config))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"the configuration is no JSON object: {e}") from e
        if "\\u0000" in text:
            raise ConfigError("the configuration holds a NUL character")
        self._loads = dict(config).get("role") in ("decode", "both")
        start_logging(self._lib)
        handle = c.c_uint64()
        code = self._lib.open(text.encode(), c.byref(handle))
        if code == Status.INVALID:
            raise ConfigError(self._lib.error_text(), code=code)
        self._check(code)
        self._handle = handle.value
        self._begin_moments(self._lib, handle)
        # Read by get_finished without a call; see kvconn_pending_address.
        self._count = c.c_uint32.from_address(self._lib.pending_address(handle))
        self._event_fd = self._lib.event_fd(handle)
        _agents.add(self)
        # An agent that is forgotten must not write into memory that is freed next.
        self._finalizer = weakref.finalize(self, _close_forgotten, self._lib, handle.value, self._pid)

    def _check(self, code: int, transfer_id: Optional[str] = None) -> None:
        if code:
            raise error_for(code, self._lib.error_text(), transfer_id)

    def register_kv_caches(self, regions: Sequence[Region]) -> None:
        """Gives the agent the engine's paged KV memory, once.

        The memory must stay allocated until :meth:`close` has returned. When the call returns,
        decode engines find a prefill engine's agent.
        """
        regions = list(regions)
        if self._loads:
            for r in regions:
                if r.read_only:
                    raise InvalidError(f"region {r.name!r} of group {r.group} is read-only: a decode engine's caches must be writable")
        rows = (_structs.Region * max(len(regions), 1))()
        for row, r in zip(rows, regions):
            row.struct_size = c.sizeof(_structs.Region)
            row.name = _pack.text(r.name, "region name")
            row.group = number(r.group, "group", 32)
            row.address = number(r.address, "address", 64)
            row.block_stride = number(r.block_stride, "block_stride", 64)
            row.block_bytes = number(r.block_bytes, "block_bytes", 64)
            for field in ("num_blocks", "index_kind", "tokens", "heads", "first_head", "total_heads", "memory"):
                setattr(row, field, number(getattr(r, field), field, 32))
            row.token_stride = number(r.token_stride, "token_stride", 64)
            row.head_stride = number(r.head_stride, "head_stride", 64)
        self._check(self._lib.register(self._handle, rows, len(regions)))
        self._place(regions)
        if address := self._lib.written_address(self._handle):
            self._written = memoryview((c.c_uint8 * len(regions)).from_address(address)).cast("B")

    def announce(self, transfer_ids: Iterable[str]) -> None:
        """Prefill: this engine knows these requests and works on them; decode waits for them.

        With ``report_demands`` each of these transfers gets a completion of kind "demand".
        """
        ids = list(transfer_ids)
        if ids:
            self._batch(self._lib.announce, _pack.Strings(ids), ids)

    def offer(self, offers: Iterable[Offer]) -> None:
        """Prefill: these blocks hold these transfers.

        The blocks must stay unchanged until the completion. The call raises for the first
        offer that is refused, with its ``transfer_id``; the offers before it are accepted.
        """
        offers = list(offers)
        if offers:
            self._batch(self._lib.offer, _pack.Offers(offers), [o.transfer_id for o in offers])

    def offer_partial(self, parts: Iterable[PartialOffer], regions: Optional[Sequence[int]] = None) -> None:
        """Prefill: parts of these transfers are ready, others will follow.

        The blocks that a decode engine has asked for move at once, while this engine computes the
        rest. ``regions`` are indices of :meth:`register_kv_caches` in rising order: the blocks are
        ready in these regions only, in one layer, say. The call announces the transfers too.
        :meth:`offer` must follow with all blocks, or :meth:`withdraw`. Blocks that are ready must
        stay unchanged until the offer's completion, or until :meth:`withdraw` has returned. If a
        transfer has ended meanwhile, this call raises nothing; the completion of the offer says
        how the transfer ended.
        """
        if regions is not None and not len(regions):
            raise InvalidError("regions is empty: to mean all regions, leave it out")
        parts = list(parts)
        if parts:
            of = _pack.uint32s("regions", regions or ())
            self._batch(self._lib.offer_partial, _pack.PartialOffers(parts), [p.transfer_id for p in parts], of.buffer_info()[0], len(of))

    @property
    def written(self) -> memoryview:
        """Prefill: a byte for each region of :meth:`register_kv_caches`, by which a
        step says that it has written the region.

        The engine sets a region's byte to 1 when the blocks that the last :meth:`offer_partial`
        called ``computing`` are ready in this region. This is a plain store, cheap enough for each
        layer. The agent looks at the bytes soon after. The next call of :meth:`offer_partial`,
        :meth:`offer`, :meth:`withdraw` or :meth:`cancel` ends the step, and the agent looks a last
        time. If the system refuses membarrier(2), the view is empty: then call
        :meth:`offer_partial` with ``regions``. Do not use the view after :meth:`close`, nor in a
        forked child.
        """
        return self._written

    def withdraw(self, transfer_ids: Iterable[str], timeout_s: float = 10.0) -> None:
        """Prefill: takes back the blocks that :meth:`offer_partial` gave, of requests that the engine preempts or gives up.

        When the call returns, nothing reads the blocks any more: the call waits for sends that are under
        way. It waits a second or two at most if a peer takes no bytes, and longer while a GPU's driver
        does not answer. If the call raises with :attr:`Status.SYSTEM`, the engine must not use the blocks
        again. When the engine gives the transfer to :meth:`offer_partial` or :meth:`offer` again, decode
        loads it anew. An unknown id is no error. An id that was offered is an error.
        """
        ids = list(transfer_ids)
        if ids:
            rows = _pack.Strings(ids)
            self._check(self._lib.withdraw(self._handle, rows.address, len(ids), number(int(timeout_s * 1000), "timeout_s", 32)))

    def claim(self, claims: Iterable[Claim]) -> None:
        """Decode: this engine will load these transfers as soon as it has blocks.

        Until then the prefill engine keeps them, within ``claim_s``. A claim ends by
        :meth:`start_load` or :meth:`cancel`, without a completion. With ``report_claims``, a claim
        also ends when a load could only fail, because the prefill engine is gone or has ended the
        transfer. Then there is a completion of kind "claim", and a load that follows fails with the
        same reason.
        """
        claims = list(claims)
        if claims:
            self._batch(self._lib.claim, _pack.Claims(claims), [claim.transfer_id for claim in claims])

    def start_load(self, loads: Iterable[Load]) -> None:
        """Decode: loads these transfers, which prefill need not know yet.

        The blocks belong to the transfer until its completion. The call raises for
        the first load that is refused, with its ``transfer_id``; the loads before it
        are accepted.
        """
        loads = list(loads)
        if loads:
            self._batch(self._lib.start_load, _pack.Loads(loads), [ld.transfer_id for ld in loads])

    def cancel(self, transfer_ids: Iterable[str], reason: str = "") -> None:
        """Ends this agent's halves early; each still gets its completion.

        The call also tells the other side. A prefill agent remembers a cancelled id that it does
        not know, and refuses a later load of that transfer.
        """
        ids = list(transfer_ids)
        if ids:
            self._batch(self._lib.cancel, _pack.Strings(ids), ids, _pack.text(reason, "reason"))

    def _batch(self, f: Any, rows: _pack.Rows, ids: Sequence[str], *more: Any) -> None:
        code = f(self._handle, rows.address, len(ids), *more, rows.taken_address)
        if code:
            self._check(code, ids[min(rows.taken, len(ids) - 1)])

    def get_finished(self) -> Sequence[Completion]:
        """The completions since the last call; never waits.

        Each accepted offer and load appears exactly once, cancelled ones too.
        """
        waiting = self._count.value
        if not waiting:
            return _NOTHING
        buffer = _pack.CompletionBuffer(waiting)
        self._check(self._lib.get_finished(self._handle, buffer.address, _pack.COMPLETION, buffer.capacity, buffer.count_address))
        return buffer.completions()

    def _waiting(self) -> int:
        """The number of completions to collect; raises if the agent is closed."""
        n: int = self._lib.pending(self._handle)
        if n < 0:
            raise error_for(-n, self._lib.error_text())
        return n

    def wait(self, timeout_s: float) -> bool:
        """Waits until :meth:`get_finished` has something; False if it has nothing within the time."""
        if self._waiting():
            return True
        poll = select.poll()
        poll.register(self._event_fd, select.POLLIN)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def fileno(self) -> int:
        """A descriptor that is readable while completions wait, for select."""
        if not self._handle:
            raise ClosedError("the agent is closed")
        return self._event_fd

    @property
    def bootstrap_address(self) -> Optional[str]:
        """The ``http://host:port`` that this agent serves or has joined, or None."""
        buf = c.create_string_buffer(512)
        self._check(self._lib.bootstrap_address(self._handle, buf, len(buf)))
        return buf.value.decode() or None

    def stats(self) -> dict[str, Any]:
        """Counters since the agent was opened, and what is under way."""
        size, length = 4096, c.c_size_t()
        while True:
            buf = c.create_string_buffer(size)
            code = self._lib.stats(self._handle, buf, size, c.byref(length))
            if code != Status.BUFFER:
                break
            size = length.value + 1
        self._check(code)
        return json.loads(buf.value)

    def close(self) -> None:
        """Ends every transfer and waits until no byte can land any more.

        Completions that were not collected are lost. Closing twice is fine. If a GPU does not
        answer, the call raises with :attr:`Status.SYSTEM`. Then the library or the GPU may still
        read and write the registered memory, also what lies on the host, and the engine must not
        free or use it again.
        """
        handle, self._handle, self._agent = self._handle, 0, _CLOSED
        self._count, self._written = _ASK, _NO_BYTES
        if handle and self._finalizer.detach() and self._pid == os.getpid():
            self._check(self._lib.close(handle))

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<kvconn.Agent {'open' if self._handle else 'closed'} handle={self._handle:#x}>"


def _close_forgotten(lib: Any, handle: int, pid: int) -> None:
    if pid == os.getpid():
        lib.close(handle)
