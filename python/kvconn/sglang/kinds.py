"""What kvconn knows of SGLang's caches: each kind is carried, or refused for a reason. A kind that is in no table is refused.

docs/caches.md is made of these tables; a test compares them with the installed SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

_TESTS = "python/tests/test_sglang_caches.py"
_V4 = "only DeepSeek-V4's pool has it: its buffers are sorted by compression ratio and not by layer"
_GPU = "no test of kvconn has seen its pool"


@dataclass(frozen=True)
class Kind:
    """A component of the state, as SGLang's StateType names it."""

    index: str = ""  # what an index names: a page, the slot or the row of a request, an entry of a request's ring
    to_the_end: bool = False  # the indices end with the prompt; they begin where a side does not have the cache yet
    sharded: bool = False  # each tensor parallel rank has a part of its own
    test: str = ""  # the test that carries it
    refused: str = ""  # why it is not carried


@dataclass(frozen=True)
class Pool:
    """A class of SGLang's pools of KV caches."""

    buffers: tuple[tuple[str, str], ...] = ()  # attributes that list a buffer for each layer, with the name of the part
    slots: bool = False  # it has slots with the states of requests
    test: str = ""
    refused: str = ""


STATES = {
    "mamba": Kind("slot", sharded=True, test=f"{_TESTS}::test_mamba_states"),
    "swa": Kind("page", to_the_end=True, test=f"{_TESTS}::test_stages_of_windows"),
    "dsa": Kind("page", to_the_end=True, test=f"{_TESTS}::test_stages_of_sparse_attention"),
    "dsa_tail": Kind("ring", test=f"{_TESTS}::test_tails_are_those_of_sglang"),
    "block_scale": Kind("page", to_the_end=True, sharded=True, test=f"{_TESTS}::test_block_scales"),
    "block_scale_swa": Kind("page", to_the_end=True, sharded=True, test=f"{_TESTS}::test_block_scales"),
    "qsa_pending": Kind(refused=_GPU),
    "qsa_compressed": Kind(refused=_GPU),
    "minimax_index_k": Kind(refused=_GPU),
    "minimax_dense_kv": Kind(refused=_GPU),
    "swa_ring": Kind(refused=_V4),
    "c128_state": Kind(refused=_V4),
    "request_row": Kind(refused=_V4),
}

_KEYS_VALUES = (("k_buffer", "k"), ("v_buffer", "v"))
_SCALES = (("k_scale_buffer", "k_scale"), ("v_scale_buffer", "v_scale"))
_LATENT = (("kv_buffer", "kv"),)
_INDEXER = (("index_k_with_scale_buffer", "index"), ("_compress_tail_k", "tail_k"), ("_compress_tail_score", "tail_score"))

POOLS = {
    "MHATokenToKVPool": Pool(_KEYS_VALUES, test="e2e/test_sglang_stages.py::test_stages"),
    "MLATokenToKVPool": Pool(_LATENT, test=f"{_TESTS}::test_stages"),
    "SWAKVPool": Pool(test=f"{_TESTS}::test_stages_of_windows"),
    "HybridLinearKVPool": Pool(test=f"{_TESTS}::test_mamba_states"),
    "MambaPool": Pool(slots=True, test=f"{_TESTS}::test_mamba_states"),
    "DSATokenToKVPool": Pool(_LATENT + _INDEXER, test=f"{_TESTS}::test_stages_of_sparse_attention"),
    "MHATokenToKVPoolMXFP8": Pool(_KEYS_VALUES + _SCALES, test=f"{_TESTS}::test_block_scales"),
}


def state(name: str) -> Kind:
    """Raises ValueError where the state is not carried."""
    kind = STATES.get(name)
    if kind is None:
        raise ValueError(
            f"kvconn: SGLang has a state of the type {name!r}, which this kvconn does not know: it carries {', '.join(_carried(STATES))}"
        )
    if kind.refused:
        raise ValueError(f"kvconn: states of the type {name!r} are not carried: {kind.refused}")
    return kind


def pool(given: object) -> Pool:
    """Raises ValueError where the pool's caches are not carried.

    A subclass may lay them out in another way, so it does not pass for its base.
    """
    name = type(given).__name__
    kind = POOLS.get(name)
    if kind is None:
        raise ValueError(
            f"kvconn: SGLang keeps the cache in a {name}, which this kvconn does not know: it carries {', '.join(_carried(POOLS))}"
        )
    if kind.refused:
        raise ValueError(f"kvconn: the cache of a {name} is not carried: {kind.refused}")
    return kind


def _carried(table: dict) -> list[str]:  # type: ignore[type-arg]
    return [name for name, kind in table.items() if not kind.refused]


def table() -> list[str]:
    """The tables of docs/caches.md."""
    rows = ["Components of the state (`StateType`):", ""]
    for what, kinds in (("type", STATES), ("pool", POOLS)):
        if what == "pool":
            rows += ["", "Pools of the KV cache and of states. A pool of any other class is refused.", ""]
        rows += [f"| {what} | | test, or reason |", "|---|---|---|"]
        for name, kind in kinds.items():
            rows.append(f"| `{name}` | refused | {kind.refused} |" if kind.refused else f"| `{name}` | carried | `{kind.test}` |")
    return rows
