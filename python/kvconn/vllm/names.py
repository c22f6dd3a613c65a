"""The names under which vLLM finds kvconn: its own, and those of the connectors in whose place it may serve.

vLLM, routers and charts decide by such a name who may take part in what. See docs/from-nixl.md and docs/from-mooncake.md.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("kvconn.vllm")

OWN = "KVConnConnector"
NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
MOONCAKE = ("MooncakeConnector",)
OTHERS = (*NIXL, *MOONCAKE)
SERVES = "KVCONN_SERVES"  # names of OTHERS, with commas between: vLLM then gets kvconn under them without kv_connector_module_path

_MODULE = "kvconn.vllm"


def called(name: str) -> str:
    """How messages call the connector."""
    return OWN if name == OWN else f"{OWN} in the place of {name}"


def register() -> None:
    """The entry point in the group vllm.general_plugins. vLLM calls it in each of its processes, and again in some."""
    names = [part.strip() for part in os.environ.get(SERVES, "").split(",") if part.strip()]
    try:
        _enter(OWN)
    except (ImportError, AttributeError) as error:
        # vLLM calls this also where nobody uses kvconn: such a vLLM must start.
        if names:
            raise RuntimeError(f"{SERVES}: this vLLM has no register of connectors that kvconn knows ({error})") from error
        logger.debug("%s is not in vLLM's register: %s", OWN, error)
        return
    for name in names:
        take_place(name)


def take_place(name: str) -> None:
    """Has vLLM's register give kvconn's class under another connector's name."""
    if name not in OTHERS:
        raise ValueError(f"{SERVES} names {name!r}: kvconn serves in the place of {', '.join(OTHERS)}")
    _enter(name)


def _enter(name: str) -> None:
    """Enters kvconn's class into vLLM's register, in which MultiConnector also finds a member's statistics.

    The register refuses a name that it has. So the entry of vLLM itself goes first; that of anybody else is left, and refused.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register = KVConnectorFactory._registry
    if name in register:
        module = _module_of(register[name])
        if module.partition(".")[0] == "kvconn":
            return
        if not module.startswith("vllm."):
            raise ValueError(f"{called(name)}: vLLM's register has {name} from {module or 'somebody else'} already; take one away")
        del register[name]
    KVConnectorFactory.register_connector(name, _MODULE, name)


def _module_of(loader: object) -> str:
    """The module that an entry of the register loads: it is a variable of the function that vLLM keeps."""
    variables = getattr(getattr(loader, "__code__", None), "co_freevars", ())
    cells = getattr(loader, "__closure__", None) or ()
    return str(dict(zip(variables, (cell.cell_contents for cell in cells))).get("module_path", ""))
