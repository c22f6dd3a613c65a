"""Each kind of cache of the installed SGLang is carried or refused, and docs/caches.md says so; in the environment of `make e2e-sglang`.

python python/tests/test_sglang_kinds.py     writes the tables into docs/caches.md
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvconn
from kvconn.sglang import kinds

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "caches.md"

in_the_tree = pytest.mark.skipif(
    not PAGE.is_file(), reason="the page and the tests that the tables name are not beside the wheel; `make e2e-sglang` runs this"
)


def rendered() -> str:
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- sglang:begin -->\n")
    _, end, after = rest.partition("<!-- sglang:end -->")
    assert begin and end
    return before + begin + "\n".join(kinds.table()) + "\n" + end + after


@in_the_tree
def test_page_has_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == rendered(), "run scripts/caches-page.py"


@in_the_tree
@pytest.mark.parametrize("name", [*kinds.STATES, *kinds.POOLS])
def test_kind_has_a_test_or_a_reason(name: str) -> None:
    kind: Any = {**kinds.STATES, **kinds.POOLS}[name]
    assert bool(kind.test) != bool(kind.refused)
    if kind.test:
        file, _, test = kind.test.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")


if importlib.util.find_spec("sglang") is not None:
    import torch
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.mem_cache import memory_pool
    from sglang_engine import DIM, HEADS, engine, mha, start
    from sglang_engine import PAGE as TOKENS

    def test_states_of_the_installed_engine() -> None:
        assert {each.value for each in StateType} == set(kinds.STATES)

    def test_pools_of_the_installed_engine() -> None:
        """The pools that are carried exist. A subclass is not taken for one of them."""
        from sglang.srt.mem_cache import swa_memory_pool

        for name in kinds.POOLS:
            assert hasattr(memory_pool, name) or hasattr(swa_memory_pool, name)

        class Page(memory_pool.MHATokenToKVPool):
            pass

        with pytest.raises(ValueError, match="in a Page, which this kvconn does not know: it carries MHATokenToKVPool, "):
            start("decode", lambda: Page(64, TOKENS, torch.float32, HEADS, DIM, 2, "cpu", False))

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize("state", list(StateType), ids=lambda each: each.value)
    def test_state_that_is_not_carried_stops_the_start(role: str, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The state is registered as SGLang itself would register it."""
        kind = kinds.STATES[state.value]
        if not kind.refused:
            monkeypatch.delitem(kinds.STATES, state.value)
        buffer = torch.zeros(16, 64)
        add(monkeypatch, state, buffer)
        with pytest.raises(ValueError, match=repr(state.value)) as raised:
            start(role, lambda: mha(0, 2))
        assert (kind.refused or "does not know: it carries ") in str(raised.value)

    def test_state_of_a_later_release_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
        add(monkeypatch, "ring_of_tomorrow", torch.zeros(16, 64))
        with pytest.raises(ValueError, match="'ring_of_tomorrow', which this kvconn does not know"):
            start("prefill", lambda: mha(0, 2))

    def test_pool_that_is_taken_out_of_the_table_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(kinds.POOLS, "MHATokenToKVPool")
        with pytest.raises(ValueError, match="in a MHATokenToKVPool, which this kvconn does not know"):
            start("decode", lambda: mha(0, 2))

    def test_state_of_memory_that_the_pool_does_not_know_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
        add(monkeypatch, StateType.SWA, torch.zeros(16, 64))
        with pytest.raises(ValueError, match="a buffer of 'swa' that no layer of its MHATokenToKVPool has"):
            start("decode", lambda: mha(0, 2))

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda values: values[:-1], "SGLang has not handed over kv of layer 1 of its MLATokenToKVPool"),
            (lambda values: [*values, values[-1]], r'region "layer\.1\.kv" of group 0 is registered twice'),
        ],
    )
    def test_buffers_that_are_not_each_there_once_stop_the_start(
        role: str, change: Any, says: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = memory_pool.MLATokenToKVPool.get_contiguous_buf_infos

        def infos(pool: Any) -> Any:
            return tuple(change(values) for values in given(pool))

        monkeypatch.setattr(memory_pool.MLATokenToKVPool, "get_contiguous_buf_infos", infos)
        with at_port(role) as more, pytest.raises((ValueError, kvconn.InvalidError), match=says):
            start(role, lambda: memory_pool.MLATokenToKVPool(64, TOKENS, torch.float32, 8, 4, 2, "cpu", False), **more)

    @contextlib.contextmanager
    def at_port(role: str) -> Iterator[dict[str, int]]:
        """The settings of a rank that joins a bootstrap port."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        with engine(port):
            yield {"disaggregation_bootstrap_port": port} if role == "prefill" else {}

    def add(monkeypatch: pytest.MonkeyPatch, state: Any, buffer: Any) -> None:
        for module in ("prefill", "decode"):
            place = f"sglang.srt.disaggregation.{module}.setup_state_kv_args"

            def more(args: Any, *rest: Any, original: Any = utils.setup_state_kv_args, **named: Any) -> None:
                original(args, *rest, **named)
                utils.append_state_component(args, state, [buffer.data_ptr()], [buffer.nbytes], [buffer[0].nbytes])

            monkeypatch.setattr(place, more)
