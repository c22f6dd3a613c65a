"""The connector's two sides as their tests drive them: requests as vLLM has them, and a stand-in for the agent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum
from typing import Any

import like as vllm
from like import like

from kvconn import Completion, InvalidError
from kvconn.vllm import records
from kvconn.vllm.groups import Group
from kvconn.vllm.metadata import KVConnMetadata
from kvconn.vllm.records import Record, Records, State
from kvconn.vllm.scheduler import SchedulerSide
from kvconn.vllm.worker import WorkerSide

BLOCK = 16
names = (f"r{n}" for n in itertools.count())


def _table() -> dict[str, dict[str, str]]:
    """The states' table in the module's docstring: state, event, state after it."""
    head, *rows = (line.split() for line in (records.__doc__ or "").split("    state ")[1].split("\n\n")[0].splitlines())
    return {state: dict(zip(head, after)) for state, *after in rows}


TABLE = _table()


class WatchedRecords(Records):
    """Compares each change of a request's state with the table."""

    allowed = {(State[state], State[after]) for state, row in TABLE.items() for after in row.values() if after != "-"}

    def move(self, record: Record, state: State) -> None:
        assert (record.state, state) in self.allowed
        super().move(record, state)


class Status(Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_ERROR = 4


def decode_params(transfer_id: str = "t") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": "http://p:8998",
        "remote_engine_id": "engine-p",
    }


def prefill_params(transfer_id: str = "t") -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def request(tokens: int, kv: Any, computed: int | None = None) -> Any:
    return like(
        vllm.REQUEST,
        request_id=next(names),
        kv_transfer_params=kv,
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens if computed is None else computed,
        prompt_token_ids=list(range(tokens)),
        _all_token_ids=list(range(tokens)),
        max_tokens=16,
        status=Status.FINISHED_LENGTH_CAPPED,
    )


def prefill_side(groups: Sequence[Group] = (Group(0, BLOCK),), partial_offers: bool = False) -> SchedulerSide:
    return SchedulerSide("kv_producer", list(groups), "engine-p", {"tp_size": 1}, partial_offers)


def first_step(req: Any, block_ids: list[list[int]], cached: int, scheduled: int) -> Any:
    """As much of vLLM's SchedulerOutput as a request's first step needs."""
    return like(
        vllm.OUTPUT,
        preempted_req_ids=None,
        scheduled_new_reqs=[like(vllm.NEW_REQUEST, req_id=req.request_id, block_ids=block_ids, num_computed_tokens=cached)],
        num_scheduled_tokens={req.request_id: scheduled},
        scheduled_cached_reqs=like(vllm.CACHED_REQUESTS, req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]),
    )


def decode_side(groups: Sequence[Group] = (Group(0, BLOCK),)) -> SchedulerSide:
    return SchedulerSide("kv_consumer", list(groups))


def finish(side: SchedulerSide, req: Any, block_ids: list[list[int]]) -> bool:
    """Whether the blocks are kept; never for the client of a decode engine to hear of."""
    kept, answer = side.request_finished(req, block_ids)
    assert answer is None or not kept or answer["do_remote_prefill"]
    return kept


def ids(count: int, start: int = 100) -> list[list[int]]:
    return [list(range(start, start + count))]


class Refused(RuntimeError):
    def __init__(self, transfer_id: str) -> None:
        super().__init__(f"{transfer_id}: refused")
        self.transfer_id = transfer_id


class Marks:
    """The bytes of regions that are written."""

    def __init__(self, agent: FakeAgent) -> None:
        self._agent = agent

    def __len__(self) -> int:
        return 4

    def __setitem__(self, region: int, value: int) -> None:
        assert value == 1
        self._agent.calls.append(("written", list(self._agent.computing), region))


class FakeAgent:
    streams: dict[int, int] = {}  # how many works each has been given
    on_gpu = 0  # the first region on the engine's GPU
    nameless = False  # refuses batches without saying for which id

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.done: list[Any] = []
        self.refused: set[str] = set()
        self.read: set[str] = set()  # cannot be taken back
        self.malformed: set[str] = set()  # nor these
        self.prompts: list[int] = []  # that are said, of each call
        self.computing: list[str] = []  # that the last call has named
        self.after: dict[str, int] = {}  # by transfer: the moment that was said last
        self.no_moments = False
        self.waits = 0
        self.written = Marks(self)

    def moment(self, region: int, stream: int) -> int:
        """The number of works that the stream has been given, if there is a stand-in for it; else the stream."""
        if self.no_moments:
            raise RuntimeError("4096 moments have not passed")
        assert region == self.on_gpu
        return self.streams.get(stream, stream)

    def written_on(self, regions: tuple[int, ...], stream: int) -> None:
        assert list(regions) == sorted(regions)
        self.calls.append(("written_on", list(self.computing), list(regions), self.moment(self.on_gpu, stream)))

    def _take(self, kind: str, works: Sequence[Any]) -> None:
        if self.nameless and len(works) > 1:
            raise RuntimeError("none of them was looked at")
        for work in works:
            if work.transfer_id in self.refused:
                raise Refused(work.transfer_id)
            self.calls.append((kind, work.transfer_id))
            self.prompts.append(getattr(work, "prompt", 0))
            self.after[work.transfer_id] = getattr(work, "after", 0)

    def announce(self, transfer_ids: Sequence[str]) -> None:
        self.calls += [("announce", each) for each in transfer_ids]

    def offer(self, offers: Sequence[Any]) -> None:
        self._take("offer", offers)

    def offer_partial(self, parts: Any, regions: Any = None) -> None:
        assert regions is None
        if any(part.block_ids[0] for part in parts):
            self._take("offer_partial", parts)
            self.computing = [part.transfer_id for part in parts if part.computing]
        else:
            self.calls.append(("step", [part.transfer_id for part in parts]))
            self.after |= {part.transfer_id: part.after for part in parts}

    def withdraw(self, transfer_ids: Sequence[str], timeout_s: float = 10.0) -> None:
        if set(transfer_ids) & self.malformed:
            raise InvalidError("one of them is no id")
        if set(transfer_ids) & self.read:
            raise RuntimeError("the blocks are still read")
        self.calls += [("withdraw", each) for each in transfer_ids]

    def claim(self, claims: Sequence[Any]) -> None:
        self._take("claim", claims)

    def start_load(self, loads: Sequence[Any]) -> None:
        self._take("load", loads)

    def cancel(self, transfer_ids: Sequence[str], reason: str = "") -> None:
        self.calls += [("cancel", each) for each in transfer_ids]

    def get_finished(self) -> Sequence[Any]:
        done, self.done = self.done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        return False

    def close(self) -> None:
        self.calls.append(("close",))

    def ends(self, transfer_id: str, kind: str, code: int = 0) -> None:
        self.done.append(
            Completion(
                transfer_id=transfer_id,
                kind=kind,
                code=code,
                reason="why" if code else "",
                bytes=64,
                blocks=3,
                segments=1,
                wait_s=0.01,
                transfer_s=0.001,
                transport="tcp",
            )
        )


def worker(by_layers: bool = False, **more: Any) -> tuple[WorkerSide, FakeAgent]:
    agent = FakeAgent()
    return WorkerSide(lambda: agent, 0.001, by_layers, **more), agent


def loading(worker_side: WorkerSide, *transfer_ids: str) -> list[str]:
    scheduler = decode_side()
    reqs = [request(40, decode_params(each)) for each in transfer_ids]
    for number, req in enumerate(reqs):
        scheduler.after_alloc(req, ids(3, 100 * number), 40)
    step(worker_side, scheduler.build_meta(0))
    return [req.request_id for req in reqs]


def offering(worker_side: WorkerSide, *transfer_ids: str) -> list[str]:
    scheduler = prefill_side()
    reqs = [request(40, prefill_params(each)) for each in transfer_ids]
    for req in reqs:
        finish(scheduler, req, ids(3))
    step(worker_side, scheduler.build_meta(0))
    return [req.request_id for req in reqs]


def step(worker_side: WorkerSide, meta: KVConnMetadata, layers: Sequence[str] = ()) -> None:
    worker_side.begin(meta)
    worker_side.load(meta)
    for layer in layers:
        worker_side.layer_written(layer)
    worker_side.step_written()
