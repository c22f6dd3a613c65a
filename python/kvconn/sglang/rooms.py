"""Gives each room its state of SGLang's, by the agent's completions.

The scheduler polls every room on every step, so a poll reads an attribute. The completions of all rooms are collected at
once, and only if a number in memory says that there are some. Only settle waits. All methods belong to the scheduler's
thread, except those of Inbox.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kvconn import Claim, Completion, KvconnError, Load, Offer, PartialOffer, Status

from .room import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Room

logger = logging.getLogger("kvconn.sglang")

# How long a failure is kept back by the ranks whose schedulers do not answer clients. When one rank fails, all ranks of the
# engine fail the request. The rank that answers needs the reason itself, and may take this long to notice that a peer is
# gone.
TELL_S = 3.0

_WITHDRAW_S = 5.0
_LOOK_S = 1.0  # between looks for rooms that have waited too long


def _end(why: str) -> NoReturn:
    """Ends the scheduler: it would use pages again that are still read, and a wrong text is worse."""
    logger.critical("%s: this engine ends, to send no wrong bytes", why)
    raise SystemExit(f"kvconn: {why}")  # SGLang swallows every Exception


class Holder:
    """The sender or receiver of a room. If the scheduler drops the holder without a call, the agent must forget the
    request."""

    room: Room

    def __del__(self) -> None:
        room = getattr(self, "room", None)
        if room is not None and (room.owed or room.known):
            room.rooms.inbox.put(lambda rooms: rooms.forget(room))


class Inbox:
    """Calls that other threads, and the garbage collector, have for the scheduler's thread."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[Any], None]] = deque()

    def put(self, call: Callable[[Any], None]) -> None:
        self._queue.append(call)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def take(self) -> Callable[[Any], None] | None:
        try:
            return self._queue.popleft()
        except IndexError:
            return None


class NoAgent:
    """The agent of a context parallel rank that has nothing to send: all its transfers end well, at once."""

    def __init__(self) -> None:
        self._done: list[Completion] = []

    def wait(self, timeout_s: float) -> bool:
        return bool(self._done)

    def _report(self, transfer_id: str, kind: str) -> None:
        self._done.append(Completion(transfer_id, kind, 0, "", 0, 0, 0, 0.0, 0.0, ""))

    def announce(self, transfer_ids: Sequence[str]) -> None:
        for transfer_id in transfer_ids:
            self._report(transfer_id, "demand")

    def offer(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            self._report(offer.transfer_id, "offer")

    def offer_partial(self, parts: Sequence[PartialOffer]) -> None:
        return

    def withdraw(self, transfer_ids: Sequence[str], timeout_s: float) -> None:
        return

    def cancel(self, transfer_ids: Sequence[str], reason: str = "") -> None:
        return

    def get_finished(self) -> Sequence[Completion]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        return


class Rooms:
    """The rooms of one rank."""

    def __init__(self, agent: Any, side: str, bootstrap_timeout_s: float, waiting_timeout_s: float, tell_s: float = 0.0) -> None:
        self._agent = agent
        self._get_finished = agent.get_finished
        self.side = side
        self.tell_s = tell_s
        self._bootstrap_timeout_s = bootstrap_timeout_s
        self._waiting_timeout_s = waiting_timeout_s
        self._look_at = time.monotonic() + _LOOK_S
        self.inbox = Inbox()
        self._owing: dict[str, Room] = {}  # bounded by the agent's max_transfers
        self._claims = 0
        self._used: weakref.WeakValueDictionary[int, Room] = weakref.WeakValueDictionary()
        self.failed = 0  # since the start

    def __len__(self) -> int:
        return len(self._used)

    def open(self, number: Any, prompt: int = 0, again: int = 0, why: str = "") -> Room:
        """A room for a new request. prompt is the fingerprint of its prompt; 0: not known. again: how often it was prefilled before.
        why: the reason for which the request cannot be carried.

        A room that cannot be used is in the state FAILED.
        """
        room = Room(self, number, prompt, again)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 63:
            self.fail(room, f"bootstrap_room is {number!r}: a whole number from 0 to 2^63 - 1 was expected")
        elif number in self._used:
            self.fail(room, "the room is in use by another request: each request needs one of its own")
        elif why:
            self.fail(room, why)
        else:
            self._used[number] = room
        return room

    def fail(self, room: Room, reason: str) -> None:
        if room.state not in (FAILED, SUCCESS):
            self.failed += 1
            room.fail(f"{self.side}, room {room.number}: {reason}")

    def _try(self, room: Room, call: Callable[[], Any]) -> bool:
        """Runs a call of the agent; an error of it ends this request only."""
        try:
            call()
        except Exception as error:
            self.fail(room, str(error) or repr(error))
            return False
        return True

    # -- prefill ----------------------------------------------------------------------------------------------------

    def announce(self, room: Room) -> None:
        """Tells the agent of a request. Its prefill begins when the decode engine has pages for it."""
        if room.state == BOOTSTRAPPING and self._try(room, lambda: self._agent.announce([room.id])):
            self._owe(room, "demand", self._bootstrap_timeout_s)

    def offer_partial(self, room: Room, blocks: Sequence[Any], ready: Sequence[int], first: Sequence[int], after: int = 0) -> None:
        """Offers a chunk; more chunks will follow. after: the moment after which the chunk's pages are computed."""
        if room.state == FAILED:
            return
        room.partial = True
        if not self._try(room, lambda: self._agent.offer_partial([PartialOffer(room.id, blocks, ready, first, room.mark(), after=after)])):
            self._let_go(room, room.reason or "")

    def offer(self, room: Room, blocks: Sequence[Any], first: Sequence[int], after: int = 0) -> None:
        if room.state == FAILED:
            return
        if self._try(room, lambda: self._agent.offer([Offer(room.id, blocks, first_block=first, prompt=room.mark(), after=after)])):
            room.state, room.partial = TRANSFERRING, False
            self._owe(room, "offer", float("inf"))
        else:
            self._let_go(room, room.reason or "")

    # -- decode -----------------------------------------------------------------------------------------------------

    def claim(self, room: Room, address: str, engine: str) -> None:
        """Asks the prefill engine to keep the request until this engine has pages for it.

        If the prefill engine cannot keep it any more, the room fails.
        """
        self._claims += 1
        room.token = self._claims
        if room.state == BOOTSTRAPPING and self._try(room, lambda: self._agent.claim([Claim(room.id, address, engine, room.token)])):
            room.state, room.known = WAITING, True

    def load(self, room: Room, address: str, engine: str, blocks: Sequence[Any], first: Sequence[int], after: int = 0) -> None:
        """after: the moment after which the pages may be written."""
        if room.state == FAILED:
            return
        load = functools.partial(Load, room.id, address, engine, blocks, first, after=after)
        if self._try(room, lambda: self._agent.start_load([load(prompt=room.mark())])):
            room.state = TRANSFERRING
            self._owe(room, "load", self._waiting_timeout_s)
        else:
            self._let_go(room, room.reason or "")

    def move(self, room: Room, claim: Callable[[], None], load: Callable[[], None]) -> None:
        """Asks anew: another rank of the prefill engine has the request, and not the one that was asked."""
        if room.known:
            room.known, room.state = False, BOOTSTRAPPING
            self.let_go(room.id, "another data parallel rank has it")
            claim()
        elif room.owed == "load" and room.why is None:
            room.moved = load
            self.let_go(room.id, "another data parallel rank has it")

    # -- both -------------------------------------------------------------------------------------------------------

    def _owe(self, room: Room, what: str, bound_s: float) -> None:
        room.owed, room.known = what, False
        room.deadline = time.monotonic() + bound_s
        self._owing[room.id] = room

    def abort(self, room: Room, why: str) -> None:
        """Ends the room's request. If pages are under way, the room fails only when the agent says that they are free."""
        if room.state in (FAILED, SUCCESS):
            return
        if room.owed in ("offer", "load"):
            if room.why is None:
                room.why = why
                self.let_go(room.id, why)
            return
        self._let_go(room, why)
        self.fail(room, why)

    def _let_go(self, room: Room, why: str) -> None:
        """Has the agent forget a request that has no offer or load under way."""
        if room.owed == "demand" or room.known:
            room.known = False
            self.let_go(room.id, why)
        if room.partial:
            # The scheduler uses the pages again as soon as this returns. The call waits, for some ms, until a write that has
            # begun has ended.
            room.partial = False
            try:
                self._agent.withdraw([room.id], _WITHDRAW_S)
            except KvconnError as error:
                if error.code == Status.SYSTEM:
                    _end(str(error))
                logger.error("transfer %s cannot be withdrawn: %s", room.id, error)

    def settle(self, room: Room) -> None:
        """Waits until nothing of a cancelled offer is read any more.

        There is something to wait for if another rank of this engine has failed. Otherwise the room failed because the
        agent had reported the offer's end.
        """
        bound = time.monotonic() + _WITHDRAW_S
        while room.owed == "offer":
            self.tick()
            if room.owed and time.monotonic() > bound:
                _end(f"the pages of {room.id} are still read after {_WITHDRAW_S:g} s")
            time.sleep(0.0002)

    def let_go(self, transfer_id: str, why: str) -> None:
        try:
            self._agent.cancel([transfer_id], why)
        except Exception as error:  # the transfer ends with its lease
            logger.error("transfer %s cannot be cancelled: %s", transfer_id, error)

    def under_way(self, number: Any) -> bool:
        """Whether bytes may still land in its pages, or be read from them."""
        room = self._used.get(number) if isinstance(number, int) else None
        return room is not None and room.owed in ("offer", "load")

    def forget(self, room: Room) -> None:
        """Ends the record of a room whose request has ended, well or not. If a transfer is under way, its completion ends the record."""
        self.abort(room, "the request has ended")
        if not room.owed and isinstance(room.number, int) and self._used.get(room.number) is room:
            del self._used[room.number]

    def tick(self) -> None:
        """Collects completions, and calls from other threads; takes a few hundred nanoseconds if there are none."""
        completions = self._get_finished()
        if completions:
            for completion in completions:
                self._ended(completion)
        if self.inbox:
            while (call := self.inbox.take()) is not None:
                try:
                    call(self)
                except Exception:
                    logger.exception("a call from another thread has failed")
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now)

    def _ended(self, completion: Any) -> None:
        if completion.kind == "claim":
            self._claim_lost(completion)
            return
        room = self._owing.pop(completion.transfer_id, None)
        if room is None:
            return
        if room.owed != completion.kind:  # the completion is of an earlier part of the request
            self._owing[room.id] = room
            return
        room.owed = ""
        moved, room.moved = room.moved, None
        if moved is not None and completion.code and room.why is None:
            moved()
            return
        if completion.kind != "demand":
            room.completion = completion
        if completion.code:
            self.fail(room, f"{room.why} ({completion.reason})" if room.why else completion.reason)
        elif room.state == FAILED:
            pass
        elif completion.kind == "demand":
            room.state, room.prefix_pages, room.known = WAITING, completion.blocks, True
        elif room.why is not None:
            self.fail(room, room.why)
        else:
            room.state = SUCCESS

    def _claim_lost(self, completion: Any) -> None:
        """A claim came to nothing. If the request was loaded meanwhile, the load has a completion of its own."""
        room = self._used.get(int(completion.transfer_id.removeprefix("sglang-").partition(".")[0]))
        if room is not None and room.id == completion.transfer_id and room.known and room.token == completion.token:
            # The room leaves WAITING even while the failure is kept back. Otherwise some pipeline stages would give it pages,
            # and the stages could not agree on its end.
            room.known, room.state = False, BOOTSTRAPPING
            self.fail(room, completion.reason)

    def _look(self, now: float) -> None:
        self._look_at = now + _LOOK_S
        for room in [room for room in self._owing.values() if room.deadline <= now]:
            room.deadline = float("inf")
            if room.owed == "demand":
                bound = f"{self._bootstrap_timeout_s:g} s (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT)"
                self.abort(room, f"no decode engine has asked for the request within {bound}")
            else:
                bound = f"{self._waiting_timeout_s:g} s (SGLANG_DISAGGREGATION_WAITING_TIMEOUT)"
                self.abort(room, f"the request was not received within {bound}")
