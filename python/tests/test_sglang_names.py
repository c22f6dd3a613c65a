"""The places where SGLang grants something by a transfer backend's name are those of docs/sglang.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

sglang = pytest.importorskip("sglang")

SRT = Path(sglang.__path__[0]) / "srt"
# Each backend's own code, and the encoders', whose backends have names of their own.
OWN = tuple(f"disaggregation/{name}/" for name in ("mooncake", "nixl", "ascend", "mori", "fake", "encoder"))
FIELDS = {"disaggregation_transfer_backend", "transfer_backend"}


def is_backend(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in FIELDS) or (isinstance(node, ast.Name) and node.id in FIELDS)


def compared(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions that compare a backend's name."""
    for node in ast.iter_child_nodes(tree):
        inside = names
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = (*names, node.name)
        if isinstance(node, ast.Compare) and any(is_backend(side) for side in (node.left, *node.comparators)):
            yield ".".join(names)
        yield from compared(node, inside)


def places(root: Path) -> set[tuple[str, str]]:
    found = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(OWN):
            found |= {(name, function) for function in compared(ast.parse(path.read_text(encoding="utf-8")))}
    return found


def test_a_comparison_is_found() -> None:
    tree = ast.parse(
        "class A:\n  def f(self):\n    if x and self.transfer_backend != B.MOONCAKE: pass\ndef g(c): return c.other == 'nixl'\n"
    )
    assert list(compared(tree)) == ["A.f"]


def test_the_page_has_each_place() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "sglang.md"
    if not page.is_file():
        pytest.skip("the page is not here: these tests were copied without it")
    section = page.read_text(encoding="utf-8").split("## What SGLang grants by a name\n")[1].split("\n## ")[0]
    listed = {(name, function) for name, function in re.findall(r"^\| `([\w/.]+\.py)`, `([\w.]+)` \|", section, re.M)}
    assert listed == places(SRT)
