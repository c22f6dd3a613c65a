"""Real engines on the CPU whose caches are device memory of the CUDA driver double: what a test needs.

The engines run with a preload (rig/testdouble/preload/): a large allocation of theirs has a second address, at which only the
double can read and write. kvconn gets that address and no other. device_engine.py is the engine's side.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILT = Path(os.environ.get("KVCONN_GPU_DOUBLE") or Path(__file__).resolve().parents[1] / "build" / "gpu-double")
DOUBLE, PRELOAD = BUILT / "libkvgpu-double.so", BUILT / "libkvgpu-engine.so"
FAULTS = "KVCONN_E2E_FAULTS"  # names the file of Faults

NOT_BUILT = "" if DOUBLE.is_file() and PRELOAD.is_file() else f"NOT RUN: {BUILT} has no driver double, see `make gpu-double`"


def environment(faults: Faults | None = None) -> dict[str, str]:
    """Of an engine's process from its start: the library reads KVCONN_LIBCUDA there."""
    preload = [str(PRELOAD), *filter(None, [os.environ.get("LD_PRELOAD")])]
    made = {"LD_PRELOAD": ":".join(preload), "KVCONN_LIBCUDA": str(DOUBLE), "KVGPU_ENGINE_LEAST": str(1 << 20), "KVGPU_ABORT": "1"}
    return made if faults is None else {**made, FAULTS: str(faults.path)}


class Faults:
    """What the engines' side does wrong, told while they run. An engine looks at the beginning of each step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("[]")

    @contextmanager
    def of(self, *names: str) -> Iterator[None]:
        self._write(list(names))
        try:
            yield
        finally:
            self._write([])

    def _write(self, names: list[str]) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(names))
        new.replace(self.path)
