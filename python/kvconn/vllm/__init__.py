"""kvconn's KV connector for vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVConnConnector", "kv_role": "kv_producer"}'

With `"kv_connector_module_path": "kvconn.vllm"` kvconn also serves in the place of another connector, by that one's name:
NixlConnector, NixlPullConnector, NixlPushConnector or MooncakeConnector. The environment variable KVCONN_SERVES does the same
for configurations that cannot be changed.

vLLM is imported when a class is asked for, not when this package is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .names import OTHERS, OWN, register, take_place

if TYPE_CHECKING:
    from .connector import KVConnConnector, MooncakeConnector, NixlConnector, NixlPullConnector, NixlPushConnector

__all__ = ["KVConnConnector", "MooncakeConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == OWN or name in OTHERS:
        from . import connector

        if name != OWN:
            take_place(name)  # MultiConnector looks there for the statistics of a member of this name
        return getattr(connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
