"""The exceptions, each with a code, a reason and a transfer id."""

from __future__ import annotations

from enum import IntEnum
from typing import Optional


class Status(IntEnum):
    """Results of calls (below 20) and codes of completions; as in kvconn.h."""

    OK = 0
    INVALID = 1
    HANDLE = 2
    CLOSED = 3
    NOT_REGISTERED = 4
    DUPLICATE = 5
    OVERLOAD = 6
    FORKED = 7
    ADDRESS = 8
    BUFFER = 9
    INTERNAL = 10
    SYSTEM = 11
    CANCELLED = 20
    PEER_CANCELLED = 21
    PEER_LOST = 22
    NOT_OFFERED = 23
    EXPIRED = 24
    REFUSED = 25
    UNREACHABLE = 26
    FAILED = 27
    AGENT_CLOSED = 28


class KvconnError(Exception):
    """A call failed.

    ``code`` is a :class:`Status`. ``reason`` names the wrong value and the remedy.
    ``transfer_id`` is set if the call was about one transfer.
    """

    code: int = Status.INTERNAL

    def __init__(self, reason: str, *, code: Optional[int] = None, transfer_id: Optional[str] = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.transfer_id = transfer_id
        if code is not None:
            self.code = code


class InvalidError(KvconnError, ValueError):
    """An argument is wrong."""

    code = Status.INVALID


class ConfigError(InvalidError):
    """A key of the configuration is unknown, of a wrong type or out of range."""


class ClosedError(KvconnError):
    """The agent is closed."""

    code = Status.CLOSED


class NotRegisteredError(KvconnError):
    """A call about transfers came before ``register_kv_caches``."""

    code = Status.NOT_REGISTERED


class DuplicateError(KvconnError):
    """This transfer_id is under way already, or memory is registered already."""

    code = Status.DUPLICATE


class OverloadError(KvconnError):
    """As many transfers as ``max_transfers`` allows are under way, or have finished and were not collected."""

    code = Status.OVERLOAD


class ForkedError(KvconnError):
    """The call came in a forked child, whose parent had loaded the library before the fork."""

    code = Status.FORKED


class AddressError(KvconnError, OSError):
    """A port is in use, or an address cannot be reached."""

    code = Status.ADDRESS


class BufferTooSmallError(KvconnError):
    """A buffer is too small, which is a defect of this package."""

    code = Status.BUFFER


class InternalError(KvconnError):
    """The library has met a defect of its own, and is unusable in this process."""

    code = Status.INTERNAL


class TransferError(KvconnError):
    """A transfer ended badly; its code is 20 or more."""

    code = Status.FAILED


_BY_STATUS = {
    Status.INVALID: InvalidError,
    Status.HANDLE: ClosedError,
    Status.CLOSED: ClosedError,
    Status.NOT_REGISTERED: NotRegisteredError,
    Status.DUPLICATE: DuplicateError,
    Status.OVERLOAD: OverloadError,
    Status.FORKED: ForkedError,
    Status.ADDRESS: AddressError,
    Status.BUFFER: BufferTooSmallError,
    Status.INTERNAL: InternalError,
}


def error_for(code: int, reason: str, transfer_id: Optional[str] = None) -> KvconnError:
    """The exception of a status."""
    if code >= Status.CANCELLED:
        return TransferError(reason, code=code, transfer_id=transfer_id)
    cls = _BY_STATUS.get(code, KvconnError)  # type: ignore[call-overload]
    return cls(reason, code=code, transfer_id=transfer_id)
