"""Runs what the README has below a heading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BOUND_S = 600  # ends a hang: servers that do not become ready are waited for without end


def as_it_stands(heading: str, environment: str) -> str:
    """What the commands print. Their ports must be free, and the environment that they name must be there."""
    if not (ROOT / environment / "bin" / "activate").exists():
        pytest.skip(f"these tests run in another environment than the README's {environment}")
    command = [sys.executable, "scripts/run-page.py", "README.md", heading, "--within", str(BOUND_S)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S + 60)
    logs = "" if done.returncode == 0 else "".join(_end(Path("/tmp") / f"{name}.log") for name in ("prefill", "decode", "router"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    return done.stdout


def _end(log: Path) -> str:
    return f"\n== {log}\n{log.read_text(errors='replace')[-4000:]}" if log.exists() else ""
