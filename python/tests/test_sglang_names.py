"""The places where SGLang grants something by a transfer backend's name are those of docs/sglang.md."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import sglang
from sglang.srt.server_args import ServerArgs

from kvconn.sglang import params

SRT = Path(sglang.__path__[0]) / "srt"
# Each backend's own code, and the encoders', whose backends have names of their own.
OWN = tuple(f"disaggregation/{name}/" for name in ("mooncake", "nixl", "ascend", "mori", "fake", "encoder"))
FIELDS = {"disaggregation_transfer_backend", "transfer_backend"}


def is_backend(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr in FIELDS) or (isinstance(node, ast.Name) and node.id in FIELDS)


def named(node: ast.expr) -> set[str]:
    """The backends that an expression names."""
    texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    members = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "TransferBackend"]
    return texts | {each.attr.lower() for each in members}


def compared(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[str, set[str]]]:
    """The functions that compare a backend's name, and with what."""
    for node in ast.iter_child_nodes(tree):
        inside = names
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inside = (*names, node.name)
        if isinstance(node, ast.Compare) and any(is_backend(side) for side in (node.left, *node.comparators)):
            yield ".".join(names), set().union(*map(named, (node.left, *node.comparators)))
        yield from compared(node, inside)


def places(root: Path) -> dict[tuple[str, str], set[str]]:
    """By file and function: the backends that are named there."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(OWN):
            for function, backends in compared(ast.parse(path.read_text(encoding="utf-8"))):
                found.setdefault((name, function), set()).update(backends)
    return found


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], tuple[str, str]]:
    """The page's table: to whom what is granted, and what becomes of it with kvconn."""
    page = Path(__file__).resolve().parents[2] / "docs" / "sglang.md"
    if not page.is_file():
        pytest.skip("the page is not here: these tests were copied without it")
    section = page.read_text(encoding="utf-8").split("## What SGLang grants by a name\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w/.]+\.py)`, `([\w.]+)` \| (.*?) \| (.*?) \|$", section, re.M)
    return {(name, function): (whom, ours) for name, function, whom, ours in found}


def test_a_comparison_is_found() -> None:
    method = "class A:\n  def f(self):\n    if x and self.transfer_backend != TransferBackend.MOONCAKE: pass\n"
    tree = ast.parse(method + "def g(c): return c.other == 'nixl'\n")
    assert list(compared(tree)) == [("A.f", {"mooncake"})]


Rows = dict[tuple[str, str], tuple[str, str]]


def test_the_page_has_each_place(rows: Rows) -> None:
    """And to whom something is granted there."""
    there = places(SRT)
    assert rows.keys() == there.keys()
    for place, (whom, _) in rows.items():
        backends = {backend for backend in there[place] if backend != "mooncake_tcp"}  # another name of mooncake
        assert set(re.findall(r"\b(mooncake|nixl|mori|ascend|fake)\b", whom)) == backends, place


PD, CACHE, SHARD = (f"arg_groups/{name}_hook.py" for name in ("pd_disaggregation", "kv_cache", "kv_shard"))
# What the page says that SGLang refuses: the options with which its function is asked, and what it says.
ASKED = {
    (PD, "handle_pd_disaggregation"): ({"disaggregation_mode": "decode", "dcp_size": 2}, "PD decode DCP requires"),
    (PD, "_validate_prefill_complete"): ({"disaggregation_mode": "decode"}, "transfer backends other than Mooncake"),
    (CACHE, "handle_unified_memory_pool"): (
        {"disaggregation_mode": "decode", "enable_unified_memory": True},
        "only these transfer backends",
    ),
    (SHARD, "handle_kv_cache_sharding"): (
        {"disaggregation_mode": "prefill", "enable_kv_cache_sharding": True},
        "only supports the mooncake and nixl transfer backends",
    ),
}
# Why the others are not asked. The test above reads their comparisons.
NOT_ASKED = {
    (SHARD, "validate_kv_shard_attention_backend"): "it looks at the name for DSA on CUDA only",
    ("arg_groups/model_hook.py", "handle_model_specific_adjustments"): "it looks at the name for DSA on CUDA only",
    ("arg_groups/deepseek_v4_hook.py", "validate_deepseek_v41_features"): "it needs the configuration of a DeepSeek-V4.1 with DSpark",
    ("arg_groups/cp_tp_group_sharing_hook.py", "resolve_cp_tp_group_sharing"): "it needs the configuration of a GLM-5 Next",
}


def test_each_refusal_is_asked_for_or_says_why_not(rows: Rows) -> None:
    refused = {place for place, (_, ours) in rows.items() if ours.startswith("SGLang refuses")}
    assert refused == ASKED.keys() | NOT_ASKED.keys() and not ASKED.keys() & NOT_ASKED.keys()


@pytest.mark.parametrize("place", ASKED, ids=lambda place: place[1])
def test_sglang_refuses_it(place: tuple[str, str], model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own function, with SGLang's own arguments. To mooncake it does not say this, whatever else it may say."""
    (file, function), (options, says) = place, ASKED[place]
    module = importlib.import_module("sglang.srt." + file.removesuffix(".py").replace("/", "."))
    if file == SHARD:  # it asks for a GPU's attention backend just before
        monkeypatch.setattr(module, "validate_kv_shard_attention_backend", lambda *_: None)
    for backend in ("kvconn", "mooncake"):
        args = ServerArgs(model_path=str(model), device="cpu", disaggregation_transfer_backend=backend, **options)
        said = ""
        try:
            getattr(module, function)(args, *((1 << 30,) if file == SHARD else ()))
        except (ValueError, AssertionError) as error:
            said = str(error)
        assert (says in said) == (backend == "kvconn"), said


def test_variables_that_mean_nothing_are_the_backends_own() -> None:
    """Those that SGLang's other code reads count with kvconn."""
    by: dict[str, set[bool]] = {}
    for path in SRT.rglob("*.py"):
        own = path.relative_to(SRT).as_posix().startswith((*OWN, "disaggregation/common/", "distributed/device_communicators/mooncake"))
        for name in re.findall(r"envs\.(\w+)", path.read_text(encoding="utf-8")) if path.name != "environ.py" else ():
            by.setdefault(name, set()).add(own)
    theirs = {name: own == {True} for name, own in by.items() if name.startswith(params._THEIRS)}
    assert len(theirs) > 10
    for name, alone in theirs.items():
        mine = name in ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT")
        assert bool(params.unused({name: "1"})) == (alone and not mine), name
