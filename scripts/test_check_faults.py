"""check-faults.py knows all fault points of the tree, and sees each in a program."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECK = runpy.run_path(str(HERE / "check-faults.py"))
KNOWN = CHECK["KNOWN"]


def test_knows_the_points() -> None:
    """Those of the mutants' list, and those of other folders and of C."""
    mutants = re.findall(r'^\t\{"([^"]+)",', (HERE.parent / "rig/mutants/list.go").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(mutants) > 100
    assert {*mutants, "local-unfenced", "seal-nonce", "gpu-capture-mode", "KVCONN_FAULT"} <= CHECK["names"](HERE.parent)
    assert CHECK["points"]('if fault.On("a") {} x := fault.Pick[int]("b", 1, 2); fault.On(name); kvg_fault( "c" )') == [
        '"a"',
        '"b"',
        "name",
        '"c"',
    ]


def test_sees_each_in_a_program() -> None:
    names = CHECK["names"](HERE.parent)
    assert CHECK["problems"](b"\0" + KNOWN + b"\0", names) == []
    for name in names:
        (found,) = CHECK["problems"](KNOWN + b"\0x" + name.encode() + b"y", {name})
        assert f"fault point {name} " in found
    assert "cannot be read" in CHECK["problems"](b"something else", names)[0]
