"""NIXL's metrics, as vLLM's connector for NIXL has them: names, labels, buckets and meaning. An engine that serves under one of
NIXL's names has them beside kvconn's own, so that dashboards and autoscalers stay.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram

from .stats import KVConnPromMetrics

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0]
# By name: buckets, and the place in a row of KVConnStats' "moved".
_HISTOGRAMS = {
    "xfer_time_seconds": (_SECONDS, 3),
    "post_time_seconds": ([0.001, *_SECONDS], 6),
    "bytes_transferred": ([2**n for n in range(11, 35, 2)], 2),
    "num_descriptors": ([10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000], 5),
}
_COUNTERS = {
    "num_failed_transfers": "Transfers that failed. A request that was given up is none.",
    "num_kv_expired_reqs": "Prefilled requests that no decode engine asked for in time.",
    "num_failed_notifications": "Always 0: what a transfer's end is told by is a part of it.",
    "num_notifications_after_expiry": "Always 0: no byte moves after the prefill engine's blocks are free.",
}
_SIDE = "load"
_GIVEN_UP = ("cancelled", "peer_cancelled", "expired", "agent_closed")


class NixlPromMetrics(KVConnPromMetrics):
    """kvconn's metrics and NIXL's, which counts a transfer where it is posted: on decode."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        made = {
            name: histogram(
                name=f"vllm:nixl_{name}", documentation="As NIXL's, of kvconn's transfers.", buckets=buckets, labelnames=labelnames
            )
            for name, (buckets, _) in _HISTOGRAMS.items()
        }
        made |= {name: counter(name=f"vllm:nixl_{name}", documentation=text, labelnames=labelnames) for name, text in _COUNTERS.items()}
        # Of each engine at once, so that a metric which is 0 can be seen.
        self._nixl = {
            engine: {name: metric.labels(*values) for name, metric in made.items()} for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        metrics = self._nixl[engine_idx]
        for row in transfer_stats_data["moved"]:
            if row[0] == _SIDE:
                for name, (_, place) in _HISTOGRAMS.items():
                    metrics[name].observe(row[place])
        for key, count in transfer_stats_data["failed"].items():
            side, _, reason = key.partition(" ")
            if (side, reason) == ("offer", "expired"):
                metrics["num_kv_expired_reqs"].inc(count)
            elif side == _SIDE and reason not in _GIVEN_UP:
                metrics["num_failed_transfers"].inc(count)
