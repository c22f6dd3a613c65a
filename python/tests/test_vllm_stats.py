"""The connector's statistics through vLLM's own classes, alone and inside a MultiConnector."""

from __future__ import annotations

import functools
import importlib.util
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import msgspec
from like import VLLM_CONFIG, like
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

import kvconn
from kvconn.vllm.connector import KVConnConnector, NixlConnector, NixlPullConnector, NixlPushConnector
from kvconn.vllm.stats import KVConnStats, Recorder


def completion(kind: str = "load", **more: Any) -> Any:
    told = {"kind": kind, "transport": "tcp", "bytes": 4096, "transfer_s": 0.002, "wait_s": 0.5, "segments": 3, **more}
    return kvconn.Completion(**{"transfer_id": "t", "code": 0, "reason": "", "blocks": 1, **told})


def told() -> KVConnStats:
    recorder = Recorder("worker")
    recorder.moved(completion())
    recorder.moved(completion("offer", bytes=100, transport="rdma"))
    recorder.failed("load", "peer_lost")
    recorder.failed("offer", "expired")
    recorder.failed("offer", "expired")
    recorder.step(30e-6)
    stats = recorder.take(2, 5, {"failed_load": [1, 100]})
    assert stats is not None and recorder.take(2, 5) is None
    return stats


def over_the_wire(stats: KVConnStats) -> dict[str, Any]:
    """Sends statistics as vLLM does, from the engine's process to the front end's."""
    stats = pickle.loads(pickle.dumps(stats))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))


def test_nothing_is_told_when_nothing_is_new() -> None:
    recorder = Recorder("worker")
    assert recorder.take() is None
    recorder.step(1e-5)
    assert recorder.take() is not None  # the first second is long over
    recorder.step(1e-5)
    assert recorder.take() is None
    assert recorder.take(1, 0).data["in_flight"] == [1, 0]
    assert recorder.take(1, 0) is None
    assert recorder.take(0, 0).data["in_flight"] == [0, 0]


def test_two_workers_and_the_scheduler_add_up() -> None:
    stats = told().aggregate(told())
    scheduler = Recorder("scheduler")
    scheduler.step(10e-6)
    stats = stats.aggregate(scheduler.take(7, 1))
    assert len(stats.data["moved"]) == 4
    assert stats.data["failed"] == {"load peer_lost": 2, "offer expired": 4}
    assert stats.data["in_flight"] == [7, 1]
    assert stats.data["computed"] == {"failed_load": [2, 200]}
    assert stats.data["steps"] == {"worker": [30e-6, 30e-6], "scheduler": [10e-6]}
    again = KVConnConnector.build_kv_connector_stats(over_the_wire(stats))
    assert again.data == stats.data
    stats.reset()
    assert stats.is_empty()


def test_line_of_the_log() -> None:
    line = told().reduce()
    assert (line["loads"], line["loads failed"], line["loads: MB/s"]) == (1, 1, 2.0)
    assert (line["offers"], line["offers failed"], line["step median us"]) == (1, 2, 30.0)
    assert KVConnStats().reduce() == {}
    logging = KVConnectorLogging(None)
    logging.connector_cls = KVConnConnector
    lines: list[str] = []
    logging.observe(over_the_wire(told()))
    logging.observe(over_the_wire(told()))
    logging.log(lambda text, *values: lines.append(text % values))
    assert "loads=2" in lines[0] and "offers failed=4" in lines[0] and "tokens computed here=200" in lines[0]


ONE = {"kv_connector": "KVConnConnector", "kv_connector_module_path": "kvconn.vllm", "kv_role": "kv_consumer"}


@pytest.mark.parametrize("multi", [False, True], ids=["alone", "in a MultiConnector"])
def test_metrics(multi: bool) -> None:
    registry = CollectorRegistry()

    class Prom(KVConnectorProm):
        _gauge_cls = functools.partial(Gauge, registry=registry)
        _counter_cls = functools.partial(Counter, registry=registry)
        _histogram_cls = functools.partial(Histogram, registry=registry)

    transfer = KVTransferConfig(**ONE)
    if multi:
        transfer = KVTransferConfig(
            kv_connector="MultiConnector", kv_role="kv_consumer", kv_connector_extra_config={"connectors": [ONE, ONE]}
        )
    prom = Prom(like(VLLM_CONFIG, kv_transfer_config=transfer), ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:kvconn_{name}", {"model_name": "m", "engine": "1", **labels})

    assert value("expired_offers_total") == 0
    stats = told()
    if multi:
        together = MultiKVConnectorStats()
        together["KVConnConnector"] = stats
        rebuilt = MultiConnector.build_kv_connector_stats(msgspec.msgpack.decode(msgspec.msgpack.encode(together.to_dict())))
        assert rebuilt.aggregate(MultiKVConnectorStats(data={"KVConnConnector": told()})).reduce()["KVConnConnector"]["loads"] == 2
        prom.observe({"KVConnConnector": over_the_wire(stats)}, 1)
    else:
        prom.observe(over_the_wire(stats), 1)
    by = {"side": "load", "transport": "tcp"}
    assert (value("transfers_total", **by), value("bytes_total", **by)) == (1, 4096)
    assert value("transfer_time_seconds_sum", **by) == 0.002
    assert value("wait_time_seconds_sum", **by) == 0.5
    assert value("descriptors_sum", **by) == 3
    assert value("bytes_total", side="offer", transport="rdma") == 100
    assert value("failed_transfers_total", side="load", reason="peer_lost") == 1
    assert value("expired_offers_total") == 2
    assert (value("transfers_in_flight", side="load"), value("transfers_in_flight", side="offer")) == (2, 5)
    assert value("step_time_seconds_count", part="worker") == 1
    assert (value("computed_prompts_total", reason="failed_load"), value("computed_tokens_total", reason="failed_load")) == (1, 100)
    assert value("computed_tokens_total", reason="no_transfer") == 0
    assert registry.get_sample_value("vllm:kvconn_expired_offers_total", {"model_name": "m", "engine": "0"}) == 0


def described(build: Any) -> tuple[dict[str, tuple[Any, ...]], Any]:
    """The names, labels and buckets of what build makes, and the registry that has it."""
    registry, found = CollectorRegistry(), {}

    def kind(cls: Any) -> Any:
        def make(**given: Any) -> Any:
            found[given["name"]] = (cls, tuple(given["labelnames"]), tuple(given.get("buckets", ())))
            return cls(**{key: value for key, value in given.items() if key != "multiprocess_mode"}, registry=registry)

        return make

    kinds = {each: kind(each) for each in (Gauge, Counter, Histogram)}
    config = like(VLLM_CONFIG, kv_transfer_config=None)
    return found, (build(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}), registry)


def test_nixls_metrics_are_those_of_vllms_connector() -> None:
    nixl = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats")
    theirs, _ = described(nixl.NixlPromMetrics)
    ours, _ = described(NixlConnector.build_prom_metrics)
    assert {name: ours.get(name) for name in theirs} == theirs
    own, _ = described(KVConnConnector.build_prom_metrics)  # beside a real NIXL in a MultiConnector the names must be free
    assert not own.keys() & theirs.keys() and ours.keys() == own.keys() | theirs.keys()


@pytest.mark.parametrize("connector", [NixlConnector, NixlPullConnector, NixlPushConnector])
def test_nixls_metrics(connector: Any) -> None:
    _, (prom, registry) = described(connector.build_prom_metrics)
    recorder = Recorder("worker")
    recorder.moved(completion(), 0.0004)
    recorder.moved(completion("offer", bytes=100, transport="rdma"))
    for side, reason in (
        ("load", "peer_lost"),
        ("load", "cancelled"),
        ("offer", "expired"),
        ("offer", "expired"),
        ("offer", "unreachable"),
    ):
        recorder.failed(side, reason)
    prom.observe(over_the_wire(recorder.take(0, 0)), 1)

    def value(name: str, engine: str = "1") -> float | None:
        return registry.get_sample_value(f"vllm:nixl_{name}", {"model_name": "m", "engine": engine})

    assert (value("bytes_transferred_sum"), value("bytes_transferred_count")) == (4096, 1)
    assert (value("post_time_seconds_sum"), value("post_time_seconds_count")) == (0.0004, 1)
    assert (value("xfer_time_seconds_sum"), value("num_descriptors_sum")) == (0.002, 3)
    assert (value("num_failed_transfers_total"), value("num_kv_expired_reqs_total")) == (1, 2)
    for name in ("num_failed_transfers_total", "num_failed_notifications_total", "num_notifications_after_expiry_total"):
        assert value(name, "0") == 0


def test_dashboard_asks_for_metrics_that_there_are() -> None:
    dashboard = Path(__file__).parents[2] / "docs" / "grafana-vllm.json"
    if not dashboard.exists():
        pytest.skip("the tests run without the repository")
    registry = CollectorRegistry()
    kinds = {kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    prom = KVConnConnector.build_prom_metrics(
        like(VLLM_CONFIG, kv_transfer_config=None), kinds, ["model_name", "engine", "instance"], {0: ["m", "0", "i"]}
    )
    prom.observe(told().data, 0)
    there = {sample.name for family in registry.collect() for sample in family.samples}
    asked = [target["expr"] for panel in json.loads(dashboard.read_text())["panels"] for target in panel["targets"]]
    names = {name for expr in asked for name in re.findall(r"vllm:\w+", expr)}
    assert len(asked) >= 10 and names <= there
    # And every metric is in a panel.
    shown = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in names}
    assert {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in there} == shown
