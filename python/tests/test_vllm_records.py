"""The scheduler side's states: what happens to a request in each of them is what the table says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm_sides import TABLE, Status, decode_params, ids, prefill_params, request

from kvconn.vllm.groups import Group
from kvconn.vllm.records import State
from kvconn.vllm.scheduler import SchedulerSide

BLOCK, TOKENS = 16, 40
WITHOUT_SENSE = {"do_remote_prefill": True}
# How a request comes into each state: its parameters, and what is told of it.
WAYS: dict[State, tuple[Any, list[str]]] = {
    State.ASIDE: (None, ["asked"]),
    State.REFUSED: (WITHOUT_SENSE, ["asked"]),
    State.TO_PREFILL: (prefill_params(), ["asked"]),
    State.ANNOUNCED: (prefill_params(), ["known"]),
    State.OFFERED: (prefill_params(), ["known", "whole"]),
    State.TO_LOAD: (decode_params(), ["asked"]),
    State.CLAIMED: (decode_params(), ["known"]),
    State.LOADING: (decode_params(), ["known", "blocks"]),
    State.FAILING: (WITHOUT_SENSE, ["known", "blocks"]),
    State.SETTLED: (decode_params(), ["known", "blocks", "received"]),
    State.ENDING: (decode_params(), ["known", "blocks", "end"]),
}


def tell(side: SchedulerSide, req: Any, event: str) -> None:
    def ends(status: Status) -> None:
        req.status = status
        side.request_finished(req, ids(3))

    calls: dict[str, Callable[[], Any]] = {
        "asked": lambda: side.matched_tokens(req, 0),
        "known": lambda: side.on_new_request(req),
        "blocks": lambda: side.after_alloc(req, ids(3), TOKENS),
        "local": lambda: side.after_alloc(req, ids(3), 0),
        "whole": lambda: ends(Status.FINISHED_LENGTH_CAPPED),
        "end": lambda: ends(Status.FINISHED_ABORTED),
        "sent": lambda: side.worker_reported({req.request_id}, None),
        "received": lambda: side.worker_reported(None, {req.request_id}),
    }
    calls[event]()


def test_table_has_all_states_and_no_other() -> None:
    assert {State[state] for state in TABLE} == set(State) - {State.GONE} == set(WAYS)
    assert {after for row in TABLE.values() for after in row.values()} <= {"-", *State.__members__}


@pytest.mark.parametrize("event", next(iter(TABLE.values())))
@pytest.mark.parametrize("state", list(WAYS), ids=lambda state: state.name)
def test_table_is_true(state: State, event: str) -> None:
    side, (params, way) = SchedulerSide("kv_both", [Group(0, BLOCK)], partial_offers=True), WAYS[state]
    req = request(TOKENS, dict(params) if params else None)
    for each in way:
        tell(side, req, each)
    record = side._requests[req.request_id]
    assert record.state is state
    tell(side, req, event)
    after = TABLE[state.name][event]
    assert record.state is (state if after == "-" else State[after])
    assert (req.request_id in side._requests) == (record.state is not State.GONE)
    # The counts say the same as the records.
    loads = record.state in (State.LOADING, State.FAILING, State.ENDING)
    assert side.in_flight() == (loads, record.state is State.OFFERED)
    assert side.waits() == any(side.in_flight())
