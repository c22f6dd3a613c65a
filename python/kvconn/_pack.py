"""The arguments and results of calls, as the structs of include/kvconn.h.

This module writes structs as plain numbers into arrays. A ctypes object for each struct, with a descriptor for each field,
would cost an engine's step more than the call itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import sizeof
from struct import Struct
from typing import Any

from . import _structs
from .errors import InvalidError
from .types import Claim, Completion, Load, Offer, PartialOffer

# The fields of kvconn_completion, one after the other: it has no holes.
_COMPLETION = Struct(f"=QiiQQQII8s{_structs.TRANSFER_ID_MAX + 8}s320s")
COMPLETION = sizeof(_structs.Completion)
_KINDS = {1: "load", 2: "offer", 3: "demand", 4: "claim"}  # enum kvconn_side

_OFFER, _LOAD, _PARTIAL_OFFER = sizeof(_structs.OfferRequest), sizeof(_structs.LoadRequest), sizeof(_structs.PartialOffer)


def text(s: str, what: str) -> bytes:
    """A string for C, without the NUL at its end."""
    if not isinstance(s, str):
        raise InvalidError(f"{what} is {s!r}, want str")
    try:
        b = s.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as e:  # half of a surrogate pair, which JSON may hold
        raise InvalidError(f"{what} {s!r}: {e}") from e
    if b"\0" in b:
        raise InvalidError(f"{what} {s!r} holds a NUL character")
    return b


def uint32s(what: str, values: Sequence[int]) -> array[int]:
    if isinstance(values, array) and values.typecode == "I":
        return values
    try:
        return array("I", values)
    except (OverflowError, TypeError) as e:
        raise InvalidError(f"{what}: {e}; want numbers from 0 to 4294967295") from e


# Requests name few engines: each name is turned into a C string once.
_names: dict[str, array[int]] = {}
_NAMES = 1024


class Rows:
    """An array of structs for one call, the memory that they point to, and room for the number that the library takes.

    Two fields of 32 bits side by side in a struct are one number of 64 bits here: every machine that the library is built
    for is little-endian.
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self._keep: list[array[int]] = []  # the memory that the structs point to
        numbers: list[int] = []
        for row in rows:
            self._add(numbers, row)
        numbers.append(0)
        try:
            self._numbers = array("Q", numbers)
        except (OverflowError, TypeError) as e:  # the caller gives only these of the numbers
            raise InvalidError(f"token, prompt or after: {e}; want a number from 0 to 18446744073709551615") from e
        self.address, count = self._numbers.buffer_info()
        self.taken_address = self.address + 8 * (count - 1)

    def _add(self, numbers: list[int], row: Any) -> None:
        raise NotImplementedError

    @property
    def taken(self) -> int:
        return self._numbers[-1]

    def _put(self, data: array[int]) -> int:
        self._keep.append(data)
        return data.buffer_info()[0]

    def _string(self, s: str, what: str) -> int:
        return self._put(array("B", text(s, what) + b"\0"))

    def _name(self, s: str, what: str) -> int:
        data = _names.get(s)
        if data is None:
            data = array("B", text(s, what) + b"\0")
            if len(_names) >= _NAMES:
                _names.clear()
            _names[s] = data
        return self._put(data)

    def _blocks(self, block_ids: Sequence[Sequence[int]], first: Sequence[int]) -> int:
        """The kvconn_blocks of one request."""
        if not block_ids and not first:
            return 0
        if first and len(first) != len(block_ids):
            raise InvalidError(f"first_block has {len(first)} groups, block_ids {len(block_ids)}")
        firsts = uint32s("first_block", first) if first else array("I", bytes(4 * len(block_ids)))
        groups: list[int] = []
        for g, ids in enumerate(block_ids):
            data = uint32s(f"block ids of group {g}", ids)
            groups += (self._put(data), len(data) | firsts[g] << 32)
        return self._put(array("Q", groups))


class Strings(Rows):
    def _add(self, numbers: list[int], row: str) -> None:
        numbers.append(self._string(row, "transfer_id"))


class Offers(Rows):
    def _add(self, numbers: list[int], row: Offer) -> None:
        groups = self._blocks(row.block_ids, row.first_block)
        numbers += (
            _OFFER | len(row.block_ids) << 32,
            self._string(row.transfer_id, "transfer_id"),
            groups,
            row.token,
            row.prompt,
            row.after,
        )


class PartialOffers(Rows):
    def _add(self, numbers: list[int], row: PartialOffer) -> None:
        groups = self._blocks(row.block_ids, row.first_block)
        if len(row.ready) != len(row.block_ids):
            raise InvalidError(f"ready has {len(row.ready)} groups, block_ids {len(row.block_ids)}")
        ready, computing = self._put(uint32s("ready", row.ready)), 0
        if len(row.computing):
            if len(row.computing) != len(row.block_ids):
                raise InvalidError(f"computing has {len(row.computing)} groups, block_ids {len(row.block_ids)}")
            computing = self._put(uint32s("computing", row.computing))
        numbers += (
            _PARTIAL_OFFER | len(row.block_ids) << 32,
            self._string(row.transfer_id, "transfer_id"),
            groups,
            ready,
            row.prompt,
            computing,
            row.after,
        )


class Claims(Rows):
    def _add(self, numbers: list[int], row: Claim) -> None:
        names = self._name(row.bootstrap_addr, "bootstrap_addr"), self._name(row.engine_id, "engine_id")
        numbers += (_LOAD, self._string(row.transfer_id, "transfer_id"), *names, 0, row.token, 0, 0, 0)


class Loads(Rows):
    def _add(self, numbers: list[int], row: Load) -> None:
        block_ids, tokens = row.block_ids, row.tokens
        groups, counts = self._blocks(block_ids, row.first_block), 0
        if len(tokens):
            if len(tokens) != len(block_ids):
                raise InvalidError(f"tokens has {len(tokens)} groups, block_ids {len(block_ids)}")
            counts = self._put(uint32s("tokens", tokens))
        numbers += (
            _LOAD | len(block_ids) << 32,
            self._string(row.transfer_id, "transfer_id"),
            self._name(row.bootstrap_addr, "bootstrap_addr"),
            self._name(row.engine_id, "engine_id"),
            groups,
            row.token,
            counts,
            row.prompt,
            row.after,
        )


class CompletionBuffer:
    """A buffer for the completions of one call, and for their number."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._data = array("B", bytes(8 + capacity * COMPLETION))
        self.count_address = self._data.buffer_info()[0]
        self.address = self.count_address + 8

    def completions(self) -> list[Completion]:
        data = memoryview(self._data)
        count = int.from_bytes(data[:8], "little")
        out = []
        for row in _COMPLETION.iter_unpack(data[8 : 8 + count * COMPLETION]):
            token, code, side, size, wait_ns, transfer_ns, blocks, segments, transport, transfer_id, reason = row
            out.append(
                Completion(
                    transfer_id.rstrip(b"\0").decode("utf-8", "surrogateescape"),
                    _KINDS[side],
                    code,
                    reason.rstrip(b"\0").decode("utf-8", "replace"),
                    size,
                    blocks,
                    segments,
                    wait_ns / 1e9,
                    transfer_ns / 1e9,
                    transport.rstrip(b"\0").decode(),
                    token,
                )
            )
        return out
