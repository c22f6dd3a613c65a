"""Tests of e2e/environment.py: what is tried again when an environment is made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))

import environment
from environment import EXIT_DOWNLOAD, Steps

# Fails with its first argument's text as often as its second argument says, and counts in the file of its third.
COMMAND = """
import pathlib, sys
text, failures, file = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
tried = len(file.read_text()) if file.exists() else 0
file.write_text("x" * (tried + 1))
print(text)
sys.exit(tried < failures)
"""


@pytest.mark.parametrize(
    ("text", "failures", "tries", "ends"),
    [
        ("Read timed out.", 2, 3, None),
        ("Read timed out.", 9, 3, EXIT_DOWNLOAD),
        ("no space left on device", 9, 1, 1),
        ("ERROR: No matching distribution found for gguf==9 (from versions: 0.1, 0.2)", 9, 1, 1),  # a wrong pin
        ("ERROR: Could not find a version that satisfies the requirement gguf (from versions: none)", 9, 3, EXIT_DOWNLOAD),
    ],
)
def test_a_download_is_tried_again(
    text: str, failures: int, tries: int, ends: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "PAUSE_S", 0.0)
    count = tmp_path / "count"
    argv = [sys.executable, "-c", COMMAND, text, str(failures), str(count)]
    if ends is None:
        Steps(tmp_path).run("a download", argv, tries=3)
    else:
        with pytest.raises(SystemExit) as ended:
            Steps(tmp_path).run("a download", argv, tries=3)
        assert ended.value.code == ends
    assert len(count.read_text()) == tries
