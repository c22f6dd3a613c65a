"""Decode context parallelism: the ranks of a group have tokens in turn, and each loads its own. vLLM's own scheduler, slot mapping
and groups say which."""

from __future__ import annotations

import importlib.util
import json
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch
from shard_sides import Side, model_of, run
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm_engine import BLOCK, prefill_kv, until
from vllm_sides import FakeAgent

from kvconn.vllm.groups import Group, make_groups
from kvconn.vllm.load_log import LoadLog
from kvconn.vllm.metadata import LoadWork
from kvconn.vllm.shards import Shard

BYTES = 2 * 64 * BLOCK  # of a rank's block: layers, bytes of a token
numbers = random.Random(33)
LENGTHS = (1, 2, 3, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 3, 150)


def text(tokens: int) -> list[int]:
    return [numbers.randrange(500) for _ in range(tokens)]


class Pair:
    def __init__(self, where: Path, p: dict[str, int], d: dict[str, int], kv_heads: int) -> None:
        model = model_of(where, kv_heads)
        self.p = Side(model, "kv_producer", kv_heads=kv_heads, **p)
        self.d = Side(model, "kv_consumer", kv_heads=kv_heads, policy="fail", **d)

    def add(self, prompt: list[int], max_tokens: int = 3) -> tuple[Any, Any]:
        """The request's two halves."""
        kv = prefill_kv()
        decode = {"transfer_id": kv["transfer_id"], "remote_bootstrap_addr": self.p.ranks[0].agent.bootstrap_address}
        decode |= {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "engine-prefill"}
        return self.p.engine.add(list(prompt), kv, max_tokens=1), self.d.engine.add(list(prompt), decode, max_tokens=max_tokens)

    def moved(self, prompts: list[list[int]]) -> None:
        """Runs requests until they have ended well, with what was loaded."""
        halves = [self.add(prompt) for prompt in prompts]
        run(self.p, self.d)
        assert self.d.failures == []
        assert [len(self.d.engine.texts[d.request_id]) for _, d in halves] == [3] * len(halves)
        counts = [rank.agent.stats() for rank in (*self.p.ranks, *self.d.ranks)]
        assert not any(each["loads_failed"] or each["offers_failed"] for each in counts), counts


@pytest.fixture
def make_pair(tmp_path: Path) -> Iterator[Any]:
    made: list[Pair] = []

    def make(p: dict[str, int], d: dict[str, int] | None = None, kv_heads: int = 1) -> Pair:
        made.append(Pair(tmp_path, p, p if d is None else d, kv_heads))
        return made[-1]

    yield make
    for pair in made:
        pair.d.close()
        pair.p.close()


def sizes(tp: int, dcp: int, interleave: int = BLOCK) -> dict[str, int]:
    return {"tp": tp, "dcp": dcp, "interleave": interleave}


@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
def test_each_rank_loads_its_own_tokens(make_pair: Any, interleave: int) -> None:
    """Of prompts that end with any rank's tokens, also with none of a rank's. A block without a rank's tokens is not loaded."""
    pair = make_pair(sizes(2, 2, interleave))
    pair.moved([text(tokens) for tokens in LENGTHS])
    for n, rank in enumerate(pair.d.ranks):
        assert rank.names == [f"model.layers.{layer}.self_attn[FLASH_ATTN,dcp {n}/2 by {interleave}]" for layer in range(2)]
        counts = [get_dcp_local_seq_lens(torch.tensor(tokens), 2, n, interleave).item() for tokens in LENGTHS if tokens > 1]
        assert rank.agent.stats()["bytes_in"] == sum(-(-count // BLOCK) for count in counts) * BYTES


def test_a_part_is_sent_while_the_prompt_is_computed(make_pair: Any) -> None:
    pair = make_pair(sizes(2, 2))
    prefill, request = pair.add(text(150))
    pair.d.step()
    until("each rank's load has come to prefill", lambda: all(rank.agent.stats()["offers_early"] > 0 for rank in pair.p.ranks))
    pair.p.step()  # of the three that the prompt takes
    until("each rank has sent a part", lambda: all(rank.agent.stats()["bytes_partial"] > 0 for rank in pair.p.ranks))
    assert prefill.num_computed_tokens < 150
    run(pair.p, pair.d)
    assert pair.d.failures == [] and len(pair.d.engine.texts[request.request_id]) == 3


def test_prefix_that_decode_has_cached(make_pair: Any) -> None:
    """Of whole blocks of the group; of what follows, a rank may have no token: then it has loaded nothing."""
    pair = make_pair(sizes(2, 2))
    prompt = text(100)
    pair.moved([prompt])
    for rank in pair.d.ranks:
        rank.worker.stats()
    before = [rank.agent.stats()["bytes_in"] for rank in pair.d.ranks]
    pair.moved([prompt[:98]])  # three of the group's blocks of 32 tokens are cached: the first rank has the rest
    after = [rank.agent.stats()["bytes_in"] for rank in pair.d.ranks]
    assert [b - a for a, b in zip(before, after)] == [BYTES, 0]
    moved = [rank.worker.stats() for rank in pair.d.ranks]
    assert [len(each.data["moved"]) if each else 0 for each in moved] == [1, 0]


@pytest.mark.parametrize(("p", "d", "kv_heads"), [(2, 4, 1), (4, 2, 1), (4, 4, 2), (4, 8, 2)])
def test_more_ranks_than_those_of_a_group(make_pair: Any, p: int, d: int, kv_heads: int) -> None:
    """A rank loads from one that has the same share of the tokens, and the same head."""
    pair = make_pair(sizes(p, 2), sizes(d, 2), kv_heads)
    pair.moved([text(tokens) for tokens in (2, BLOCK + 1, 75)])


@pytest.mark.parametrize(
    ("p", "d", "said"),
    [
        (sizes(2, 2, 4), sizes(2, 2), ("2 ranks, 4 tokens in turn", "2 ranks, 16 tokens in turn")),
        (sizes(4, 4), sizes(4, 2), ("4 ranks, 16 tokens in turn", "2 ranks, 16 tokens in turn")),
        (sizes(2, 1), sizes(2, 2), ("none", "2 ranks, 16 tokens in turn")),
        (sizes(2, 2), sizes(1, 1), ("2 ranks, 16 tokens in turn", "none")),
    ],
)
def test_engines_that_deal_tokens_out_otherwise(
    make_pair: Any, caplog: pytest.LogCaptureFixture, p: dict[str, int], d: dict[str, int], said: tuple[str, str]
) -> None:
    caplog.set_level(logging.INFO, "kvconn.vllm")
    pair = make_pair(p, d)
    _, request = pair.add(text(40))
    run(pair.p, pair.d)
    assert pair.d.failures == [request.request_id] and request.status.name == "FINISHED_ERROR"
    want = f'decode_context_parallel "{said[0]}" at the prefill engine, "{said[1]}" at the decode engine'
    assert want in caplog.text


def test_shares_are_those_of_vllm() -> None:
    prompts = torch.arange(300)
    for size, interleave in ((1, 1), (2, 1), (2, 16), (3, 4), (8, 16)):
        for rank in range(size):
            ours = [Shard(rank, size, interleave).tokens(int(prompt)) for prompt in prompts]
            assert ours == get_dcp_local_seq_lens(prompts, size, rank, interleave).tolist()


_OF_GROUPS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from like import like
from vllm.distributed import parallel_state
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
import torch
from kvconn.vllm.params import rank_of
from kvconn.vllm.shards import shard_of

where, tp, pp, dcp = sys.argv[2], *map(int, sys.argv[3:])
caches = KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16))])
parallel = like("vllm.config:ParallelConfig", decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=4)
children = []
for number in range(tp * pp):
    if child := os.fork():
        children.append(child)
        continue
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(tp * pp, number, f"file://{where}/store", number, "gloo")
        parallel_state.initialize_model_parallel(tp, pp, decode_context_model_parallel_size=dcp)
        shard, rank = shard_of(parallel, caches), rank_of(parallel, "e")
        said = [shard.rank, rank.tp_rank, rank.pp_rank, shard.arranged(rank).tp_rank, shard.interleave, *shard.blocks]
        with open(f"{where}/{number}", "w") as file:
            json.dump(said, file)
        torch.distributed.barrier()
    os._exit(0)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def test_shares_follow_vllms_groups(tmp_path: Path) -> None:
    """And the numbers that agents know ranks by: those of a share come one after the other, in the order of their heads."""
    args = [str(Path(__file__).parent), str(tmp_path), "4", "2", "2"]
    asked = subprocess.run([sys.executable, "-c", _OF_GROUPS, *args], capture_output=True, text=True, timeout=300)
    assert asked.returncode == 0, asked.stderr
    said = [json.loads((tmp_path / str(number)).read_text()) for number in range(8)]
    assert said == [[tp % 2, tp, pp, tp % 2 * 2 + tp // 2, 4, 16] for pp in range(2) for tp in range(4)]


def test_groups_under_dcp() -> None:
    full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
    replicated = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, dcp_sharded=False)
    state = MambaSpec(block_size=BLOCK, shapes=((4, 4), (4, 4)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align")
    window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.bfloat16, sliding_window=40)
    caches = [KVCacheConfig(8, [], [KVCacheGroupSpec(["a"], spec)]) for spec in (full, replicated, state, window)]
    assert make_groups(caches[0], 2) == [Group(0, 2 * BLOCK)] and make_groups(caches[1], 2) == [Group(0, BLOCK)]
    assert make_groups(caches[2], 2) == [Group(0, BLOCK, state=True)]
    with pytest.raises(ValueError, match="layer a: a KV cache of SlidingWindowSpec with DCP = 2 is not supported"):
        make_groups(caches[3], 2)


def test_log_has_a_line_for_a_rank_that_has_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """With the rank's own blocks: the scheduler's second block has the last token of 33, and rank 1 has none of its tokens."""
    caplog.set_level("INFO", "kvconn.vllm")
    log = LoadLog("dp0 tp1 pp0", Shard(1, 2, 1, (BLOCK,)))
    agent = FakeAgent()
    agent.ends("t", "load")
    (there,) = agent.get_finished()
    work = LoadWork("r", "t", "http://p:8998", "p", [[5, 6]], [0], 33)
    log.put(there._replace(transport=""), work, 0.0)
    log.put(there, work, 0.0)
    log.close()
    (line,) = (record.message.partition("kvconn load ")[2] for record in caplog.records)
    assert (json.loads(line)["rank"], json.loads(line)["blocks"]) == ("dp0 tp1 pp0", 1)
