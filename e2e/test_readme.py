"""The README's first command, and its pair of vLLM, as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from readme import ROOT, alone, as_it_stands


def test_first_command() -> None:
    """It says of each transfer what a newcomer looks for: the time under way, the wait and the hand-over."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.search(r"^## Two commands\n+```\n([^#\n]+?) *#", page, re.M)
    assert first, "the README has no first command"
    said = alone(first[1], ".venv-vllm")
    texts = re.search(r"^all (\d+) texts equal the single engine's", said, re.M)
    assert texts, said
    for figure in (
        r"[\d.]+ ms under way, +[\d.]+ GB/s",
        r"the other [\d.]+ ms it waited for the prefill",
        r"hand-over [\d.]+ ms, from prefill's first token to decode's",
    ):
        assert len(re.findall(figure, said)) >= int(texts[1]), (figure, said)


def test_pair_of_vllm_by_hand() -> None:
    said = as_it_stands("A pair of vLLM by hand", ".venv-vllm", (8000, 8100, 8200, 8998))
    (load,) = [line for line in said.splitlines() if "kvconn load {" in line]  # of the second request, which goes through the router
    assert '"transport": "local"' in load and '"bytes": ' in load
    assert said.count('"text":') == 2 and '"error"' not in said, said
