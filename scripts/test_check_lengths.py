"""check-lengths.py names each file above the bound, unless it is longer by right, and only those."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHECK = runpy.run_path(str(Path(__file__).resolve().parent / "check-lengths.py"))


def test_names_what_is_too_long() -> None:
    lengths = {"a/short.go": 400, "a/long.go": 401, "b/long.py": 500, "c/made.go": 900, "c/shrunk.go": 9}
    found = CHECK["problems"](lengths, {"c/made.go": "a tool", "c/shrunk.go": "a tool", "c/gone.go": "a tool"})
    assert [text.split()[0] for text in found] == ["a/long.go", "b/long.py", "c/shrunk.go", "c/gone.go"]


def test_reads_the_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tree that git does not know, as of an archive."""
    for name in CHECK["LONGER"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * 401)
    short, other = tmp_path / "short.py", tmp_path / "list.txt"
    short.write_text("\n" * 400)
    other.write_text("\n" * 1000)
    assert CHECK["main"](tmp_path) == 0
    short.write_text("\n" * 401)
    assert CHECK["main"](tmp_path) == 1
    assert "short.py has 401 lines" in capsys.readouterr().err
