"""The names under which vLLM finds kvconn: its own, and those of the connectors in whose place it may serve.

vLLM, routers and charts decide by such a name who may take part in what. See docs/from-nixl.md and docs/from-mooncake.md.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from ..errors import KvconnError

logger = logging.getLogger("kvconn.vllm")

OWN = "KVConnConnector"
PUSH = "NixlPushConnector"  # whose routers join the two requests by their X-Request-Id
NIXL = ("NixlConnector", "NixlPullConnector", PUSH)
MOONCAKE = ("MooncakeConnector",)
OTHERS = (*NIXL, *MOONCAKE)
SERVES = "KVCONN_SERVES"  # names of OTHERS, with commas between: vLLM then gets kvconn under them without kv_connector_module_path

_MODULE = "kvconn.vllm"
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_RAY = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"


def called(name: str) -> str:
    """How messages call the connector."""
    return OWN if name == OWN else f"{OWN} in the place of {name}"


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Puts both names before the reason why the engine does not start: the one that its configuration has, and kvconn's own."""
    try:
        yield
    except KvconnError as error:
        raise type(error)(f"{called(name)}: {error.reason}", code=error.code, transfer_id=error.transfer_id) from error
    except ValueError as error:
        raise ValueError(f"{called(name)}: {error}") from error


def register() -> None:
    """The entry point in the group vllm.general_plugins. vLLM calls it in each of its processes, and again in some.

    vLLM does so also where nobody uses kvconn. There it must cost nothing and break nothing: the register is entered when vLLM
    imports it.
    """
    names = [part.strip() for part in os.environ.get(SERVES, "").split(",") if part.strip()]
    for name in names:
        _known(name)
    if names and SERVES not in os.environ.get(_RAY, "").split(","):  # Ray's workers get no other variable of ours
        os.environ[_RAY] = ",".join(filter(None, [os.environ.get(_RAY), SERVES]))
    if _FACTORY in sys.modules:
        _enter_all(names)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported(_FACTORY, lambda: _enter_all(names)))


def take_place(name: str) -> None:
    """Has vLLM's register give kvconn's class under another connector's name."""
    _known(name)
    _enter(name)


def _known(name: str) -> None:
    if name not in OTHERS:
        raise ValueError(f"{SERVES} names {name!r}: {OWN} serves in the place of {', '.join(OTHERS)}")


def _enter_all(names: Sequence[str]) -> None:
    try:
        _enter(OWN)
    except (AttributeError, ValueError) as error:
        logger.debug("%s is not in vLLM's register: %s", OWN, error)
    for name in names:
        try:
            _enter(name)
        except AttributeError as error:
            raise RuntimeError(f"{called(name)} ({SERVES}): this vLLM has no register of connectors that kvconn knows ({error})") from error


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


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been imported."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self._module, self._then = module, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then(module: Any) -> None:
            run(module)
            self._then()

        spec.loader.exec_module = run_then  # type: ignore[method-assign]
        return spec
