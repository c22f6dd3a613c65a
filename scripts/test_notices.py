"""check-notices.py names what it is for. The notices are put together here, so that this file carries none itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).resolve().parent / "check-notices.py"
C = "Copy" + "right"
SPDX = "SPDX-" + "License-Identifier"


def check(root: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    (root / "ours.go").write_text("package ours // by " + "us\n")
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return subprocess.run([sys.executable, str(CHECK), str(root)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "text",
    [
        f"/* {SPDX}: MIT */\n",
        f"# SPDX-FileCopy{'rightText'}: {C} contributors to the vLLM project\n",
        f"// {C} 2009 The Go Authors.\n",
        f" * {C} ({'c'}) 2005 Topspin Communications.\n",
        f"{C} The Prometheus Authors\n",
        f" * This software is available to you under a choice. All {'rights'} reserved.\n",
        f"# Permission is\n# hereby {'granted'}, free of charge\n",
        f"// Redistribution and use\n// in {'source'} and binary forms\n",
        f"# Licensed {'under'} the Apache License, Version 2.0\n",
        f"# From vLLM, examples/proxy.py, {'unchanged'} below this line\n",
        f"// adapted {'from'} https://example.org/a.go\n",
    ],
)
def test_another_projects_notice_is_named(tmp_path: Path, text: str) -> None:
    found = check(tmp_path, "deep/down/file.h", f"first\n{text}")
    assert found.returncode == 1
    assert "deep/down/file.h:2" in found.stderr
    assert "ours.go" not in found.stderr


@pytest.mark.parametrize(
    "name, text",
    [
        ("kvconn.h", f" * {C} the kvconn authors. {SPDX}: Apache-2.0\n"),
        ("README.md", "Apache-2.0, see [LICENSE](LICENSE). The copyright of a model is its own.\n"),
        ("LICENSE", f"Licensed {'under'} the Apache License\n"),
        ("ignored/file.h", f"/* {SPDX}: MIT */\n"),
    ],
)
def test_our_own_passes(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / ".gitignore").write_text("/ignored/\n")
    found = check(tmp_path, name, text)
    assert (found.returncode, found.stderr) == (0, "")
