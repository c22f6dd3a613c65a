"""Install, and the two machines, of docs/quickstart-sglang.md, by the page's commands as they stand, with the page's settings.

The settings name a token, which the commands of docs/security.md make.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machines import Machine, Pair, pair_of
from readme import install, the_blocks
from sglang_servers import ON_CPU, Alone, Engines

PAGE = "docs/quickstart-sglang.md"


def settings(where: Path, prefill: Machine, decode: Machine) -> dict[str, str]:
    (secrets,), (exports,) = the_blocks("docs/security.md", "To close it"), the_blocks(PAGE, "Settings")
    prefill.has("bash", "-e", "-c", secrets)
    prefill.has("cp", "-r", "/etc/kvconn", str(where / "copy"))
    decode.has("cp", "-r", str(where / "copy"), "/etc/kvconn")
    return {"KVCONN_SGLANG_CONFIG": decode.has("bash", "-e", "-c", f'{exports}\nprintf %s "$KVCONN_SGLANG_CONFIG"')}


@pytest.fixture(scope="module")
def pair(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    where = tmp_path_factory.mktemp("quickstart")
    options = [*ON_CPU, "--dtype", "float32", "--disaggregation-decode-retraction-backup", "cpu_tensor"]
    env = Engines(sglang_model, where).environment
    with pair_of(PAGE, where, sglang_model, "forked_sglang", options, env, functools.partial(settings, where)) as it:
        yield it


def test_pair_on_two_machines(pair: Pair, alone: Alone) -> None:
    """A prompt goes over the network, and gets a single server's text."""
    body = {"prompt": " ".join(map(str, range(300))), "max_tokens": 16, "temperature": 0}
    answer = pair.ask("http://ROUTER:8000/v1/completions", {**body, "model": "MODEL"})
    assert answer["choices"][0]["text"] == alone.complete(body)
    assert "every client that reaches the bootstrap port can ask" not in pair.prefill.log_since(0)
    assert set(re.findall(r"pair (?:goes over|goes on over|is back on) (\w+)", pair.decode.log_since(0))) == {"tcp"}


def test_install() -> None:
    said = install(PAGE, ".venv-sglang")
    assert re.search(r"^(?:Successfully installed kvconn-|kvconn is already installed)", said, re.M), said
