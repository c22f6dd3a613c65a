"""The README's pair of vLLM, by its commands as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme import as_it_stands


def test_pair_of_vllm_by_hand() -> None:
    said = as_it_stands("A pair of vLLM by hand", ".venv-vllm", (8000, 8100, 8200, 8998))
    (load,) = [line for line in said.splitlines() if "kvconn load {" in line]  # of the second request, which goes through the router
    assert '"transport": "local"' in load and '"bytes": ' in load
    assert said.count('"text":') == 2 and '"error"' not in said, said
