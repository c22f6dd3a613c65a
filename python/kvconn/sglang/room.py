"""One request of SGLang's, and the state in which it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import weights

if TYPE_CHECKING:
    from .rooms import Rooms

# SGLang's KVPoll.
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


class Room:
    """One request, on one side."""

    __slots__ = (
        "__weakref__",
        "again",
        "before",
        "completion",
        "deadline",
        "id",
        "known",
        "moved",
        "number",
        "owed",
        "partial",
        "prefix_pages",
        "prompt",
        "reason",
        "rooms",
        "state",
        "tell_at",
        "token",
        "why",
    )

    def __init__(self, rooms: Rooms, number: Any, prompt: int, again: int) -> None:
        self.rooms = rooms
        self.number = number
        # A request that is prefilled again under its room has another transfer: the first one has ended for good.
        self.id = f"sglang-{number}.{again}" if again else f"sglang-{number}"
        self.again = again
        # Two requests may use one room, and reach prefill and decode in different order. The fingerprint tells them apart:
        # by the room alone, each would get the other's cache.
        self.prompt = prompt
        self.state = self.before = BOOTSTRAPPING  # before: the state that it failed in
        self.tell_at = 0.0  # when the scheduler may hear of the failure
        self.reason: str | None = None  # why the room failed
        self.why: str | None = None  # why this side ends it
        self.owed = ""  # the kind of completion that the agent owes: "demand", "offer", "load"
        # The agent knows the request and owes no completion: it needs a cancel if the request ends before its transfer begins.
        self.known = False
        self.partial = False  # partial offers were made: their pages may be read
        self.moved: Callable[[], None] | None = None  # loads the request from another rank, once the load that is under way has ended
        self.prefix_pages = 0  # pages that the decode engine has already
        self.token = 0  # marks the room's claim: tells it from the claim of an earlier request in the same room
        self.deadline = float("inf")
        self.completion: Any = None

    def mark(self) -> int:
        """The prompt's fingerprint for the agent. Raises TransferError if nobody can know whether another engine has the same
        weights."""
        return weights.engine.of_prompt(self.prompt)

    def fail(self, reason: str) -> None:
        """Takes the first reason: it is the cause of the others."""
        if self.state not in (FAILED, SUCCESS):
            self.before, self.state, self.reason = self.state, FAILED, reason
            self.tell_at = time.monotonic() + self.rooms.tell_s

    def told(self) -> int:
        """The state that the scheduler hears."""
        return self.state if self.state != FAILED or time.monotonic() >= self.tell_at else self.before
