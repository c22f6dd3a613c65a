"""Real SGLang servers whose pipelines have stages, on either side. Each stage has a cache for its own layers: texts must equal the
single server's. A setting that a server knows to be wrong stops its start.

Run with the Python of an environment that has SGLang, kvconn and pytest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sglang_servers import Alone, SGLangPair
from test_sglang_ranks import ONE, STAGES, Up, aborts, pair, texts, up  # noqa: F401  # fixtures


# From one case to the next one of the two servers stays.
@pytest.mark.parametrize(("prefill", "decode"), [(ONE, STAGES), (STAGES, STAGES), (STAGES, ONE)])
def test_stages(pair: SGLangPair, alone: Alone, up: Up, prefill: str, decode: str) -> None:  # noqa: F811
    up(prefill, decode)
    texts(pair, alone, f"{prefill} to {decode}")
    aborts(pair, alone, f"{prefill} to {decode}")
