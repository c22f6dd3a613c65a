"""The connector's statistics. With each step vLLM sends them to its front end, which puts them into its log and
/metrics.

Statistics travel as plain lists and numbers, since vLLM sends them to another process. Each worker counts its part of the
transfers; the scheduler counts how many are under way.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as _metrics

from ..errors import Status
from .computed import REASONS

# A worker tells the times of its steps with other news, or once a second: to tell each time at once would cost more than the step.
_EVERY_S = 1.0
# It tells the times of so many steps at most: of the first ones since the last news.
_STEPS = 512

_SIDES = ("load", "offer")


def _empty() -> dict[str, Any]:
    return {"moved": [], "failed": {}, "in_flight": [], "steps": {}, "computed": {}}


class KVConnStats(_metrics.KVConnectorStats):
    """The statistics of an interval.

    moved: [side, transport, bytes, seconds, wait, descriptors, posted] of each transfer that ended well; posted are the seconds that
    the engine spent on handing a load over.
    failed: how many transfers ended badly, by "side reason".
    in_flight: [loads, offers].
    steps: the seconds of each step, by part of the connector.
    computed: [prompts, tokens] that this engine computed though the pair's other engine was to, by reason (computed.py).
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = _empty()
        if data:
            self.data.update(data)

    def reset(self) -> None:
        self.data = _empty()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: Any) -> KVConnStats:
        theirs = other.data
        self.data["moved"].extend(theirs["moved"])
        for key, count in theirs["failed"].items():
            self.data["failed"][key] = self.data["failed"].get(key, 0) + count
        self.data["in_flight"] = theirs["in_flight"] or self.data["in_flight"]
        for part, steps in theirs["steps"].items():
            self.data["steps"].setdefault(part, []).extend(steps)
        for reason, counts in theirs["computed"].items():
            before = self.data["computed"].get(reason, (0, 0))
            self.data["computed"][reason] = [mine + more for mine, more in zip(before, counts)]
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of vLLM's log. It leaves out a side without transfers."""
        out: dict[str, int | float] = {}
        for side in _SIDES:
            rows = [row for row in self.data["moved"] if row[0] == side]
            failed = sum(count for key, count in self.data["failed"].items() if key.startswith(side + " "))
            if not rows and not failed:
                continue
            seconds, size = sum(row[3] for row in rows), sum(row[2] for row in rows)
            out[f"{side}s"] = len(rows)
            out[f"{side}s failed"] = failed
            if rows:
                out[f"{side}s: MB"] = round(size / 1e6, 3)
                out[f"{side}s: avg ms"] = round(seconds / len(rows) * 1e3, 3)
                out[f"{side}s: MB/s"] = round(size / 1e6 / seconds, 1) if seconds > 0 else 0.0
                out[f"{side}s: avg wait ms"] = round(sum(row[4] for row in rows) / len(rows) * 1e3, 3)
                out[f"{side}s: avg descriptors"] = round(sum(row[5] for row in rows) / len(rows), 1)
        if computed := self.data["computed"].values():
            out["prompts computed here"] = sum(prompts for prompts, _ in computed)
            out["tokens computed here"] = sum(tokens for _, tokens in computed)
        steps = sorted(second for part in self.data["steps"].values() for second in part)
        if steps:
            out["step median us"] = round(steps[len(steps) // 2] * 1e6, 1)
        return out


class Recorder:
    """Collects the statistics of one side of the connector until vLLM asks for them."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._stats = KVConnStats()
        self._steps: list[float] = []
        self._in_flight = [0, 0]
        self._told = 0.0

    def moved(self, completion: Any, posted_s: float = 0.0) -> None:
        self._stats.data["moved"].append(
            [
                completion.kind,
                completion.transport or "none",
                completion.bytes,
                completion.transfer_s,
                completion.wait_s,
                completion.segments,
                posted_s,
            ]
        )

    def failed(self, side: str, reason: str) -> None:
        failed = self._stats.data["failed"]
        failed[f"{side} {reason}"] = failed.get(f"{side} {reason}", 0) + 1

    def step(self, seconds: float) -> None:
        if len(self._steps) < _STEPS:
            self._steps.append(seconds)

    def take(self, loads: int = 0, offers: int = 0, computed: dict[str, list[int]] | None = None) -> KVConnStats | None:
        """The statistics since the last call; None if there is nothing new, which is nearly always."""
        in_flight, now, stats = [loads, offers], time.monotonic(), self._stats
        if in_flight != self._in_flight:
            self._in_flight = stats.data["in_flight"] = in_flight
        if computed:
            stats.data["computed"] = computed
        if stats.is_empty() and not (self._steps and now - self._told >= _EVERY_S):
            return None
        if self._steps:
            stats.data["steps"] = {self._part: self._steps}
        self._stats, self._steps, self._told = KVConnStats(), [], now
        return stats


def reason_of(failure: Any) -> str:
    """The reason of a completion or an error, in one word."""
    try:
        return Status(failure.code).name.lower()
    except (AttributeError, ValueError):
        return "other"


class KVConnPromMetrics(_metrics.KVConnectorPromMetrics):
    """The statistics on /metrics, with vLLM's own labels and ours."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        moved, seconds = [*labelnames, "side", "transport"], [1e-4 * 4**n for n in range(10)]
        self._transfers = counter(
            name="vllm:kvconn_transfers",
            documentation="Transfers that ended well; side is load (decode) or offer (prefill).",
            labelnames=moved,
        )
        self._bytes = counter(name="vllm:kvconn_bytes", documentation="Bytes of KV cache that were moved.", labelnames=moved)
        self._seconds = histogram(
            name="vllm:kvconn_transfer_time_seconds",
            documentation="How long bytes of a transfer were under way.",
            buckets=seconds,
            labelnames=moved,
        )
        self._wait = histogram(
            name="vllm:kvconn_wait_time_seconds",
            documentation="The rest of a load's time: the wait for the prefill engine. Of an offer: until the sending begins.",
            buckets=[*seconds, 1e-4 * 4**10],
            labelnames=moved,
        )
        self._descriptors = histogram(
            name="vllm:kvconn_descriptors",
            documentation="Contiguous runs of memory in a transfer.",
            buckets=[4**n for n in range(9)],
            labelnames=moved,
        )
        self._failed = counter(
            name="vllm:kvconn_failed_transfers",
            documentation="Transfers that ended badly, by reason.",
            labelnames=[*labelnames, "side", "reason"],
        )
        self._expired = counter(
            name="vllm:kvconn_expired_offers",
            documentation="Prefilled requests that no decode engine asked for in time.",
            labelnames=labelnames,
        )
        self._computed_prompts = counter(
            name="vllm:kvconn_computed_prompts",
            documentation="Prompts that this engine computed though the other engine of the pair was to compute or to load them.",
            labelnames=[*labelnames, "reason"],
        )
        self._computed_tokens = counter(
            name="vllm:kvconn_computed_tokens",
            documentation="The tokens of these prompts that were computed.",
            labelnames=[*labelnames, "reason"],
        )
        self._in_flight = gauge(
            name="vllm:kvconn_transfers_in_flight",
            documentation="Requests whose transfer is under way.",
            labelnames=[*labelnames, "side"],
            multiprocess_mode="mostrecent",
        )
        self._steps = histogram(
            name="vllm:kvconn_step_time_seconds",
            documentation="The connector's own work on one engine step, in a worker and in the scheduler.",
            buckets=[5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1],
            labelnames=[*labelnames, "part"],
        )
        for labels in per_engine_labelvalues.values():  # so that a counter which is 0 can be seen
            self._expired.labels(*labels)
            for reason in REASONS:
                self._computed_prompts.labels(*labels, reason)
                self._computed_tokens.labels(*labels, reason)
            for side in _SIDES:
                self._in_flight.labels(*labels, side).set(0)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for side, transport, size, seconds, wait, descriptors, _ in transfer_stats_data["moved"]:
            mine = (*labels, side, transport)
            self._transfers.labels(*mine).inc()
            self._bytes.labels(*mine).inc(size)
            self._seconds.labels(*mine).observe(seconds)
            self._wait.labels(*mine).observe(wait)
            self._descriptors.labels(*mine).observe(descriptors)
        for key, count in transfer_stats_data["failed"].items():
            side, _, reason = key.partition(" ")
            self._failed.labels(*labels, side, reason).inc(count)
            if side == "offer" and reason == "expired":
                self._expired.labels(*labels).inc(count)
        for reason, (prompts, tokens) in transfer_stats_data["computed"].items():
            self._computed_prompts.labels(*labels, reason).inc(prompts)
            self._computed_tokens.labels(*labels, reason).inc(tokens)
        for side, count in zip(_SIDES, transfer_stats_data["in_flight"]):
            self._in_flight.labels(*labels, side).set(count)
        for part, steps in transfer_stats_data["steps"].items():
            child = self._steps.labels(*labels, part)
            for second in steps:
                child.observe(second)
