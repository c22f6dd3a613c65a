"""e2e.sh says which of its parts did not run."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ON_DEVICES = ["chaos-gpu", "chaos-gpu-local", "chaos-gpu-slow"]


def run(folder: Path, double: int) -> tuple[int, dict[str, str]]:
    """Runs e2e.sh among commands that do nothing. The build of the driver double ends so. Its status, and what each stage says."""
    scripts = folder / "scripts"
    scripts.mkdir()
    (folder / "build").mkdir()
    for name in ("e2e.sh", "stage.py"):
        shutil.copy(HERE / name, scripts / name)
    does = {"gpu-double.sh": f"exit {double}"}
    for name in ("scripts/gpu-double.sh", "scripts/rdma-test.sh", "scripts/vllm-env.sh", "scripts/sglang-env.sh", "scripts/vllm-e2e.sh",
                 "scripts/sglang-e2e.sh", "build/kvconn-rig"):  # fmt: skip
        path = folder / name
        path.write_text("#!/bin/sh\n" + does.get(path.name, "true") + "\n", encoding="utf-8")
        path.chmod(0o755)
    check = folder / "check"
    check.mkdir()
    done = subprocess.run([scripts / "e2e.sh", "a", "b"], env={**os.environ, "KVCONN_CHECK": str(check)}, capture_output=True, check=False)
    return done.returncode, {log.stem: log.read_text(encoding="utf-8") for log in check.glob("*.log")}


@pytest.mark.parametrize("double", [0, 75, 1])
def test_parts_on_devices(tmp_path: Path, double: int) -> None:
    status, logs = run(tmp_path, double)
    assert status == (1 if double == 1 else 0)
    assert {"chaos", "chaos-local", "rdma-test", "vllm", "sglang", *ON_DEVICES} == set(logs)
    assert [name for name in logs if "NOT RUN" in logs[name]] == [name for name in logs if double and name in ON_DEVICES]


def test_the_digest_tells_it(tmp_path: Path) -> None:
    run(tmp_path, 75)
    digest = runpy.run_path(str(HERE / "digest.py"))
    said = [line for name in ON_DEVICES for line in digest["not_run"](tmp_path / "check", digest["Stage"](name, 0, 0, 0, ""))]
    assert said == [f"NOT RUN {name}: agents with device memory: NOT RUN, since there is no cuda.h" for name in ON_DEVICES]
