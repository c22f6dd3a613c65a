"""kvconn carries the KV caches of LLM requests between engines.

An engine opens an :class:`Agent`, gives it its paged KV memory once, and then
offers transfers (prefill) or loads them (decode)::

    import kvconn

    agent = kvconn.Agent({"engine_id": "d0", "role": "decode"})
    agent.register_kv_caches(kvconn.regions_from_tensor("layer.0", cache, block_dim=1))
    agent.start_load([kvconn.Load("xfer-1", "http://prefill:8998", "p0", [[7, 3, 12]])])
    while not (done := agent.get_finished()):
        agent.wait(0.1)

Importing the package loads no native library: the first :class:`Agent` does. So
a process may still fork before it. The vLLM connector is :mod:`kvconn.vllm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The exported names and their modules: loaded at first use, which keeps
# `import kvconn` at about a millisecond.
_EXPORTS = {
    "Agent": "agent",
    "Claim": "types",
    "Completion": "types",
    "IndexKind": "types",
    "PartialOffer": "types",
    "Load": "types",
    "Memory": "types",
    "Offer": "types",
    "Region": "types",
    "alloc": "memory",
    "fingerprint": "prompt",
    "regions_from_tensor": "regions",
    "AddressError": "errors",
    "BufferTooSmallError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "DuplicateError": "errors",
    "ForkedError": "errors",
    "InternalError": "errors",
    "InvalidError": "errors",
    "KvconnError": "errors",
    "NotRegisteredError": "errors",
    "OverloadError": "errors",
    "Status": "errors",
    "TransferError": "errors",
}

__all__ = sorted([*_EXPORTS, "__version__"])

if TYPE_CHECKING:
    from .agent import Agent as Agent
    from .errors import (
        AddressError as AddressError,
    )
    from .errors import (
        BufferTooSmallError as BufferTooSmallError,
    )
    from .errors import (
        ClosedError as ClosedError,
    )
    from .errors import (
        ConfigError as ConfigError,
    )
    from .errors import (
        DuplicateError as DuplicateError,
    )
    from .errors import (
        ForkedError as ForkedError,
    )
    from .errors import (
        InternalError as InternalError,
    )
    from .errors import (
        InvalidError as InvalidError,
    )
    from .errors import (
        KvconnError as KvconnError,
    )
    from .errors import (
        NotRegisteredError as NotRegisteredError,
    )
    from .errors import (
        OverloadError as OverloadError,
    )
    from .errors import (
        Status as Status,
    )
    from .errors import (
        TransferError as TransferError,
    )
    from .memory import alloc as alloc
    from .prompt import fingerprint as fingerprint
    from .regions import regions_from_tensor as regions_from_tensor
    from .types import Claim as Claim
    from .types import Completion as Completion
    from .types import IndexKind as IndexKind
    from .types import Load as Load
    from .types import Memory as Memory
    from .types import Offer as Offer
    from .types import PartialOffer as PartialOffer
    from .types import Region as Region


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
