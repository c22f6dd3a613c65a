"""The agent: one open kvconn instance of one rank of an engine."""

from __future__ import annotations

import ctypes as c
import json
import os
import select
import weakref
from array import array
from typing import Any, Iterable, Mapping, Optional, Sequence

from . import _lib
from .errors import ClosedError, ConfigError, InvalidError, Status, error_for
from .logs import start_logging
from .types import Claim, Completion, Load, Offer, Region

_NOTHING: tuple[Completion, ...] = ()
_BATCH = 64
_KINDS = ("", "load", "offer", "want")
# Stands in for an agent's count when the library must be asked, and will refuse.
_ASK = c.c_uint32(1)
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for agent in _agents:
        agent._count = _ASK


os.register_at_fork(after_in_child=_after_fork_in_child)


class Agent:
    """One open kvconn instance.

    ``config`` is a mapping with the keys of the README's table; ``engine_id``
    and ``role`` ("prefill", "decode" or "both") are required, unknown keys
    raise :class:`~kvconn.ConfigError`. One of the role "bootstrap" serves the
    bootstrap port that an engine's ranks join (``bootstrap_join``), needs no
    ``engine_id``, and registers nothing. The first agent of a process loads the
    library. Methods may be called from any thread; only the constructor,
    :meth:`register_kv_caches`, :meth:`wait` and :meth:`close` wait.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._handle = 0
        self._pid = os.getpid()
        self._lib: Any = _lib.load()
        try:
            text = json.dumps(dict(config))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"the configuration is no JSON object: {e}") from e
        if "\\u0000" in text:
            raise ConfigError("the configuration holds a NUL character")
        start_logging(self._lib)
        handle = c.c_uint64()
        code = self._lib.open(text.encode(), c.byref(handle))
        if code == Status.INVALID:
            raise ConfigError(self._lib.error_text(), code=code)
        self._check(code)
        self._handle = handle.value
        # Read by get_finished without a call; see kvconn_pending_address.
        self._count = c.c_uint32.from_address(self._lib.pending_address(handle))
        self._buffer = (_lib.CCompletion * _BATCH)()
        self._event_fd = self._lib.event_fd(handle)
        _agents.add(self)
        # An agent that is forgotten must not write into memory that is freed next.
        self._finalizer = weakref.finalize(self, _close_forgotten, self._lib, handle.value, self._pid)

    def _check(self, code: int, transfer_id: Optional[str] = None) -> None:
        if code:
            raise error_for(code, self._lib.error_text(), transfer_id)

    def register_kv_caches(self, regions: Sequence[Region]) -> None:
        """Gives the agent the engine's paged KV memory, once.

        The memory must stay allocated until :meth:`close` has returned. On a
        prefill engine the agent is findable afterwards.
        """
        regions = list(regions)
        rows = (_lib.CRegion * max(len(regions), 1))()
        for row, r in zip(rows, regions):
            row.struct_size = c.sizeof(_lib.CRegion)
            row.name = _text(r.name, "region name")
            row.group = _number(r.group, "group", 32)
            row.address = _number(r.address, "address", 64)
            row.block_stride = _number(r.block_stride, "block_stride", 64)
            row.block_bytes = _number(r.block_bytes, "block_bytes", 64)
            for field in ("num_blocks", "tokens", "heads", "first_head", "total_heads"):
                setattr(row, field, _number(getattr(r, field), field, 32))
            row.token_stride = _number(r.token_stride, "token_stride", 64)
            row.head_stride = _number(r.head_stride, "head_stride", 64)
        self._check(self._lib.register(self._handle, rows, len(regions)))

    def announce(self, transfer_ids: Iterable[str]) -> None:
        """Prefill: these requests are known and worked on; decode waits for them.

        With ``report_wants`` each gets a completion of kind "want".
        """
        ids = list(transfer_ids)
        if ids:
            self._batch(self._lib.announce, _strings(ids), ids)

    def offer(self, offers: Iterable[Offer]) -> None:
        """Prefill: these blocks hold these transfers.

        They must stay unchanged until the completion. Raises for the first
        that is refused, with its ``transfer_id``; those before it are accepted.
        """
        offers = list(offers)
        if not offers:
            return
        rows, keep = (_lib.COffer * len(offers))(), []
        for row, o in zip(rows, offers):
            row.struct_size = c.sizeof(_lib.COffer)
            row.transfer_id = _text(o.transfer_id, "transfer_id")
            row.token = o.token
            row.groups, row.num_groups = _groups(o.block_ids, o.first_block, keep)
        self._batch(self._lib.offer, rows, [o.transfer_id for o in offers])

    def claim(self, claims: Iterable[Claim]) -> None:
        """Decode: these transfers will be loaded as soon as there are blocks.

        Until then the prefill engine keeps them, however long it takes. A claim
        has no completion; it ends by :meth:`start_load` or :meth:`cancel`.
        """
        claims = list(claims)
        if not claims:
            return
        rows = (_lib.CLoad * len(claims))()
        for row, claim in zip(rows, claims):
            row.struct_size = c.sizeof(_lib.CLoad)
            row.transfer_id = _text(claim.transfer_id, "transfer_id")
            row.bootstrap_addr = _text(claim.bootstrap_addr, "bootstrap_addr")
            row.engine_id = _text(claim.engine_id, "engine_id")
        self._batch(self._lib.claim, rows, [claim.transfer_id for claim in claims])

    def start_load(self, loads: Iterable[Load]) -> None:
        """Decode: loads these transfers, which prefill need not know yet.

        The blocks belong to the transfer until its completion. Raises for the
        first that is refused, with its ``transfer_id``; those before it are
        accepted.
        """
        loads = list(loads)
        if not loads:
            return
        rows, keep = (_lib.CLoad * len(loads))(), []
        for row, ld in zip(rows, loads):
            row.struct_size = c.sizeof(_lib.CLoad)
            row.transfer_id = _text(ld.transfer_id, "transfer_id")
            row.bootstrap_addr = _text(ld.bootstrap_addr, "bootstrap_addr")
            row.engine_id = _text(ld.engine_id, "engine_id")
            row.token = ld.token
            row.groups, row.num_groups = _groups(ld.block_ids, ld.first_block, keep)
            if len(ld.tokens):
                row.tokens = _tokens(ld.tokens, row.num_groups, keep)
        self._batch(self._lib.start_load, rows, [ld.transfer_id for ld in loads])

    def cancel(self, transfer_ids: Iterable[str], reason: str = "") -> None:
        """Ends this agent's halves early; each still gets its completion.

        The other side is told. An id that is not known here is remembered on
        the prefill side: a load of it that arrives later is refused.
        """
        ids = list(transfer_ids)
        if not ids:
            return
        rows, taken = _strings(ids), c.c_size_t()
        code = self._lib.cancel(self._handle, rows, len(ids), _text(reason, "reason"), c.byref(taken))
        self._check(code, ids[min(taken.value, len(ids) - 1)])

    def _batch(self, f: Any, rows: Any, ids: Sequence[str]) -> None:
        taken = c.c_size_t()
        code = f(self._handle, rows, len(ids), c.byref(taken))
        if code:
            self._check(code, ids[min(taken.value, len(ids) - 1)])

    def get_finished(self) -> Sequence[Completion]:
        """The completions since the last call; never waits.

        Each accepted offer and load appears exactly once, cancelled ones too.
        """
        if not self._count.value:
            return _NOTHING
        self._waiting()
        out: list[Completion] = []
        count = c.c_size_t()
        while True:
            self._check(self._lib.get_finished(self._handle, self._buffer, c.sizeof(_lib.CCompletion), _BATCH, c.byref(count)))
            out.extend(map(_completion, self._buffer[: count.value]))
            if count.value < _BATCH:
                return out

    def _waiting(self) -> int:
        """The number of completions to collect; raises if the agent is closed."""
        n: int = self._lib.pending(self._handle)
        if n < 0:
            raise error_for(-n, self._lib.error_text())
        return n

    def wait(self, timeout_s: float) -> bool:
        """Waits until :meth:`get_finished` has something; False after the time."""
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

        Completions that were not collected are lost. Closing twice is fine.
        """
        handle, self._handle = self._handle, 0
        self._count = _ASK
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


def _completion(r: Any) -> Completion:
    return Completion(
        transfer_id=r.transfer_id.decode("utf-8", "surrogateescape"),
        kind=_KINDS[r.side],
        code=r.code,
        reason=r.reason.decode("utf-8", "replace"),
        bytes=r.bytes,
        blocks=r.blocks,
        segments=r.segments,
        wait_s=r.wait_ns / 1e9,
        transfer_s=r.transfer_ns / 1e9,
        transport=r.transport.decode(),
        token=r.token,
    )


def _text(s: str, what: str) -> bytes:
    if not isinstance(s, str):
        raise InvalidError(f"{what} is {s!r}, want str")
    b = s.encode("utf-8", "surrogateescape")
    if b"\0" in b:
        raise InvalidError(f"{what} {s!r} holds a NUL character")
    return b


def _number(n: int, what: str, bits: int) -> int:
    n = n.__index__()
    if not 0 <= n < 1 << bits:
        raise InvalidError(f"{what} is {n}, want 0 to {(1 << bits) - 1}")
    return n


def _strings(ids: Sequence[str]) -> Any:
    return (c.c_char_p * len(ids))(*[_text(i, "transfer_id") for i in ids])


def _groups(block_ids: Sequence[Sequence[int]], first: Sequence[int], keep: list[Any]) -> tuple[Any, int]:
    """The kvconn_blocks of one request; what they point to is put into keep."""
    if first and len(first) != len(block_ids):
        raise InvalidError(f"first_block has {len(first)} groups, block_ids {len(block_ids)}")
    groups = (_lib.CBlocks * max(len(block_ids), 1))()
    for g, ids in enumerate(block_ids):
        try:
            data = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
        except (OverflowError, TypeError) as e:
            raise InvalidError(f"block ids of group {g}: {e}; want numbers from 0 to 4294967295") from e
        groups[g].ids, groups[g].count = data.buffer_info()
        groups[g].first = _number(first[g], "first_block", 32) if first else 0
        keep.append(data)
    keep.append(groups)
    return groups, len(block_ids)


def _tokens(tokens: Sequence[int], groups: int, keep: list[Any]) -> int:
    """The address of the tokens of a request's groups, which are put into keep."""
    if len(tokens) != groups:
        raise InvalidError(f"tokens has {len(tokens)} groups, block_ids {groups}")
    data = array("I", [_number(n, "tokens", 32) for n in tokens])
    keep.append(data)
    return data.buffer_info()[0]
