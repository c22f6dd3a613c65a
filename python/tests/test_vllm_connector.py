"""Workers' connectors as vLLM makes them of its own configuration, with real agents: engines that are set up differently do not fit."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
import torch
from like import like
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

import kvconn
from kvconn import weights
from kvconn.vllm import connector as of_connector
from kvconn.vllm import worker as of_worker
from kvconn.vllm.layout import make_regions
from kvconn.vllm.metadata import KVConnMetadata, LoadWork, OfferWork, PartialWork
from kvconn.vllm.params import Rank
from kvconn.vllm.shards import Shard

BLOCKS = 8
numbers = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's groups of ranks, which a worker sets up before its connector; each has one rank here."""
    with set_current_vllm_config(VllmConfig()):
        where = tmp_path_factory.mktemp("groups") / "init"
        parallel_state.init_distributed_environment(1, 0, f"file://{where}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


class Worker:
    """A worker of an engine with one layer."""

    def __init__(
        self,
        model: Path,
        role: str,
        config: dict[str, Any] | None = None,
        backend: str = "CPU_ATTN",
        isa: str = "vec",
        tokens_first: bool = False,
        place: Callable[[torch.Tensor], Any] = lambda cache: cache,
        kv_buffer_device: str = "cpu",
        **args: Any,
    ) -> None:
        self.engine_id = f"{role}-{next(numbers)}"
        here = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0} if role != "kv_consumer" else {}
        transfer = KVTransferConfig(
            kv_connector="KVConnConnector",
            kv_connector_module_path="kvconn.vllm",
            kv_role=role,
            engine_id=self.engine_id,
            kv_buffer_device=kv_buffer_device,
            kv_connector_extra_config={**here, **(config or {})},
        )
        made = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=1024,
            kv_transfer_config=transfer,
            disable_hybrid_kv_cache_manager=False,
            **{"dtype": "float32", "block_size": 128, "load_format": "dummy", **args},
        ).create_engine_config()
        tokens, dtype = made.cache_config.block_size, made.model_config.dtype
        spec = FullAttentionSpec(block_size=tokens, num_kv_heads=2, head_size=16, dtype=dtype)
        page = spec.page_size_bytes
        tensor = KVCacheTensor(size=page * BLOCKS, layers=["layer.0"], layer_stride=0, block_stride=page)
        groups = [KVCacheGroupSpec(["layer.0"], spec)]
        caches = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=groups, kv_cache_layout="LBHNC")
        layer = like(vllm.LAYER, isa=isa, get_attn_backend=lambda: like(vllm.BACKEND, get_name=lambda: backend))
        made.compilation_config.static_forward_context["layer.0"] = layer
        self.connector = KVConnectorFactory.create_connector(made, KVConnectorRole.WORKER, caches)
        if tokens_first:  # in memory; the view is the same
            self.cache = torch.zeros(BLOCKS, tokens, 2, 2 * 16, dtype=dtype).transpose(1, 2)
        else:
            self.cache = torch.zeros(BLOCKS, 2, tokens, 2 * 16, dtype=dtype)
        self.placed = place(self.cache)
        self.connector.register_kv_caches({"layer.0": self.placed})

    def step(self, meta: KVConnMetadata, forward: Callable[[], None] = lambda: None) -> tuple[set[str], set[str], set[int]]:
        """The requests reported as sent and as received, and the blocks of failed loads."""
        self.connector.bind_connector_metadata(meta)
        try:  # as vLLM's runner
            forward()
        finally:
            self.connector.start_load_kv(None)
            self.connector.wait_for_save()
        sent, received = self.connector.get_finished(set())
        self.connector.clear_connector_metadata()
        return sent or set(), received or set(), self.connector.get_block_ids_with_load_errors()

    def stats(self) -> dict[str, Any]:
        return self.connector._work._agent.stats()

    def offer(self, name: str, blocks: list[int]) -> None:
        self.step(KVConnMetadata(offers=[OfferWork(name, name, [blocks], [0])]))

    def is_sent(self, name: str) -> bool:
        return self._hears_of(name, 0)

    def is_received(self, name: str) -> bool:
        return self._hears_of(name, 1)

    def _hears_of(self, name: str, where: int) -> bool:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if name in self.step(KVConnMetadata(empty_step=True))[where]:
                return True
        return False

    def load(self, name: str, prefill: Worker, blocks: list[int]) -> set[int]:
        """The blocks that were not loaded, once the load has ended."""
        address = prefill.connector.get_handshake_metadata().bootstrap_addr
        work = LoadWork(name, name, address, prefill.engine_id, [blocks], [0], num_tokens=len(blocks) * self.cache.shape[2])
        meta, deadline = KVConnMetadata(loads=[work]), time.monotonic() + 30
        while time.monotonic() < deadline:
            _, received, failed = self.step(meta)
            if received:
                assert received == {name}
                return failed
            meta = KVConnMetadata(empty_step=True)
        raise AssertionError(f"the load of {name} has not ended")


def carry(prefill: Worker, decode: Worker) -> None:
    name = f"fits-{next(numbers)}"
    prefill.cache[[3, 4]] = torch.randn(2, *prefill.cache.shape[1:]).to(prefill.cache.dtype)
    prefill.offer(name, [3, 4])
    assert decode.load(name, prefill, [7, 0]) == set()
    assert torch.equal(decode.cache[[7, 0]], prefill.cache[[3, 4]])
    assert prefill.is_sent(name)


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def one(role: str, config: dict[str, Any] | None = None, **args: Any) -> Worker:
        made.append(Worker(model, role, config, **args))
        return made[-1]

    yield one
    for worker in made:
        worker.connector.shutdown()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """The connector's log. It goes to vLLM's handlers only, once the connector has found those."""
    ours = logging.getLogger("kvconn.vllm")
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"dtype": "bfloat16"}, 'dtype "float32" at the prefill engine, "bfloat16" at the decode engine'),
        ({"block_size": 96}, "a block has 128 tokens at the prefill engine, 96 at the decode engine"),
        (
            {"isa": "amx"},
            'region "layer.0[CPU_ATTN,vec]" of group 0 … is only at the prefill engine; region "layer.0[CPU_ATTN,amx]"',
        ),
        (
            {"backend": "OTHER"},
            'region "layer.0[CPU_ATTN,vec]" of group 0 … is only at the prefill engine; region "layer.0[OTHER,vec]"',
        ),
        (
            {"config": {"model": "another"}},
            'model "{0}" with fingerprint 1: … at the prefill engine, model "another" with fingerprint none at the decode',
        ),
        (
            {"hf_overrides": {"rope_theta": 1}},
            '"{0}" with fingerprint 1: … "{0}" with fingerprint 1: … their weights or configurations differ',
        ),
        ({"config": {"must_match": {"speculative": "eagle"}}}, 'speculative "none" at the prefill engine, "eagle" at the decode engine'),
        ({"both": {"dtype": "bfloat16"}, "quantization": "fp8"}, 'quantization "none" at the prefill engine, "fp8" at the decode engine'),
    ],
    ids=["dtype", "block size", "order within a block", "attention backend", "model", "overrides", "speculative", "quantization"],
)
def test_engines_that_do_not_fit(
    make: Callable[..., Worker], model: Path, log: pytest.LogCaptureFixture, setting: dict[str, Any], said: str
) -> None:
    """The load fails with both values in the log, and both engines go on with others."""
    both = setting.get("both", {})
    setting = {**both, **{name: value for name, value in setting.items() if name != "both"}}
    prefill, other = make("kv_producer", **both), make("kv_consumer", **setting)
    prefill.offer("unfit", [1, 2])
    assert other.load("unfit", prefill, [5, 6]) == {5, 6}
    assert "unfit: its cache was not loaded" in log.text
    assert re.search(".*".join(re.escape(part) for part in said.format(model.name).split(" … ")), log.text)
    assert not other.cache.any()
    for p, d in ((prefill, make("kv_consumer", **both)), (make("kv_producer", **setting), other)):
        carry(p, d)


@pytest.mark.parametrize(("p", "d"), [(64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_blocks_of_other_sizes_and_orders(make: Callable[..., Worker], p: int, d: int, tokens_first: bool) -> None:
    """The backend is one in whose blocks each token of each head is an item of its own."""
    prefill = make("kv_producer", backend="FLASH_ATTN", block_size=p, tokens_first=tokens_first)
    decode = make("kv_consumer", backend="FLASH_ATTN", block_size=d)
    theirs, ours = [3, 1, 6, 5][: 256 // p], [7, 0, 2, 4][: 256 // d]
    data = torch.randn(2, 256, 2 * 16)
    for place, block in enumerate(theirs):
        prefill.cache[block] = data[:, place * p : (place + 1) * p]
    prefill.offer("t", theirs)
    assert decode.load("t", prefill, ours) == set()
    assert torch.equal(torch.cat([decode.cache[block] for block in ours], 1), data)
    assert prefill.is_sent("t")


def test_engines_that_are_both_carry_both_ways(make: Callable[..., Worker]) -> None:
    one, two = make("kv_both"), make("kv_both")
    carry(one, two)
    carry(two, one)


@pytest.mark.parametrize("fails", [False, True])
def test_pass_that_fails_has_computed_nothing(make: Callable[..., Worker], fails: bool) -> None:
    """The blocks still hold another request's cache, and must not be sent although the engine may live on."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    data = torch.randn(2, *prefill.cache.shape[1:])

    def forward() -> None:
        if fails:
            raise MemoryError("no room for the activations")
        prefill.cache[[3, 4]] = data

    address = prefill.connector.get_handshake_metadata().bootstrap_addr
    decode.step(KVConnMetadata(loads=[LoadWork("g", "g", address, prefill.engine_id, [[7, 0]], [0], num_tokens=2 * data.shape[2])]))
    deadline = time.monotonic() + 30
    while not prefill.stats()["offers_early"]:
        assert time.monotonic() < deadline, "the load has not come to prefill"
    with contextlib.suppress(MemoryError):
        prefill.step(KVConnMetadata(partials=[PartialWork("g", [[3, 4]], [0], [2])]), forward)
    while not fails and not prefill.stats()["bytes_partial"]:
        assert time.monotonic() < deadline, "what the pass computed has not been sent"
    prefill.cache[[3, 4]] = data  # computed anew
    sent = prefill.step(KVConnMetadata(offers=[OfferWork("g", "g", [[3, 4]], [0])]))[0]  # at once, if decode has all of it
    assert sent or prefill.is_sent("g")
    while not decode.step(KVConnMetadata(empty_step=True))[1]:
        assert time.monotonic() < deadline, "the load has not ended"
    assert torch.equal(decode.cache[[7, 0]], data)
    assert not fails or prefill.stats()["bytes_partial"] == 0


def test_a_worker_s_share_of_the_tokens(make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent is told of it, its regions are named by it, and its loads are cut by it."""
    share = Shard(1, 2, 128, (128,))
    monkeypatch.setattr(of_connector, "shard_of", lambda *_: share)
    monkeypatch.setattr(of_connector, "rank_of", lambda *_: Rank(tp_rank=1, tp_size=4))
    seen: list[Any] = []
    monkeypatch.setattr(of_worker, "make_regions", lambda *args: seen.append(args[-1]) or make_regions(*args))
    worker = make("kv_consumer")
    config = worker.connector._config
    assert (config["tp_rank"], config["must_match"]["decode_context_parallel"]) == (2, "2 ranks, 128 tokens in turn")
    assert seen == [share]
    started: list[Any] = []
    monkeypatch.setattr(kvconn.Agent, "start_load", lambda _, loads: started.extend(loads))
    worker.step(KVConnMetadata(loads=[LoadWork("r", "t", "http://127.0.0.1:1", "p", [[3, 5]], [0], num_tokens=300)]))
    assert [(load.block_ids, load.tokens) for load in started] == [([[3]], [128])]


def test_index_out_of_range(make: Callable[..., Worker], log: pytest.LogCaptureFixture) -> None:
    """On either side the request ends with both values in the log, and the engines go on with others."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    sent, _, _ = prefill.step(KVConnMetadata(offers=[OfferWork("out", "out", [[1, BLOCKS + 91]], [0])]))
    assert sent == {"out"}
    assert re.search(rf"request out: its cache cannot be offered: .*\b{BLOCKS + 91}\b.*\b{BLOCKS}\b", log.text)
    log.clear()
    prefill.offer("in", [1, 2])
    assert decode.load("in", prefill, [3, BLOCKS + 92]) == {3, BLOCKS + 92}
    assert re.search(rf"request in: its cache cannot be loaded: .*\b{BLOCKS + 92}\b.*\b{BLOCKS}\b", log.text)
    assert not decode.cache.any()
    carry(prefill, decode)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_unknown_setting_ends_the_start(make: Callable[..., Worker], role: str) -> None:
    """The error names the key. An engine that ignored the key would do other than it was told."""
    with pytest.raises(kvconn.ConfigError, match='"peer_timeout"'):
        make(role, {"peer_timeout": 3})


def test_engine_that_has_replaced_its_weights(make: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own call. It refuses a prompt without a fingerprint, and the other engine hears of it."""
    monkeypatch.setattr(weights, "engine", weights.Weights())
    p, d = make("kv_producer"), make("kv_consumer")
    carry(p, d)
    made = d.connector._vllm_config
    one = object.__new__(resolve_obj_by_qualname(made.parallel_config.worker_cls))
    one.vllm_config, one.model_runner = made, like(vllm.RUNNER, reload_weights=lambda: None)
    former = weights.engine
    weights.started()
    one.reload_weights()
    replaced = weights.engine
    assert replaced.replaced == 1
    weights.engine = former
    p.offer("decode", [3, 4])
    weights.engine = replaced
    assert d.load("decode", p, [7, 0]) == {7, 0}
    weights.engine = former
    assert p.is_sent("decode")
    weights.engine = replaced
    assert p.step(KVConnMetadata(offers=[OfferWork("prefill", "prefill", [[3, 4]], [0])]))[0] == {"prefill"}
    weights.engine = former
    assert d.load("prefill", p, [7, 0]) == {7, 0}
    carry(p, d)
