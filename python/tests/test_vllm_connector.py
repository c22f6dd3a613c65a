"""The connector's two sides, with a stand-in for the agent. Needs vLLM's classes, but no engine."""

from __future__ import annotations

import importlib.util
import itertools
import pickle
from array import array
from collections.abc import Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm.v1 import kv_cache_interface as specs

from kvconn import InvalidError
from kvconn._pack import Growths
from kvconn.vllm import layout, params
from kvconn.vllm.groups import Group, make_groups
from kvconn.vllm.metadata import CancelWork, GrowWork, KVConnMetadata
from kvconn.vllm.scheduler import SchedulerSide
from kvconn.vllm.worker import Reports, WorkerSide

BLOCK = 16
names = (f"r{n}" for n in itertools.count())


class Status(Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_ERROR = 4


def decode_params(transfer_id: str = "t") -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_bootstrap_addr": "http://p:8998",
        "remote_engine_id": "engine-p",
    }


def prefill_params(transfer_id: str = "t") -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def request(tokens: int, kv: Any, computed: int | None = None) -> Any:
    return SimpleNamespace(
        request_id=next(names),
        kv_transfer_params=kv,
        num_prompt_tokens=tokens,
        num_computed_tokens=tokens if computed is None else computed,
        prompt_token_ids=list(range(tokens)),
        _all_token_ids=list(range(tokens)),
        max_tokens=16,
        status=Status.FINISHED_LENGTH_CAPPED,
    )


def prefill_side(groups: Sequence[Group] = (Group(0, BLOCK),)) -> SchedulerSide:
    return SchedulerSide("kv_producer", list(groups), "engine-p", {"tp_size": 1})


def decode_side(groups: Sequence[Group] = (Group(0, BLOCK),)) -> SchedulerSide:
    return SchedulerSide("kv_consumer", list(groups))


def finish(side: SchedulerSide, req: Any, block_ids: list[list[int]]) -> bool:
    """Whether the blocks are kept; never for the client of a decode engine to hear of."""
    kept, answer = side.request_finished(req, block_ids)
    assert answer is None or not kept or answer["do_remote_prefill"]
    return kept


def ids(count: int, start: int = 100) -> list[list[int]]:
    return [list(range(start, start + count))]


# -- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ([], "an object was expected"),
        ({"do_remote_prefill": True}, "transfer_id is missing"),
        ({"do_remote_decode": True, "transfer_id": ""}, "transfer_id is empty"),
        ({**decode_params(), "remote_request_id": "u"}, "transfer_id is 't', but remote_request_id is 'u'"),
        ({**decode_params(), "remote_bootstrap_addr": None, "remote_host": "p"}, "remote_port is None: a port"),
        ({**decode_params(), "remote_bootstrap_addr": None, "remote_host": "p", "remote_port": True}, "remote_port is True"),
        ({**decode_params(), "kvconn_error": "no"}, "the prefill engine says: no"),
        ({**decode_params(), "remote_engine_id": None}, "remote_engine_id is missing"),
        ({**decode_params(), "transfer_id": 3}, "transfer_id is 3: a string was expected, not int"),
        ({**decode_params(), "do_remote_prefill": 1}, "do_remote_prefill is 1: true or false was expected"),
        ({**decode_params(), "do_remote_decode": True}, "both true"),
    ],
)
def test_bad_params(kv: Any, said: str) -> None:
    with pytest.raises(params.BadParams, match=said):
        params.parse(kv)


@pytest.mark.parametrize("kv", [None, {}, {"transfer_id": "t"}, {"do_remote_decode": False}, {"do_remote_decode": None}])
def test_params_that_ask_for_nothing(kv: Any) -> None:
    assert params.parse(kv) is None


def test_context_parallel_engines_are_refused_by_name() -> None:
    params.check_parallel(SimpleNamespace(tensor_parallel_size=2, data_parallel_size=4, pipeline_parallel_size=1))
    with pytest.raises(ValueError, match="DCP = 4 is not supported"):
        params.check_parallel(SimpleNamespace(tensor_parallel_size=2, decode_context_parallel_size=4))


def vllm_config(extra: dict[str, Any], role: str = "kv_producer", **parallel: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", kv_role=role, kv_connector_extra_config=extra),
        model_config=SimpleNamespace(model="/models/tiny/", dtype="torch.bfloat16"),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK),
        parallel_config=SimpleNamespace(**parallel),
    )


def cache_config(num_blocks: int = 8, layers: Sequence[str] = ("a", "b")) -> Any:
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK), layer_names=list(layers))
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=[group], kv_cache_layout="LBHNC")


def full(**more: Any) -> Any:
    import torch

    return specs.FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, **more)


def window(tokens: int, **more: Any) -> Any:
    import torch

    return specs.SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=tokens, **more)


def grouped(*kinds: Any) -> Any:
    groups = [specs.KVCacheGroupSpec([f"layer.{number}"], kind) for number, kind in enumerate(kinds)]
    return SimpleNamespace(kv_cache_groups=groups)


def test_groups_of_the_installed_vllm() -> None:
    import torch

    mla = specs.MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    chunked = specs.ChunkedLocalAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, attention_chunk_size=64)
    several = specs.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": window(40), "b": window(40)})
    # A window in a group of full attention is only a hint: every block is kept.
    found = make_groups(grouped(full(sliding_window=32), window(40, extra_retained_tokens=3), mla, chunked, several))
    assert found == [
        Group(0, BLOCK),
        Group(1, BLOCK, window=40, retained=3),
        Group(2, BLOCK),
        Group(3, BLOCK, chunk=64),
        Group(4, BLOCK, window=40),
    ]


def test_groups_agree_with_vllms_managers_about_what_is_gone() -> None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    for spec, group in ((window(40), Group(0, BLOCK, window=40)), (window(33, extra_retained_tokens=2), Group(0, BLOCK, 33, 2))):
        manager = managers.SlidingWindowManager.__new__(managers.SlidingWindowManager)
        manager.sliding_window, manager.extra_retained_tokens = spec.sliding_window, spec.extra_retained_tokens
        for computed in range(200):
            assert group.gone(computed) == manager.get_num_skipped_tokens(computed) // BLOCK
    manager = managers.ChunkedLocalAttentionManager.__new__(managers.ChunkedLocalAttentionManager)
    manager.attention_chunk_size = 64
    for computed in range(200):
        assert Group(0, BLOCK, chunk=64).gone(computed) == manager.get_num_skipped_tokens(computed) // BLOCK


def test_caches_of_another_kind_are_refused_by_name() -> None:
    import torch

    state = specs.MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="a KV cache of MambaSpec is not supported"):
        make_groups(grouped(full(), state))
    assert make_groups(SimpleNamespace(kv_cache_groups=[specs.KVCacheGroupSpec(["a"], state, enable_kv_transfer=False)])) == []


def test_one_bad_announce_hides_no_other() -> None:
    side, agent = worker()
    good: list[str] = []

    def announce(ids: Sequence[str]) -> None:
        if "bad" in ids:
            raise ValueError("bad")
        good.extend(ids)

    agent.announce = announce  # type: ignore[method-assign]
    meta = KVConnMetadata()
    meta.announces = ["a", "bad", "b"]
    side.begin(meta)
    assert good == ["a", "b"]


ONE = params.Rank()


def test_agent_config(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVCONN_BOOTSTRAP_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT"):
        monkeypatch.delenv(name, raising=False)
    made = params.agent_config(vllm_config({"lease_s": 5, "idle_wait_ms": 1}), cache_config(), ONE)
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1}
    assert made == {
        "engine_id": "e",
        "role": "prefill",
        "model": "tiny",
        "dtype": "bfloat16",
        "block_tokens": BLOCK,
        "lease_s": 5,
        **ranks,
    }

    def port(config: Any) -> Any:
        return params.agent_config(config, cache_config(), ONE).get("bootstrap_port")

    assert "lease_s" not in params.agent_config(vllm_config({}), cache_config(), ONE)
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "9001")
    assert port(vllm_config({})) == 9001
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "9002")
    assert port(vllm_config({})) == 9002
    assert port(vllm_config({"bootstrap_port": 1})) == 1
    assert port(vllm_config({}, "kv_consumer")) is None
    monkeypatch.setenv("KVCONN_BOOTSTRAP_PORT", "x")
    with pytest.raises(ValueError, match="KVCONN_BOOTSTRAP_PORT is 'x'"):
        port(vllm_config({}))


TP1 = params.Rank(tp_rank=1, tp_size=2)
PP1 = params.Rank(pp_rank=1, pp_size=2)
DP1 = params.Rank(dp_rank=1, dp_size=2)


@pytest.mark.parametrize(
    ("rank", "extra", "parallel", "joins"),
    [
        (params.Rank(tp_size=2), {}, {}, None),
        (TP1, {}, {}, "http://127.0.0.1:8998"),
        (PP1, {"bootstrap_port": 9000}, {"nnodes_within_dp": 2, "master_addr": "10.0.0.7"}, "http://10.0.0.7:9000"),
        (DP1, {"bootstrap_host": "10.0.0.1"}, {}, "http://10.0.0.1:8998"),
        (DP1, {"bootstrap_host": "::"}, {"data_parallel_master_ip": "fd00::1"}, "http://[fd00::1]:8998"),
        (DP1, {"tls_cert_file": "c"}, {"data_parallel_master_ip": "10.0.0.9"}, "https://10.0.0.9:8998"),
        # A front end on each host: its first engine has a port of its own, the next one joins that.
        (DP1, {}, {"local_engines_only": True, "data_parallel_rank_local": 0}, None),
        (DP1, {}, {"local_engines_only": True, "data_parallel_rank_local": 1}, "http://127.0.0.1:8998"),
        (TP1, {"bootstrap_join": "http://p:1"}, {}, "http://p:1"),
        (TP1, {"nats_url": "nats://n:4222"}, {}, None),
    ],
)
def test_ranks_join_the_first_one(rank: Any, extra: dict[str, Any], parallel: dict[str, Any], joins: str | None) -> None:
    assert params.agent_config(vllm_config(extra, **parallel), cache_config(), rank).get("bootstrap_join") == joins
    decode = {key: value for key, value in extra.items() if key != "bootstrap_join"}
    assert "bootstrap_join" not in params.agent_config(vllm_config(decode, "kv_consumer", **parallel), cache_config(), rank)


def test_independent_ranks_of_a_dense_model() -> None:
    assert params.dp_of(SimpleNamespace(), "e") == (0, 1)
    assert params.dp_of(SimpleNamespace(data_parallel_size=4, data_parallel_index=2), "e_dp2") == (2, 4)
    assert params.dp_of(SimpleNamespace(data_parallel_size=1, data_parallel_index=0), "e_dp0") == (0, 65536)
    assert params.dp_of(SimpleNamespace(data_parallel_size=1, data_parallel_index=3), "e_dp3") == (3, 65536)
    assert params.dp_of(SimpleNamespace(data_parallel_size=1, data_parallel_index=3), "e") == (3, 4)


def test_ranks_must_know_the_port() -> None:
    with pytest.raises(ValueError, match="bootstrap_port is 0"):
        params.agent_config(vllm_config({"bootstrap_port": 0}), cache_config(), TP1)


def test_address_for_others() -> None:
    assert params.advertised("http://127.0.0.1:8998", {"advertise_host": "p"}) == "http://p:8998"
    assert params.advertised("https://127.0.0.1:8998", {"advertise_host": "fd00::1"}) == "https://[fd00::1]:8998"
    assert params.advertised("http://127.0.0.1:8998", {}) == "http://127.0.0.1:8998"
    assert params.advertised(None, {"advertise_host": "p"}) is None


def test_unknown_key_is_named() -> None:
    import kvconn

    config = params.agent_config(vllm_config({"bootstrap_prot": 8998}), cache_config(), ONE)
    with pytest.raises(kvconn.ConfigError, match="bootstrap_prot"):
        kvconn.Agent(config)


@pytest.mark.parametrize("value", ["2", True, -1, 1000])
def test_idle_wait_of_a_wrong_kind(value: Any) -> None:
    with pytest.raises(ValueError, match="idle_wait_ms"):
        params.idle_wait_s({"idle_wait_ms": value})


# -- the prefill engine's scheduler ---------------------------------------------------------------------------------


def test_prefill_announces_once_and_offers() -> None:
    side, req = prefill_side(), request(40, prefill_params())
    side.on_new_request(req)
    side.after_alloc(req, ids(3), 0)
    meta = side.build_meta(40)
    assert (meta.announces, meta.offers, meta.empty_step) == (["t"], [], False)
    assert side.matched_tokens(req, 0) == (0, False)
    assert finish(side, req, ids(3)) is True
    assert side.has_unsaid() and side.waits()
    (offer,) = side.build_meta(0).offers
    assert (offer.req_id, offer.transfer_id, offer.block_ids) == (req.request_id, "t", ids(3))
    side.worker_reported({req.request_id}, None)
    assert not side.waits() and not side.has_unsaid()


def test_prefill_without_on_new_request_announces_at_allocation() -> None:
    side, req = prefill_side(), request(40, prefill_params())
    side.after_alloc(req, ids(3), 0)
    assert side.build_meta(40).announces == ["t"]


@pytest.mark.parametrize("status", [Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_STOPPED])
def test_prefill_offers_only_the_prompt(status: Status) -> None:
    side, req = prefill_side(), request(40, prefill_params(), computed=60)
    req.status = status
    assert finish(side, req, ids(5))
    assert side.build_meta(0).offers[0].block_ids == ids(3)


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
def test_prefill_that_ends_otherwise_is_cancelled(status: Status) -> None:
    side, req = prefill_side(), request(40, prefill_params())
    side.on_new_request(req)
    req.status = status
    assert finish(side, req, ids(3)) is False
    (cancel,) = side.build_meta(0).cancels
    assert (cancel.transfer_id, cancel.of_load) == ("t", False)
    assert status.name in cancel.reason
    assert not side.waits()


def test_prefill_with_part_of_the_prompt_is_cancelled() -> None:
    side, req = prefill_side(), request(40, prefill_params(), computed=16)
    assert finish(side, req, ids(1)) is False
    assert len(side.build_meta(0).cancels) == 1


# -- the decode engine's scheduler ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "cached", "first", "count"),
    [(40, 0, 0, 3), (48, 0, 0, 3), (49, 0, 0, 4), (40, 16, 1, 2), (40, 32, 2, 1), (2, 0, 0, 1), (50, 48, 3, 1)],
)
def test_decode_loads_what_it_lacks(tokens: int, cached: int, first: int, count: int) -> None:
    side, req = decode_side(), request(tokens, decode_params())
    side.on_new_request(req)
    assert side.matched_tokens(req, cached) == (tokens - cached, True)
    assert side.matched_tokens(req, cached) == (tokens - cached, True)  # without side effects
    side.after_alloc(req, ids(8), tokens - cached)  # vLLM may have allocated blocks for tokens to come
    side.after_alloc(req, ids(8), 0)  # after the load
    (load,) = side.build_meta(0).loads
    assert load.first_block == [first]
    assert load.block_ids == [ids(8)[0][first : first + count]]
    assert (load.bootstrap_addr, load.engine_id, load.silent) == ("http://p:8998", "engine-p", False)
    assert req.kv_transfer_params["do_remote_prefill"] is False
    assert side.matched_tokens(req, 0) == (0, False)  # preempted, or recomputed after a failure
    assert side.waits()
    side.worker_reported(None, {req.request_id})
    assert not side.waits()
    assert finish(side, req, ids(8)) is False
    assert not side.has_unsaid()


@pytest.mark.parametrize(("tokens", "cached"), [(49, 48), (1, 0)])
def test_decode_that_lacks_nothing_lets_the_prefill_engine_free(tokens: int, cached: int) -> None:
    side, req = decode_side(), request(tokens, decode_params())
    assert side.matched_tokens(req, cached) == (0, False)
    side.after_alloc(req, ids(4), 0)
    (load,) = side.build_meta(1).loads
    assert load.silent and not side.waits()
    assert finish(side, req, ids(4)) is False
    assert not side.has_unsaid()


def test_decode_aborted_before_admission_lets_the_prefill_engine_free() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.on_new_request(req)
    side.matched_tokens(req, 0)
    req.status = Status.FINISHED_ABORTED
    assert finish(side, req, [[]]) is False
    assert side.has_unsaid() and not side.waits()
    assert [load.silent for load in side.build_meta(0).loads] == [True]


def test_decode_claims_what_it_has_no_blocks_for() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.on_new_request(req)
    assert side.has_unsaid()
    (claim,) = side.build_meta(1).claims
    assert (claim.transfer_id, claim.bootstrap_addr, claim.engine_id) == ("t", "http://p:8998", "engine-p")
    assert not side.has_unsaid() and not side.waits()
    side.matched_tokens(req, 0)
    side.after_alloc(req, ids(3), 40)
    meta = side.build_meta(0)
    assert not meta.claims and len(meta.loads) == 1


def test_decode_with_blocks_at_once_claims_nothing() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.on_new_request(req)
    side.after_alloc(req, ids(3), 40)
    meta = side.build_meta(0)
    assert not meta.claims and len(meta.loads) == 1


def test_decode_aborted_during_its_load_is_cancelled() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.matched_tokens(req, 0)
    side.after_alloc(req, ids(3), 40)
    side.build_meta(0)
    req.status = Status.FINISHED_ABORTED
    assert finish(side, req, ids(3)) is False
    (cancel,) = side.build_meta(0).cancels
    assert cancel.of_load
    assert side.waits()  # until the worker says that no byte can land any more


def test_second_request_with_a_transfer_id_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvconn.vllm")
    side, one, two = decode_side(), request(40, decode_params()), request(40, decode_params())
    side.on_new_request(one)
    side.on_new_request(two)
    assert side.matched_tokens(one, 0) == (40, True)
    assert side.matched_tokens(two, 0) == (0, False)
    assert "belongs to request" in caplog.text


def test_load_at_a_prefill_engine_fails(caplog: pytest.LogCaptureFixture) -> None:
    side, req = prefill_side(), request(40, decode_params())
    side.on_new_request(req)
    assert side.matched_tokens(req, 0) == (40, True)
    side.after_alloc(req, ids(3), 40)
    side.after_alloc(req, ids(3), 0)
    assert side.waits()
    assert [work.block_ids for work in side.build_meta(0).refusals] == [ids(3)]
    assert side.request_finished(req, ids(3)) == (False, None)
    assert caplog.text.count("kv_role is kv_producer") == 1


def test_prefill_at_a_decode_engine_answers_why_not(caplog: pytest.LogCaptureFixture) -> None:
    side, req = decode_side(), request(40, prefill_params())
    side.on_new_request(req)
    assert side.matched_tokens(req, 0) == (0, False)
    side.after_alloc(req, ids(3), 0)
    kept, answer = side.request_finished(req, ids(3))
    assert not kept and not side.has_unsaid()
    with pytest.raises(params.BadParams, match=r"the prefill engine says: .*kv_role is kv_consumer"):
        params.parse(answer)
    assert caplog.text.count("kv_role is") == 1


@pytest.mark.parametrize(
    "kv",
    [
        {"do_remote_prefill": True},
        {**decode_params(), "remote_engine_id": None},
        {**decode_params(), "do_remote_decode": True},
        {**decode_params(), "do_remote_prefill": "yes"},
    ],
)
def test_load_without_sense_fails_as_a_load(kv: dict[str, Any]) -> None:
    side, req = decode_side(), request(40, kv)
    side.on_new_request(req)
    assert side.matched_tokens(req, 16) == (24, True)
    side.after_alloc(req, ids(3), 24)
    meta = side.build_meta(0)
    assert not meta.loads and not meta.claims
    worker_side, agent = worker()
    step(worker_side, meta)
    reports = worker_side.collect(False)
    assert reports.received == reports.failed == {req.request_id}
    assert reports.failed_blocks == set(ids(3)[0])
    assert agent.calls == []
    side.worker_reported(None, reports.received)
    assert not side.waits()
    assert side.matched_tokens(req, 0) == (0, False)  # by the policy recompute


# -- the answer of the prefill engine -------------------------------------------------------------------------------


def answered(kv: dict[str, Any]) -> dict[str, Any]:
    side, req = prefill_side(), request(40, kv)
    side.found_at("http://[fd00::1]:8998")
    side.on_new_request(req)
    kept, answer = side.request_finished(req, ids(3))
    assert kept and answer is not None
    assert side.build_meta(0).offers[0].transfer_id == answer["transfer_id"]
    return answer


def test_answer_is_nixls_and_mooncakes() -> None:
    answer = answered(prefill_params("t"))
    assert answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t",
        "remote_bootstrap_addr": "http://[fd00::1]:8998",
        "remote_engine_id": "engine-p",
        "remote_request_id": "t",
        "remote_host": "fd00::1",
        "remote_port": 8998,
        "remote_block_ids": ids(3),
        "remote_num_tokens": 40,
        "tp_size": 1,
    }
    assert params.parse(answer) == params.DecodeParams("t", "http://[fd00::1]:8998", "engine-p")


@pytest.mark.parametrize("dropped", [("transfer_id", "remote_bootstrap_addr"), ("remote_request_id", "remote_host", "remote_port")])
def test_answer_without_the_words_of_one_contract(dropped: tuple[str, ...]) -> None:
    answer = answered(prefill_params("t"))
    kept = {key: value for key, value in answer.items() if key not in dropped}
    assert params.parse(kept) == params.parse(answer)


def test_router_without_a_transfer_id_gets_one() -> None:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    one, two = answered(dict(asked)), answered(dict(asked))
    assert one["transfer_id"] != two["transfer_id"]
    assert params.parse(one) == params.DecodeParams(one["transfer_id"], "http://[fd00::1]:8998", "engine-p")


def test_no_answer_while_nobody_knows_the_address() -> None:
    side, req = prefill_side(), request(40, prefill_params())
    assert side.request_finished(req, ids(3)) == (True, None)


# -- windows --------------------------------------------------------------------------------------------------------

WINDOW = 40
HYBRID = (Group(0, BLOCK), Group(1, BLOCK, window=WINDOW))


def with_nulls(total: int, gone: int, start: int) -> list[int]:
    return [0] * gone + list(range(start + gone, start + total))


@pytest.mark.parametrize("tokens", range(2, 160))
def test_window_of_any_prompt_is_there_for_its_last_token(tokens: int) -> None:
    """The decode engine computes the last token again: the window that this token needs must be offered and loaded."""
    p, d = prefill_side(HYBRID), decode_side(HYBRID)
    pr, dr = request(tokens, prefill_params()), request(tokens, decode_params())
    p.on_new_request(pr)
    computed = pr.num_prompt_tokens  # what vLLM's manager has dropped at the end goes by this
    pr.num_computed_tokens = computed
    total = -(-computed // BLOCK)
    held = [list(range(100, 100 + total)), with_nulls(total, HYBRID[1].gone(computed), 200)]
    assert finish(p, pr, held)
    (offer,) = p.build_meta(0).offers

    external, is_async = d.matched_tokens(dr, 0)
    assert is_async and external == tokens - 1
    there = -(-external // BLOCK)
    d.after_alloc(dr, [list(range(300, 300 + there)), with_nulls(there, HYBRID[1].gone(external), 400)], external)
    (load,) = d.build_meta(0).loads
    # What the last token attends to, of what is not computed by then.
    needed = max(0, tokens - WINDOW) // BLOCK
    assert load.first_block[1] <= needed
    for group in (0, 1):
        assert offer.first_block[group] <= load.first_block[group]
        assert offer.first_block[group] + len(offer.block_ids[group]) >= load.first_block[group] + len(load.block_ids[group])
        assert 0 not in offer.block_ids[group] + load.block_ids[group]


def test_prompt_is_cut_only_where_it_must_be() -> None:
    cut = []
    for tokens in range(2, 160):
        side, req = prefill_side(HYBRID), request(tokens, prefill_params())
        side.on_new_request(req)
        if req.num_prompt_tokens != tokens:
            cut.append(tokens)
            assert (req.num_prompt_tokens, len(req.prompt_token_ids), len(req._all_token_ids)) == (tokens - 1,) * 3
            assert req.max_tokens == 1
    assert cut == [tokens for tokens in range(2, 160) if tokens >= WINDOW and (tokens - WINDOW + 1) % BLOCK == 0]


def test_window_that_has_moved_on_is_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    side, req = prefill_side(HYBRID), request(100, prefill_params(), computed=130)
    side.on_new_request(req)
    assert not finish(side, req, [list(range(100, 109)), with_nulls(9, HYBRID[1].gone(130), 200)])
    (cancel,) = side.build_meta(0).cancels
    assert "the window has left the prompt's end: 130 tokens are computed of a prompt of 100" in cancel.reason


def test_cached_prefix_and_window() -> None:
    side, req = decode_side(HYBRID), request(100, decode_params())
    assert side.matched_tokens(req, 32) == (67, True)
    side.after_alloc(req, [list(range(300, 307)), with_nulls(7, 3, 400)], 67)
    (load,) = side.build_meta(0).loads
    assert load.first_block == [2, 3]
    assert load.block_ids == [list(range(302, 307)), list(range(403, 407))]
    assert load.num_tokens == 99


def test_one_refused_claim_hides_no_other() -> None:
    side, agent = worker()
    agent.refused = {"b"}
    scheduler = decode_side()
    for each in "abc":
        scheduler.on_new_request(request(40, decode_params(each)))
    step(side, scheduler.build_meta(1))
    assert [call for call in agent.calls if call[1] == "c"] and ("claim", "b") not in agent.calls
    assert side.collect(False) == Reports()


def test_metadata_crosses_processes() -> None:
    side, req = decode_side(), request(40, decode_params())
    side.after_alloc(req, ids(3), 40)
    meta = side.build_meta(0)
    assert pickle.loads(pickle.dumps(meta)) == meta


# -- the worker -----------------------------------------------------------------------------------------------------


class Refused(RuntimeError):
    def __init__(self, transfer_id: str) -> None:
        super().__init__(f"{transfer_id}: refused")
        self.transfer_id = transfer_id


class FakeAgent:
    nameless = False  # refuses batches without saying for which id

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.done: list[Any] = []
        self.refused: set[str] = set()
        self.read: set[str] = set()  # cannot be taken back
        self.malformed: set[str] = set()  # nor these
        self.waits = 0

    def _take(self, kind: str, works: Sequence[Any]) -> None:
        if self.nameless and len(works) > 1:
            raise RuntimeError("none of them was looked at")
        for work in works:
            if work.transfer_id in self.refused:
                raise Refused(work.transfer_id)
            self.calls.append((kind, work.transfer_id))

    def announce(self, transfer_ids: Sequence[str]) -> None:
        self.calls += [("announce", each) for each in transfer_ids]

    def offer(self, offers: Sequence[Any]) -> None:
        self._take("offer", offers)

    def grow(self, parts: Any, regions: Any = None) -> None:
        if isinstance(parts, Growths):
            self.calls.append(("layer", parts.ids, None if regions is None else list(regions)))
        else:
            self._take("grow", parts)

    def retract(self, transfer_ids: Sequence[str]) -> None:
        if set(transfer_ids) & self.malformed:
            raise InvalidError("one of them is no id")
        if set(transfer_ids) & self.read:
            raise RuntimeError("the blocks are still read")
        self.calls += [("retract", each) for each in transfer_ids]

    def claim(self, claims: Sequence[Any]) -> None:
        self._take("claim", claims)

    def start_load(self, loads: Sequence[Any]) -> None:
        self._take("load", loads)

    def cancel(self, transfer_ids: Sequence[str], reason: str = "") -> None:
        self.calls += [("cancel", each) for each in transfer_ids]

    def get_finished(self) -> Sequence[Any]:
        done, self.done = self.done, []
        return done

    def wait(self, timeout_s: float) -> bool:
        self.waits += 1
        return False

    def close(self) -> None:
        self.calls.append(("close",))

    def ends(self, transfer_id: str, kind: str, code: int = 0) -> None:
        self.done.append(
            SimpleNamespace(
                transfer_id=transfer_id,
                kind=kind,
                code=code,
                reason="why" if code else "",
                bytes=64,
                blocks=3,
                segments=1,
                wait_s=0.01,
                transfer_s=0.001,
                transport="tcp",
            )
        )


def worker(by_layers: bool = False) -> tuple[WorkerSide, FakeAgent]:
    agent = FakeAgent()
    return WorkerSide(lambda: agent, 0.001, by_layers), agent


def loading(worker_side: WorkerSide, *transfer_ids: str) -> list[str]:
    scheduler = decode_side()
    reqs = [request(40, decode_params(each)) for each in transfer_ids]
    for number, req in enumerate(reqs):
        scheduler.after_alloc(req, ids(3, 100 * number), 40)
    step(worker_side, scheduler.build_meta(0))
    return [req.request_id for req in reqs]


def offering(worker_side: WorkerSide, *transfer_ids: str) -> list[str]:
    scheduler = prefill_side()
    reqs = [request(40, prefill_params(each)) for each in transfer_ids]
    for req in reqs:
        finish(scheduler, req, ids(3))
    step(worker_side, scheduler.build_meta(0))
    return [req.request_id for req in reqs]


def step(worker_side: WorkerSide, meta: KVConnMetadata, layers: Sequence[str] = ()) -> None:
    worker_side.begin(meta)
    worker_side.load(meta)
    for layer in layers:
        worker_side.layer_written(layer)
    worker_side.step_written()


def test_load_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvconn.vllm")
    side, agent = worker()
    (req_id,) = loading(side, "t")
    assert side.collect(False).received == set()
    agent.ends("t", "load")
    agent.ends("t", "load")
    reports = side.collect(False)
    assert (reports.received, reports.failed, reports.sent) == ({req_id}, set(), set())
    assert side.collect(False).received == set()
    side.close()  # the line is written beside the step
    assert '"gb_per_s": ' in caplog.text and "kvconn load {" in caplog.text


def test_failed_load_names_request_and_blocks() -> None:
    side, agent = worker()
    (req_id,) = loading(side, "t")
    agent.ends("t", "load", code=5)
    reports = side.collect(False)
    assert reports.received == reports.failed == {req_id}
    assert reports.failed_blocks == {0, 1, 2}


@pytest.mark.parametrize("nameless", [False, True])
def test_load_that_the_agent_refuses_fails_alone(nameless: bool) -> None:
    side, agent = worker()
    agent.refused, agent.nameless = {"b"}, nameless
    one, two, three = loading(side, "a", "b", "c")
    reports = side.collect(False)
    assert reports.received == reports.failed == {two}
    assert agent.calls == [("load", "a"), ("load", "c")]
    for each in ("a", "c"):
        agent.ends(each, "load")
    assert side.collect(False).received == {one, three}


def test_offer_is_reported_whatever_became_of_it() -> None:
    side, agent = worker()
    reqs = offering(side, "a", "b")
    agent.ends("a", "offer")
    agent.ends("b", "offer", code=9)
    assert side.collect(False).sent == set(reqs)
    assert side.collect(False).sent == set()


def growing(*ids: str, blocks: Sequence[int] = (1, 2), before: int = 0, after: int = 1) -> KVConnMetadata:
    return KVConnMetadata(grows=[GrowWork(each, [list(blocks)], [before], [after]) for each in ids])


def test_what_a_step_computes_is_told_layer_by_layer() -> None:
    side, agent = worker(by_layers=True)
    side._regions_of = {"layer.0": array("I", [0, 1]), "layer.1": array("I", [2, 3]), "shared": array("I")}
    step(side, growing("a", "b"), layers=["layer.0", "layer.1", "shared"])
    assert agent.calls == [
        ("grow", "a"),
        ("grow", "b"),
        ("layer", ["a", "b"], [0, 1]),
        ("layer", ["a", "b"], [2, 3]),
        ("layer", ["a", "b"], None),  # whatever no layer has told of
    ]
    agent.calls.clear()
    step(side, KVConnMetadata(), layers=["layer.0"])  # of another step nothing is told
    assert not agent.calls


def test_chunks_are_told_at_the_step_s_end() -> None:
    side, agent = worker()
    side._regions_of = {"layer.0": array("I", [0])}
    step(side, growing("a"), layers=["layer.0"])
    assert agent.calls == [("grow", "a"), ("layer", ["a"], None)]


def test_growth_that_the_agent_refuses_does_not_end_the_step() -> None:
    side, agent = worker()
    agent.refused = {"a"}
    step(side, growing("a", "b"))
    assert agent.calls == [("grow", "b"), ("layer", ["b"], None)]


def test_blocks_are_taken_back_before_anything_else() -> None:
    side, agent = worker()
    meta = growing("c")
    meta.retracts = ["a", "b"]
    meta.cancels = [CancelWork("b", "aborted", of_load=False), CancelWork("x", "aborted", of_load=False)]
    side.take_back(meta)
    assert agent.calls == [("cancel", "b"), ("retract", "a"), ("retract", "b")]
    side.take_back(meta)
    step(side, meta)
    assert agent.calls[3:] == [("cancel", "x"), ("grow", "c"), ("layer", ["c"], None)]


def test_blocks_are_taken_back_whatever_is_wrong_with_those_of_others() -> None:
    side, agent = worker()
    agent.malformed = {"a"}
    side.take_back(KVConnMetadata(retracts=["a", "b", "c"]))
    assert agent.calls == [("retract", "b"), ("retract", "c")]


def test_engine_ends_rather_than_use_blocks_that_are_still_read() -> None:
    side, agent = worker()
    agent.read = {"a"}
    with pytest.raises(RuntimeError, match="still read"):
        side.take_back(KVConnMetadata(retracts=["a"]))


def test_offer_that_the_agent_refuses_frees_at_once() -> None:
    side, agent = worker()
    agent.refused = {"a"}
    (req_id,) = offering(side, "a")
    assert side.collect(False).sent == {req_id}
    assert agent.calls == [("cancel", "a"), ("retract", "a")]


def test_empty_load_is_never_reported() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    finish(scheduler, req, [[]])
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t")]
    agent.ends("t", "load", code=3)
    reports = side.collect(False)
    assert (reports.received, reports.failed) == (set(), set())


def test_cancel_of_a_load_that_has_ended_is_dropped() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    scheduler.after_alloc(req, ids(3), 40)
    step(side, scheduler.build_meta(0))
    agent.ends("t", "load")
    side.collect(False)
    finish(scheduler, req, ids(3))
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t")]


def test_cancelled_load_is_reported_after_its_completion() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    scheduler.after_alloc(req, ids(3), 40)
    step(side, scheduler.build_meta(0))
    finish(scheduler, req, ids(3))
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t"), ("cancel", "t")]
    assert side.collect(False).received == set()
    agent.ends("t", "load", code=4)
    assert side.collect(False).received == {req.request_id}


def test_load_and_its_cancel_in_one_step() -> None:
    side, agent = worker()
    scheduler, req = decode_side(), request(40, decode_params())
    scheduler.after_alloc(req, ids(3), 40)
    finish(scheduler, req, ids(3))
    step(side, scheduler.build_meta(0))
    assert agent.calls == [("load", "t"), ("cancel", "t")]


def test_waits_only_in_an_empty_step_with_something_to_wait_for() -> None:
    side, agent = worker()
    side.collect(True)
    assert agent.waits == 0
    loading(side, "t")
    side.collect(False)
    assert agent.waits == 0
    side.collect(True)
    assert agent.waits == 1


def test_dead_agent_gives_no_block_back() -> None:
    side, agent = worker()
    loading(side, "a")

    def broken() -> Any:
        raise RuntimeError("closed")

    agent.get_finished = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        side.collect(False)


def test_dead_agent_without_work_is_nobodys_trouble() -> None:
    side, agent = worker()

    def broken() -> Any:
        raise RuntimeError("closed")

    agent.get_finished = broken  # type: ignore[method-assign]
    assert side.collect(False).received == set()


# -- layouts --------------------------------------------------------------------------------------------------------


def regions(caches: dict[str, Any], config: Any) -> list[tuple[Any, ...]]:
    def record(name: str, tensor: Any, dim: int, group: int = 0, **geometry: Any) -> list[Any]:
        return [(name, tuple(tensor.shape), tuple(tensor.stride()), dim, group, geometry)]

    return layout.make_regions(caches, backend("FLASH_ATTN", caches), config, record, ALL_HEADS)


def backend(name: str, layers: Sequence[str], **more: Any) -> Any:
    asked = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name, **more))
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={each: asked for each in layers}))


ALL_HEADS = layout.Heads(3)


# The orders that vLLM names, as memory order of the logical axes L, B, H, N, C.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


@pytest.mark.parametrize("name", ORDERS)
def test_named_layouts(name: str) -> None:
    import torch

    import kvconn

    order = ORDERS[name]
    sizes = (2, 8, 3, BLOCK, 10)
    memory = torch.arange(2 * 8 * 3 * BLOCK * 10, dtype=torch.int32).reshape([sizes[axis] for axis in order])
    logical = memory.permute([order.index(axis) for axis in range(5)])
    caches = {"a": logical[0], "b": logical[1]}
    assert [entry[1] for entry in regions(caches, cache_config())] == [(8, 3, BLOCK, 10)] * 2
    config = cache_config()
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3)
    heads = layout.Heads(12, tp_rank=2, tp_size=4)
    made = layout.make_regions(caches, backend("FLASH_ATTN", caches), config, kvconn.regions_from_tensor, heads)
    # The heads 6 to 8 of 12, each of them and each token in one place, in as many regions as the layout keeps apart.
    assert {(region.tokens, region.total_heads) for region in made} == {(BLOCK, 12)}
    for layer in "ab":
        mine = [region for region in made if region.name == layer]
        assert sorted(head for region in mine for head in range(region.first_head, region.first_head + region.heads)) == [6, 7, 8]
    # Whatever the order: block 5 of all regions together is exactly block 5 of all layers.
    import ctypes

    got = sorted(
        value
        for region in made
        for value in (ctypes.c_int32 * (region.block_bytes // 4)).from_address(region.address + 5 * region.block_stride)
    )
    assert got == sorted(logical[:, 5].flatten().tolist())


def test_smaller_kernel_blocks_are_put_together() -> None:
    import torch

    config = cache_config()
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3)
    made = regions({"a": torch.zeros(32, 3, BLOCK // 4, 6), "b": torch.zeros(8, 3, BLOCK, 6)}, config)
    assert [entry[1] for entry in made] == [(8, 4, 3, BLOCK // 4, 6), (8, 3, BLOCK, 6)]
    heads = {"first_head": 0, "total_heads": 3}
    assert [entry[5] for entry in made] == [{"token_dim": (1, 3), "head_dim": 2, **heads}, {"token_dim": 2, "head_dim": 1, **heads}]


def test_heads_of_ranks() -> None:
    import torch

    def spread(total: int, ranks: int, here: int) -> list[tuple[int, int]]:
        return [layout.Heads(total, rank, ranks).of(SimpleNamespace(num_kv_heads=here)) for rank in range(ranks)]

    assert spread(8, 2, 4) == [(0, 8), (4, 8)]
    assert spread(2, 4, 1) == [(0, 2), (0, 2), (1, 2), (1, 2)]  # too few: ranks share one
    assert spread(8, 2, 6) == [(0, 12), (6, 12)]  # layers with other heads than the model says
    mla = specs.MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert [layout.Heads(16, rank, 4).of(mla) for rank in range(4)] == [(0, 1)] * 4


def test_blocks_that_are_not_tokens_by_heads_stay_opaque() -> None:
    import torch

    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3, tokens_per_state=4)
    assert regions({"a": torch.zeros(8, 3, BLOCK // 4, 6)}, config)[0][5] == {}
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3)
    assert regions({"a": torch.zeros(8, 24)}, config)[0][5] == {}


def test_quantized_cache_is_copied_as_it_is() -> None:
    import torch

    import kvconn

    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3)
    cache = torch.zeros(8, 3, BLOCK, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    (region,) = layout.make_regions({"a": cache}, backend("FLASHINFER", "a"), config, kvconn.regions_from_tensor, ALL_HEADS)
    assert (region.block_bytes, region.tokens, region.heads) == (3 * BLOCK * 16, BLOCK, 3)


@pytest.mark.parametrize("name", ORDERS)
def test_backend_with_an_order_of_its_own_moves_whole_blocks_of_heads(name: str) -> None:
    """On CPU a head's tokens are packed within a block: heads can be dealt to ranks, but no block be cut."""
    import torch

    import kvconn

    order, sizes = ORDERS[name], (2, 8, 3, BLOCK, 10)
    memory = torch.zeros([sizes[axis] for axis in order], dtype=torch.int32)
    layer = memory.permute([order.index(axis) for axis in range(5)])[0]
    config = cache_config(layers=["a"])
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3)
    made = layout.make_regions({"a": layer}, backend("CPU_ATTN", "a"), config, kvconn.regions_from_tensor, layout.Heads(6, 1, 2))
    if name in ("LBNHC", "BLNHC"):  # the tokens of a head are not together at all
        assert all((region.tokens, region.heads) == (0, 0) for region in made)
        return
    assert sum(region.heads for region in made) == 3
    assert {(region.tokens, region.first_head + n) for region in made for n in range(region.heads)} == {(1, 3), (1, 4), (1, 5)}
    # Smaller kernel blocks: each is packed by itself, and their heads are apart.
    (region, *_) = layout.make_regions(
        {"a": torch.zeros(16, 3, BLOCK // 2, 10)}, backend("CPU_ATTN", "a"), config, kvconn.regions_from_tensor, layout.Heads(3)
    )
    assert region.tokens == 0


def test_older_vllm_asks_the_backend() -> None:
    import torch

    config = cache_config(layers=["a"])
    del config.kv_cache_layout
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=3, head_size=4)
    context = backend("FLASH_ATTN", "a", get_kv_cache_shape=lambda blocks, size, heads, dim: (2, blocks, size, heads, dim))
    # 8 blocks and 8 of something else: only the backend can tell.
    cache = torch.zeros(2, 8, BLOCK, 3, 8)
    found = layout.make_regions({"a": cache}, context, config, lambda name, tensor, dim, group, **more: [(dim, more)], ALL_HEADS)
    assert found == [(1, {"token_dim": 2, "head_dim": 3, "first_head": 0, "total_heads": 3})]
    with pytest.raises(ValueError, match="no dimension of it counts 8 blocks"):
        layout.make_regions({"a": cache}, SimpleNamespace(), config, lambda *_: [], ALL_HEADS)


def test_shared_tensor_is_taken_once_and_strangers_are_left_out() -> None:
    import torch

    cache = torch.zeros(8, 2, 4, 6)
    assert [entry[0] for entry in regions({"a": cache, "b": cache, "x": torch.zeros(3)}, cache_config())] == ["a"]
    with pytest.raises(ValueError, match="none of 1 caches"):
        regions({"x": cache}, cache_config())


def test_importing_kvconn_vllm_imports_no_vllm() -> None:
    import subprocess
    import sys

    code = "import sys, kvconn.vllm; assert 'vllm' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
