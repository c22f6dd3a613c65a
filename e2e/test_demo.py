"""What the demo says of the transports that its transfers went by. No engine is started."""

from __future__ import annotations

import pytest
from asking import Answer
from demo import went_by

LOG = (
    "(EngineCore pid=7) INFO 11-23 09:41:01 [logs.py:54] pair goes over local peer=P engine_id=p side=load transport=local\n"
    "(EngineCore pid=7) INFO 11-23 09:41:02 [logs.py:54] pair goes on over tcp: local: prefill agent P: connection lost: "
    "the peer's process has ended peer=P engine_id=p side=load transport=tcp\n"
)


@pytest.mark.parametrize(
    ("asked", "loads", "says", "right"),
    [
        ("auto", ["local", "local"], "transfers went by local: 2", True),
        ("local", ["local"], "transfers went by local: 1", True),
        ("tcp", ["tcp", "tcp"], "transfers went by tcp: 2", True),
        ("rdma,tcp", ["tcp"], "transfers went by tcp: 1", True),
        ("auto", ["local", "tcp"], "NOT BY LOCAL: transfers went by local: 1, tcp: 1, though both servers are on this host", True),
        ("auto", ["tcp"], "(decode says: local: prefill agent P: connection lost: the peer's process has ended)", True),
        ("local", ["tcp"], "NOT BY LOCAL: transfers went by tcp: 1", False),
        ("auto", [], "there were none", False),
    ],
)
def test_demo_is_by_local(asked: str, loads: list[str], says: str, right: bool) -> None:
    rows = [(Answer(), Answer(), {"transport": by}) for by in loads]
    text, may = went_by([*rows, (Answer(), Answer(), {})], asked, LOG)
    assert says in text
    assert may == right


def test_demo_without_a_reason() -> None:
    assert "decode's log has no reason" in went_by([(Answer(), Answer(), {"transport": "tcp"})], "auto", "")[0]
