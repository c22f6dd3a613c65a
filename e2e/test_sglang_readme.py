"""The README's pair of SGLang, by its commands as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme import as_it_stands


def test_pair_of_sglang_by_hand() -> None:
    said = as_it_stands("A pair of SGLang by hand", ".venv-sglang", (8000, 8998, 30000, 30001))
    assert said.count('"text":') == 1 and '"error"' not in said, said
