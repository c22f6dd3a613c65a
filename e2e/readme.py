"""Runs what the README has below a heading."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from asking import HOST

ROOT = Path(__file__).resolve().parent.parent
BOUND_S = 300  # ends a hang: servers that do not become ready are waited for without end


def as_it_stands(heading: str, environment: str, ports: Sequence[int]) -> str:
    """What the commands print. They are of an environment by this name, and of these ports."""
    if Path(sys.prefix).resolve() != (ROOT / environment).resolve():
        pytest.skip(f"NOT RUN: these tests run in {sys.prefix}, and the README's commands in {environment}")
    for port in ports:
        with socket.socket() as each:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                each.bind((HOST, port))
            except OSError as error:
                pytest.skip(f"NOT RUN: port {port} of the README's commands: {error}")
    command = [sys.executable, "scripts/run-page.py", "README.md", heading, "--within", str(BOUND_S)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S + 60)
    logs = "" if done.returncode == 0 else "".join(_end(Path("/tmp") / f"{name}.log") for name in ("prefill", "decode", "router"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{logs}"
    return done.stdout


def _end(log: Path) -> str:
    return f"\n== {log}\n{log.read_text(errors='replace')[-4000:]}" if log.exists() else ""
