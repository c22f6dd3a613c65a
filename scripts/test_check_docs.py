"""check-docs.py finds each kind of mistake, and none in pages that are right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("check-docs.py")
README = "# Read me\n\n[words](ARCHITECTURE.md#words), [a page](docs/page.md), [the license](LICENSE)\n"
ARCHITECTURE = "# Architecture\n\n## Words\n\n| word | meaning |\n|---|---|\n| offer, load | halves |\n\n## The map\n"
PAGE = "# A page\n\n`make demo` calls `kvconn_open`; `room/code.go` has `Open` in `room/code.go`.\n\n| `room/` | `code.go` | x |\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "README.md": README,
        "ARCHITECTURE.md": ARCHITECTURE,
        "LICENSE": "",
        "docs/page.md": PAGE,
        "mkdocs.yml": "nav:\n  - README.md\n  - ARCHITECTURE.md\n  - docs/page.md\n",
        "Makefile": "demo:\n",
        "include/kvconn.h": "int kvconn_open(void);\n",
        "room/code.go": "func Open() {}\n",
        "scripts/check-docs.py": SCRIPT.read_text(encoding="utf-8"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def check(tree: Path, *args: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(tree / "scripts/check-docs.py"), *args], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_right_pages_are_copied_with_what_they_link_to(tree: Path) -> None:
    assert check(tree, "--copy", str(tree / "copy")) == (0, "")
    copied = sorted(str(path.relative_to(tree / "copy")) for path in (tree / "copy").rglob("*") if path.is_file())
    assert copied == ["ARCHITECTURE.md", "LICENSE", "README.md", "docs/page.md"]


@pytest.mark.parametrize(
    ("file", "more", "said"),
    [
        ("docs/page.md", "[x](nowhere.md)", "leads to no file"),
        ("docs/page.md", "[x](../ARCHITECTURE.md#nothing)", "leads to no heading"),
        ("docs/page.md", "[x](../../outside.md)", "leads to no file"),
        ("docs/page.md", "`room/nothing.go`", "there is no room/nothing.go"),
        ("docs/page.md", "| `room/` | `nothing.go` | x |", "there is no nothing.go in room"),
        ("docs/page.md", "`Close` in `room/code.go`", "there is no Close in room/code.go"),
        ("docs/page.md", "`make nothing`", "there is no target make nothing"),
        ("docs/page.md", "`kvconn_nothing`", "no source has the name kvconn_nothing"),
        ("docs/lonely.md", "# Lonely", "no way leads from README.md to docs/lonely.md"),
        ("docs/lonely.md", "# Lonely", "mkdocs.yml has no place for docs/lonely.md"),
    ],
)
def test_a_mistake_is_named(tree: Path, file: str, more: str, said: str) -> None:
    with (tree / file).open("a", encoding="utf-8") as page:
        page.write(f"\n{more}\n")
    code, text = check(tree)
    assert code == 1
    assert said in text


def test_no_word_stands_twice_in_the_glossary(tree: Path) -> None:
    (tree / "ARCHITECTURE.md").write_text(ARCHITECTURE.replace("| offer, load", "| load | again |\n| offer, load"), encoding="utf-8")
    code, text = check(tree)
    assert code == 1
    assert "the glossary has 'load' twice" in text
