"""Real SGLang servers of attention data parallel ranks (--attn-dp-size): each has requests and a KV cache of its own, with whole
heads, and computes the rest of the model with the others. Texts must equal the single server's.

SGLang's Llama cannot do that, its Qwen 3 can.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from sglang_servers import Alone, SGLangPair, plugin
from test_sglang_ranks import CHUNK, ONE, TWO, aborts, texts

# Without the last option, ranks with batches of one size exchange their logits by an operation that SGLang has for GPUs only.
ATTENTION = f"{TWO} --attn-dp-size 2 --enable-dp-lm-head"
# A rank without a request pads its batch with this value. Without compiled kernels SGLang's attention for the CPU lacks it.
ON_CPU = """
def register():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
"""


@pytest.fixture(scope="module")
def engines(sglang_workdir: Path) -> Iterator[tuple[SGLangPair, Alone]]:
    """The pair is not started: each test says what it needs."""
    model = tiny_model.make(sglang_workdir / "qwen", kind="qwen")
    more = {"extra_env": plugin(sglang_workdir / "attention-plugin", ON_CPU)}
    args = ("--page-size", "16", "--chunked-prefill-size", str(CHUNK))
    # Up to four schedulers wait for each other in loops beside what they compute: on two cores one may get none for seconds.
    pair = SGLangPair(model, sglang_workdir / "logs" / "attention", *args, config={"peer_timeout_s": 15}, **more)
    alone = Alone(model, sglang_workdir / "logs" / "attention-alone", **more)
    try:
        alone.servers[0].start()
        yield pair, alone
    finally:
        pair.stop()
        alone.stop()
    left = [*pair.leftovers(), *alone.leftovers()]
    assert not left, f"left behind: {left}"


# From one case to the next one of the two servers stays.
@pytest.mark.parametrize(("prefill", "decode"), [(ONE, ATTENTION), (TWO, ATTENTION), (ATTENTION, ATTENTION), (ATTENTION, ONE)])
def test_attention_ranks(engines: tuple[SGLangPair, Alone], prefill: str, decode: str) -> None:
    pair, alone = engines
    pair.up(prefill, decode, *alone.servers)
    texts(pair, alone, f"{prefill} to {decode}")
    aborts(pair, alone, f"{prefill} to {decode}")
