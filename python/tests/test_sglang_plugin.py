"""What SGLang finds of the backend, and what the scheduler may call on it; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import like as sglang
from like import like
from sglang.srt.disaggregation import utils
from sglang.srt.disaggregation.base import conn as base
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

import kvconn
from kvconn.sglang import conn, plugin, server
from kvconn.sglang.allow import RouteError
from kvconn.sglang.rooms import NoAgent, Rooms
from kvconn.sglang.route import Engine

load_plugins()

CLASSES = {
    KVClassType.MANAGER: conn.KVConnManager,
    KVClassType.SENDER: conn.KVConnSender,
    KVClassType.RECEIVER: conn.KVConnReceiver,
    KVClassType.BOOTSTRAP_SERVER: server.KVConnBootstrapServer,
}


def test_found_by_its_entry_point() -> None:
    names = [entry.value for entry in importlib.metadata.entry_points(group="sglang.srt.plugins") if entry.name == "kvconn"]
    assert names == ["kvconn.sglang:register"]


def test_backend_is_known() -> None:
    backend = TransferBackend("kvconn")
    assert backend in list(TransferBackend) and backend.name == "KVCONN"
    for kind, ours in CLASSES.items():
        assert utils.get_kv_class(backend, kind) is ours
    assert utils.get_kv_class(backend, KVClassType.KVARGS) is base.KVArgs
    assert utils.get_kv_class(TransferBackend.FAKE, KVClassType.SENDER).__name__ == "FakeKVSender"
    assert utils.get_kv_class.__wrapped__ is not None
    plugin._check()


def test_request_is_known_before_its_sender_and_receiver() -> None:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    for queue in (DecodePreallocQueue, PrefillBootstrapQueue):
        manager = SimpleNamespace(coming=None)
        request = Req("r", "", array("q", [7, 8]), SamplingParams(), bootstrap_room=3)
        with pytest.raises(Exception):  # noqa: B017  # of SGLang, which finds nothing else of what it needs here
            queue.add(like(sglang.SGLANG_QUEUE, kv_manager=manager), request, 1)
        assert manager.coming is request
        manager.rooms = Rooms(NoAgent(), "", 1, 1)
        assert conn.KVConnManager.open_room(manager, 4).prompt == 0 and manager.coming is None
        manager.coming = request
        assert conn.KVConnManager.open_room(manager, 3).prompt == kvconn.fingerprint([7, 8])


def test_scheduler_without_a_batch_waits_for_news() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    names = ("disagg_decode_prealloc_queue", "disagg_prefill_bootstrap_queue")
    waits: list[str] = []
    for name in names:
        queue = like(sglang.SGLANG_QUEUE, kv_manager=SimpleNamespace(wait_for_news=lambda name=name: waits.append(name)))
        with pytest.raises(AttributeError):  # of SGLang, which finds nothing else of what it needs here
            Scheduler.on_idle(like(sglang.SGLANG_SCHEDULER, **{**dict.fromkeys(names), name: queue}))
        with pytest.raises(AttributeError):  # another backend's manager
            Scheduler.on_idle(
                like(sglang.SGLANG_SCHEDULER, **{**dict.fromkeys(names), name: like(sglang.SGLANG_QUEUE, kv_manager=object())})
            )
    assert waits == list(names)


def test_registered_in_each_process_once() -> None:
    """To register twice in one process changes nothing. An import of SGLang before, as its command does it, changes nothing either."""
    code = (
        "import sglang.launch_server; from sglang.srt.plugins import load_plugins; load_plugins(); load_plugins()\n"
        "from sglang.srt.disaggregation import utils, prefill\n"
        "assert prefill.get_kv_class(utils.TransferBackend.KVCONN, utils.KVClassType.SENDER).__name__ == 'KVConnSender'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_failure_to_register_is_loud(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_add_classes", lambda: (_ for _ in ()).throw(ImportError("no hooks here")))
    with pytest.raises(ImportError):
        plugin.register()
    assert any(record.levelname == "CRITICAL" and "no hooks here" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", list(CLASSES), ids=lambda kind: kind.value)
def test_everything_that_the_scheduler_calls_is_ours(kind: Any) -> None:
    """No call falls through to a base class that expects its own constructor to have run."""
    ours = CLASSES[kind]
    theirs = {
        KVClassType.MANAGER: base.BaseKVManager,
        KVClassType.SENDER: base.BaseKVSender,
        KVClassType.RECEIVER: base.BaseKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: base.BaseKVBootstrapServer,
    }[kind]
    assert issubclass(ours, theirs) and not inspect.isabstract(ours)
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if (name.startswith("_") and name != "__init__") or name == "should_verify_kv_checksum":
            continue
        mine = getattr(ours, name)
        assert mine.__module__.startswith("kvconn."), name
        parameters = inspect.signature(mine).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        missing = [each for each in inspect.signature(method).parameters if each not in parameters]
        assert takes_any or not missing, (name, missing)


def test_words_of_a_prefill_engine() -> None:
    said = {"dp_size": 2, "follow_bootstrap_room": True, "page_size": 16, "kv_cache_dtype": "bfloat16", "attn_tp_size": 4}
    engine = Engine.of(said)
    assert (engine.dp_size, engine.page_size) == (2, 16)
    assert engine.differs(16, "bfloat16", None) is None
    assert "--page-size" in str(engine.differs(1, "bfloat16", None))
    assert "--kv-cache-dtype" in str(engine.differs(16, "float16", None))
    for wrong in ({"dp_size": 0}, {"page_size": "16"}, {"dp_size": True}, []):
        with pytest.raises(RouteError):
            Engine.of(wrong)
