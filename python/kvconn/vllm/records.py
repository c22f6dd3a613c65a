"""The scheduler side's records: one per request, each in one State.

The columns of this table are what vLLM or a worker tells of a request:

    known     on_new_request
    blocks    after_alloc, with tokens that are to be loaded
    local     after_alloc, without such tokens
    whole     request_finished, with the whole prompt computed
    end       request_finished otherwise
    sent      worker_reported, as sent
    received  worker_reported, as received

    state       known      blocks     local      whole    end     sent  received
    ASIDE       -          -          -          GONE     GONE    -     -
    REFUSED     -          FAILING    SETTLED    GONE     GONE    -     -
    TO_PREFILL  ANNOUNCED  ANNOUNCED  ANNOUNCED  OFFERED  GONE    -     -
    ANNOUNCED   -          -          -          OFFERED  GONE    -     -
    OFFERED     -          -          -          -        -       GONE  -
    TO_LOAD     CLAIMED    LOADING    SETTLED    GONE     GONE    -     -
    CLAIMED     -          LOADING    SETTLED    GONE     GONE    -     -
    LOADING     -          -          -          ENDING   ENDING  -     SETTLED
    FAILING     -          -          -          ENDING   ENDING  -     SETTLED
    SETTLED     -          -          -          GONE     GONE    -     -
    ENDING      -          -          -          -        -       -     GONE

"-" leaves the state as it is. A record that is GONE is forgotten.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from .partial import Partial


class State(IntEnum):
    """How far a request has come; the table above has the transitions."""

    ASIDE = 0  # takes no part: it asks for no transfer, or another request has its transfer
    REFUSED = 1  # its kv_transfer_params cannot be used
    TO_PREFILL = 2  # prefill: nothing has been said of it yet
    ANNOUNCED = 3  # prefill: its prompt waits or is being computed
    OFFERED = 4  # prefill: it has ended, and vLLM keeps its blocks until the worker reports it as sent
    TO_LOAD = 5  # decode: nothing has been said of it yet
    CLAIMED = 6  # decode: it waits for blocks
    LOADING = 7  # decode: the worker loads its cache, and will report it as received
    FAILING = 8  # decode: its cache cannot be loaded, and the worker will report that
    SETTLED = 9  # decode: nothing is owed, whatever was loaded
    ENDING = 10  # decode: it has ended, and vLLM keeps its blocks until the worker reports it as received
    GONE = 11  # forgotten


# An attribute of an enumeration costs a step more than a name of a module does.
ASIDE, REFUSED, TO_PREFILL, ANNOUNCED, OFFERED, TO_LOAD, CLAIMED, LOADING, FAILING, SETTLED, ENDING, GONE = State

# By state: whether the worker has still to report the request as received.
_LOADS = [state in (LOADING, FAILING, ENDING) for state in State]


class Record:
    """What the scheduler side knows of one request."""

    __slots__ = ("cut", "failed", "loaded", "params", "partial", "preempted", "prompt", "req_id", "short", "sibling", "state", "tokens")

    def __init__(self, req_id: str, params: Any, state: State, tokens: int = 0, sibling: bool = False) -> None:
        self.req_id = req_id
        self.params = params  # PrefillParams, DecodeParams, Refused; None: ASIDE
        self.state = state
        self.tokens = tokens  # of the prompt that the request came with
        self.sibling = sibling  # another sample of the same request has its transfer
        self.short = False  # decode: what is missing of its prompt is computed, since it is so little
        self.failed = False  # decode: its load has failed
        self.loaded = False  # decode: its load has ended well
        self.preempted = False  # since it was last in a step
        self.cut = False  # prefill: the prompt ends one token early
        self.prompt = 0  # prefill: the fingerprint of the prompt that the request came with
        self.partial: Partial | None = None  # prefill: what of the prompt is offered while it is computed


class Records(dict[str, Record]):
    """All records, by request id, with the numbers that a step asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = 0  # requests that no worker has reported as received yet
        self.offers = 0  # requests that no worker has reported as sent yet

    def add(self, record: Record) -> None:
        self[record.req_id] = record

    def move(self, record: Record, state: State) -> None:
        before, record.state = record.state, state
        self.loads += _LOADS[state] - _LOADS[before]
        self.offers += (state is OFFERED) - (before is OFFERED)

    def forget(self, record: Record) -> None:
        self.move(record, GONE)
        del self[record.req_id]
