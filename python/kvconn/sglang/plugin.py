"""Makes `--disaggregation-transfer-backend kvconn` known to SGLang.

SGLang logs and swallows what a plugin raises, and goes on without the plugin. So this module checks what it has done, and
logs at once that the backend is missing and why.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("kvconn.sglang")

NAME = "kvconn"
_TARGET = "sglang.srt.disaggregation.utils.get_kv_class"
_IDLE = "sglang.srt.managers.scheduler.Scheduler.on_idle"
_STARTS = (
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.decode.DecodePreallocQueue._init_kv_manager",
)
_QUEUES = ("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add", "sglang.srt.disaggregation.decode.DecodePreallocQueue.add")


def register() -> None:
    """The entry point in the group sglang.srt.plugins."""
    _show_logs()
    try:
        _add_choice()
        _add_member()
        _add_classes()
        _check()
    except Exception as error:
        logger.critical("--disaggregation-transfer-backend %s is not available in this SGLang: %r", NAME, error)
        raise


def _show_logs() -> None:
    """Lets our records of level INFO through. SGLang sets up the root logger, in each process, and later than this."""
    logging.getLogger("kvconn").setLevel(logging.INFO)


def _add_choice() -> None:
    try:
        from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    except ImportError:  # in older releases server_args has it
        from sglang.srt.server_args import add_disagg_transfer_backend_choices
    add_disagg_transfer_backend_choices([NAME])


def _add_member() -> None:
    """Adds a member to TransferBackend: it is a closed enumeration, and SGLang looks members up by value."""
    from sglang.srt.disaggregation.utils import TransferBackend

    if NAME in TransferBackend._value2member_map_:
        return
    member = object.__new__(TransferBackend)
    member._name_ = NAME.upper()
    member._value_ = NAME
    member._sort_order_ = len(TransferBackend._member_names_)  # type: ignore[attr-defined]  # from Python 3.11 on
    TransferBackend._member_names_.append(member._name_)
    TransferBackend._member_map_[member._name_] = member
    TransferBackend._value2member_map_[member._value_] = member
    type.__setattr__(TransferBackend, member._name_, member)


def _add_classes() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # SGLang applies the hooks when all plugins have registered theirs. If we applied ours now, another plugin's hook on the
    # same function would be lost.
    HookRegistry.register(_TARGET, _get_kv_class, HookType.AROUND)
    for queue in _QUEUES:
        HookRegistry.register(queue, _coming, HookType.BEFORE)
    for start in _STARTS:
        HookRegistry.register(start, _starting, HookType.BEFORE)
    HookRegistry.register(_IDLE, _idle, HookType.BEFORE)


def _starting(queue: Any, *_: Any, **__: Any) -> None:
    """Runs before SGLang's methods that make a queue's manager: the manager needs to know the queue's pools."""
    if getattr(queue.transfer_backend, "value", None) == NAME:
        from . import start

        start.show(queue)


def _coming(queue: Any, req: Any, *_: Any, **__: Any) -> None:
    """Runs before SGLang's methods that make a sender or receiver for a request."""
    if hasattr(queue.kv_manager, "coming"):
        queue.kv_manager.coming = req


def _idle(scheduler: Any, *_: Any, **__: Any) -> None:
    """Runs before SGLang's method for a step without a batch."""
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None) or getattr(scheduler, "disagg_prefill_bootstrap_queue", None)
    if wait := getattr(getattr(queue, "kv_manager", None), "wait_for_news", None):
        wait()


def _get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
    """Runs around SGLang's function of this name."""
    if getattr(transfer_backend, "value", None) != NAME or class_type.value == "kvargs":
        return original(transfer_backend, class_type)
    from . import conn, server

    return {
        "manager": conn.KVConnManager,
        "sender": conn.KVConnSender,
        "receiver": conn.KVConnReceiver,
        "bootstrap_server": server.KVConnBootstrapServer,
    }[class_type.value]


def _check() -> None:
    """Checks that each part took effect. If the hook is missing later, SGLang says that it has no classes for the backend."""
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins.hook_registry import HookRegistry

    backend = utils.TransferBackend(NAME)
    if backend is not utils.TransferBackend.KVCONN:  # type: ignore[attr-defined]
        raise RuntimeError("TransferBackend has no member of ours")
    if not hasattr(utils, "get_kv_class"):
        raise RuntimeError(f"there is no {_TARGET} to hook")
    if _TARGET not in getattr(HookRegistry, "_hooks", {_TARGET: None}):
        raise RuntimeError(f"the hook on {_TARGET} was not registered")
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:
        from sglang.srt import server_args as choices
    listed = getattr(choices, "DISAGG_TRANSFER_BACKEND_CHOICES", None)
    if listed is not None and NAME not in listed:
        raise RuntimeError(f"the choices of --disaggregation-transfer-backend are {listed}")
