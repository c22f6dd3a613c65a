"""kvconn's KV connector for vLLM.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVConnConnector",
        "kv_connector_module_path": "kvconn.vllm", "kv_role": "kv_producer"}'

vLLM is imported when the class is asked for, not when this package is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVConnConnector

__all__ = ["KVConnConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVConnConnector":
        from .connector import KVConnConnector

        return KVConnConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
