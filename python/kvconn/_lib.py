"""The C functions of libkvconn.so (include/kvconn.h), loaded at first use."""

from __future__ import annotations

import ctypes as c
import os
import threading
from pathlib import Path
from typing import Optional

from . import _structs
from .errors import KvconnError

ABI_VERSION = 1


class Library:
    """One loaded libkvconn.so.

    Calls that return at once go through ``PyDLL``, which keeps the GIL. To give the
    GIL up and take it back would cost more than the call. Beside a busy thread it
    would cost milliseconds. Calls that wait go through ``CDLL``. The calls of an engine's step
    take addresses of arrays that :mod:`kvconn._pack` has filled.
    """

    def __init__(self, path: str) -> None:
        waiting, short = c.CDLL(path), c.PyDLL(path)
        size, address = c.c_size_t, c.c_void_p
        out = c.POINTER(size)

        def declare(dll: c.CDLL, name: str, result: type, *args: type) -> object:
            f = getattr(dll, name)
            f.restype, f.argtypes = result, list(args)
            return f

        i32, handle, text = c.c_int32, c.c_uint64, c.c_char_p
        self.abi_version = declare(short, "kvconn_abi_version", c.c_uint32)
        self.version = declare(short, "kvconn_version", c.c_char_p)
        self.status_name = declare(short, "kvconn_status_name", c.c_char_p, i32)
        self.last_error = declare(short, "kvconn_last_error", i32, text, size)
        self.open = declare(waiting, "kvconn_open", i32, text, c.POINTER(handle))
        self.register = declare(waiting, "kvconn_register_kv_caches", i32, handle, c.POINTER(_structs.Region), size)
        self.alloc = declare(waiting, "kvconn_alloc", i32, c.c_uint64, c.POINTER(c.c_void_p))
        self.free = declare(waiting, "kvconn_free", i32, c.c_void_p)
        self.announce = declare(short, "kvconn_announce", i32, handle, address, size, address)
        self.offer = declare(short, "kvconn_offer", i32, handle, address, size, address)
        self.offer_partial = declare(short, "kvconn_offer_partial", i32, handle, address, size, address, size, address)
        self.written_address = declare(short, "kvconn_written_address", c.c_void_p, handle)
        self.moment = declare(short, "kvconn_moment", i32, handle, c.c_uint32, address, address)
        self.written_after = declare(short, "kvconn_written_after", i32, handle, address, size, c.c_uint64)
        self.written_on = declare(short, "kvconn_written_on", i32, handle, address, size, address)
        # The three again, for callers whose arguments are ctypes objects of these types: see kvconn._moments.
        self.unconverted = tuple(short[name] for name in ("kvconn_moment", "kvconn_written_after", "kvconn_written_on"))
        for f in self.unconverted:
            f.restype = i32
        self.withdraw = declare(waiting, "kvconn_withdraw", i32, handle, address, size, c.c_uint32)
        self.claim = declare(short, "kvconn_claim", i32, handle, address, size, address)
        self.start_load = declare(short, "kvconn_start_load", i32, handle, address, size, address)
        self.cancel = declare(short, "kvconn_cancel", i32, handle, address, size, text, address)
        self.pending = declare(short, "kvconn_pending", i32, handle)
        self.pending_address = declare(short, "kvconn_pending_address", c.c_void_p, handle)
        self.get_finished = declare(short, "kvconn_get_finished", i32, handle, address, size, size, address)
        self.event_fd = declare(short, "kvconn_event_fd", i32, handle)
        self.stats = declare(waiting, "kvconn_stats", i32, handle, text, size, out)
        self.bootstrap_address = declare(waiting, "kvconn_bootstrap_address", i32, handle, text, size)
        self.log_fd = declare(short, "kvconn_log_fd", i32)
        self.next_log = declare(short, "kvconn_next_log", i32, text, size)
        self.close = declare(waiting, "kvconn_close", i32, handle)
        self.main = declare(waiting, "kvconn_main", i32, i32, c.POINTER(text))
        if self.abi_version() != ABI_VERSION:  # type: ignore[operator]
            raise KvconnError(f"{path} has ABI version {self.abi_version()}, this package needs {ABI_VERSION}: reinstall kvconn")  # type: ignore[operator]

    def error_text(self) -> str:
        """The text of this thread's last failed call."""
        buf = c.create_string_buffer(1024)
        self.last_error(buf, len(buf))  # type: ignore[operator]
        return buf.value.decode("utf-8", "replace")


_library: Optional[Library] = None
_lock = threading.Lock()


def library_path() -> str:
    """The library of this package; ``KVCONN_LIBRARY`` names another one."""
    return os.environ.get("KVCONN_LIBRARY") or str(Path(__file__).with_name("libkvconn.so"))


def load() -> Library:
    """The library, loaded by the first call."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                path = library_path()
                try:
                    _library = Library(path)
                except OSError as e:
                    raise KvconnError(f"cannot load {path}: {e}; reinstall kvconn, or set KVCONN_LIBRARY") from e
    return _library
