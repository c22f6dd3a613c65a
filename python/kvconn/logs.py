"""Hands the library's log records to ``logging``, under the name ``kvconn``."""

from __future__ import annotations

import ctypes as c
import json
import logging
import select
import threading
from typing import Any

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_STANDARD = {"level", "time", "logger", "msg"}
_started = False
_lock = threading.Lock()


def start_logging(lib: Any) -> None:
    """Starts, once in a process, the thread that drains the library's ring."""
    global _started
    with _lock:
        if _started:
            return
        _started = True
        fd = lib.log_fd()
        if fd >= 0:
            threading.Thread(target=_drain, args=(lib, fd), name="kvconn-logs", daemon=True).start()


def _drain(lib: Any, fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    buf = c.create_string_buffer(16 << 10)
    while True:
        poll.poll()
        while True:
            n = lib.next_log(buf, len(buf))
            if n < 0:
                return  # this is a forked child
            if n == 0:
                break
            emit(buf.raw[:n])


def emit(raw: bytes) -> None:
    """Logs one record of the library."""
    try:
        r = json.loads(raw)
    except ValueError:
        r = {"level": "warn", "msg": raw.decode("utf-8", "replace")}
    name = f"kvconn.{r['logger']}" if r.get("logger") else "kvconn"
    fields = " ".join(f"{k}={v}" for k, v in r.items() if k not in _STANDARD)
    message = f"{r.get('msg', '')} {fields}".rstrip()
    logging.getLogger(name).log(_LEVELS.get(r.get("level", ""), logging.INFO), "%s", message)
