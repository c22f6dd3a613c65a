#!/usr/bin/env python3
"""Writes the tables of docs/caches.md, each from the engine's own table in python/kvconn/ENGINE/kinds.py. Needs no engine."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def table(engine: str) -> list[str]:
    """Loads the module by its file, since the package may need the library."""
    spec = importlib.util.spec_from_file_location(f"{engine}_kinds", ROOT / "python" / "kvconn" / engine / "kinds.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return list(module.table())


def main() -> None:
    page = ROOT / "docs" / "caches.md"
    text = page.read_text(encoding="utf-8")
    for engine in re.findall(r"<!-- (\w+):begin -->", text):
        if not (ROOT / "python" / "kvconn" / engine / "kinds.py").exists():
            continue
        begin, end = f"<!-- {engine}:begin -->\n", f"<!-- {engine}:end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + "\n".join(table(engine)) + "\n" + end + rest.partition(end)[2]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
