"""Which calls of the library keep the GIL."""

from __future__ import annotations

import ctypes as c
import os
from pathlib import Path

import pytest

from kvconn import _lib

KEEPS = c.PyDLL(None)._FuncPtr._flags_ & ~c.CDLL(None)._FuncPtr._flags_  # type: ignore[attr-defined]
# These wait for a peer, a device or another thread. All others return at once, those of an engine's step among them.
WAIT = {"open", "register", "alloc", "free", "withdraw", "stats", "bootstrap_address", "close", "main"}

pytestmark = pytest.mark.skipif(not Path(_lib.library_path()).is_file(), reason="NOT RUN: the library is not built, see `make`")


def test_calls_of_a_step_keep_the_gil() -> None:
    """Beside a busy thread of Python, to get the GIL back takes milliseconds: a moment would cost a step as long as a kernel."""
    lib = _lib.Library(os.path.abspath(_lib.library_path()))
    keeps = {name: bool(f._flags_ & KEEPS) for name, f in vars(lib).items() if hasattr(f, "_flags_")}
    assert KEEPS and {name for name, kept in keeps.items() if not kept} == WAIT
    assert all(f._flags_ & KEEPS for f in lib.unconverted)
