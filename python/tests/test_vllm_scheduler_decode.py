"""Decode requests under vLLM's real scheduler."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm_engine import BLOCK, WINDOW, decode_kv


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("tokens", [2, BLOCK, BLOCK + 1, 100, WINDOW - 1 + 5 * BLOCK])
def test_load_then_decode(make: Any, tokens: int, hybrid: bool) -> None:
    engine = make("kv_consumer", hybrid=hybrid)
    kv = decode_kv()
    request = engine.add(tokens, kv)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    (load,) = engine.loading.values()
    loaded = tokens - hybrid
    assert load.num_tokens == loaded and load.first_block[0] == 0
    assert len(load.block_ids[0]) == -(-loaded // BLOCK)
    if hybrid:
        assert load.first_block[1] == max(0, loaded - WINDOW + 1) // BLOCK
        assert 0 not in load.block_ids[1]
    engine.step()
    assert len(engine.metas[-1].loads) == 0
    engine.step(received={request.request_id})
    output = engine.step()
    assert output.num_scheduled_tokens == {request.request_id: 1}  # the last token only
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 4
    engine.nothing_is_left()


def test_cached_prefix_of_a_hybrid_model(make: Any) -> None:
    engine = make("kv_consumer", hybrid=True)
    prompt = [random.randrange(500) for _ in range(200)]
    here = engine.add(prompt, None, max_tokens=1)
    engine.run(lambda: engine.finished(here))
    request = engine.add(prompt + [1] * 40, decode_kv())
    engine.step()
    load = engine.loading[request.request_id]
    assert load.first_block == [12, 12]  # the window begins in the prefix
    assert [len(ids) for ids in load.block_ids] == [3, 3]
    engine.step(received={request.request_id})
    engine.run(lambda: engine.finished(request))
    engine.nothing_is_left()


def test_asking_twice_has_no_effect(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    before = len(engine.ours._sched._new_claims)
    assert [engine.connector.get_num_new_matched_tokens(request, 16) for _ in range(3)] == [(84, True)] * 3
    assert len(engine.ours._sched._new_claims) == before == 1
    assert request.kv_transfer_params["do_remote_prefill"] is True
    engine.abort(request)
    engine.nothing_is_left()


def test_prompt_logprobs_compute_the_prompt_here(make: Any) -> None:
    """vLLM asks us, and then loads nothing: the prefill engine must hear that it may free. Before 0.31 it loads."""
    engine = make("kv_consumer")
    kv = decode_kv()
    request = engine.add(100, kv, skip_reading_prefix_cache=True)
    engine.step()
    loaded = set(engine.loading)
    engine.step(received=loaded)
    engine.run(lambda: engine.finished(request))
    assert engine.released == ([] if loaded else [kv["transfer_id"]]) and not engine.loading
    engine.nothing_is_left()


def test_decode_preempted_after_its_load_loads_no_more(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv(), max_tokens=8)
    engine.step()
    engine.step(received={request.request_id})
    engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status == RequestStatus.PREEMPTED
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 8
    assert sum(len(meta.loads) for meta in engine.metas) == 1 and not engine.released
    engine.nothing_is_left()


def test_decode_aborted_before_admission(make: Any) -> None:
    engine = make("kv_consumer", seqs=1)
    first, kv = engine.add(40, None, max_tokens=30), decode_kv()
    engine.step()
    queued = engine.add(100, kv)
    engine.step()
    assert engine.claimed == [kv["transfer_id"]]
    engine.abort(queued)
    engine.step()
    assert engine.released == [kv["transfer_id"]] and not engine.loading
    engine.abort(first)
    engine.nothing_is_left()


def test_request_that_vllm_rejects_before_it_begins(make: Any) -> None:
    """vLLM then adds a request of one token and aborts it, so that the connector lets the prefill engine go."""
    engine = make("kv_consumer")
    kv = decode_kv()
    engine.abort(engine.add([0], kv, max_tokens=1))
    engine.step()
    assert engine.released == [kv["transfer_id"]]
    engine.nothing_is_left()


def test_decode_aborted_during_its_load(make: Any) -> None:
    engine = make("kv_consumer")
    kv = decode_kv()
    request = engine.add(100, kv)
    engine.step()
    engine.abort(request)
    assert engine.blocks_free() < engine.free  # bytes may still land
    engine.step()
    assert engine.cancelled == [kv["transfer_id"]]
    engine.step()
    assert engine.blocks_free() < engine.free
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.nothing_is_left()


def test_decode_aborted_in_the_step_that_loads(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    output = engine.schedule()
    engine.abort(request)
    engine.update(output)
    engine.step()
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.nothing_is_left()


def test_decode_aborted_while_the_report_is_under_way(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    engine.step()
    output = engine.schedule()
    engine.abort(request)
    engine.update(output, received={request.request_id})
    engine.step()  # the cancel of a load that has ended
    engine.nothing_is_left()


def test_decode_aborted_between_its_report_and_its_first_token(make: Any) -> None:
    engine = make("kv_consumer")
    request = engine.add(100, decode_kv())
    engine.step()
    engine.step(received={request.request_id})
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort(request)
    engine.step()
    assert not engine.cancelled
    engine.nothing_is_left()


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_failed_load_by_the_policy_fail(make: Any, hybrid: bool) -> None:
    engine = make("kv_consumer", hybrid=hybrid)
    bad, good = engine.add(100, decode_kv()), engine.add(100, decode_kv())
    engine.step()
    engine.step(received={bad.request_id}, failed={bad.request_id})
    assert bad.status == RequestStatus.FINISHED_ERROR
    assert str(engine.outputs[bad.request_id].finish_reason) == "error"
    engine.step(received={good.request_id})
    engine.run(lambda: engine.finished(good))
    engine.nothing_is_left()


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_failed_load_by_the_policy_recompute(make: Any, hybrid: bool) -> None:
    engine = make("kv_consumer", policy="recompute", hybrid=hybrid)
    request = engine.add(100, decode_kv())
    engine.step()
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.run(lambda: engine.finished(request))
    assert len(engine.texts[request.request_id]) == 4
    assert sum(len(meta.loads) for meta in engine.metas) == 1
    engine.nothing_is_left()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "two groups"])
def test_params_without_sense_end_by_the_policy(make: Any, policy: str, hybrid: bool) -> None:
    engine = make("kv_consumer", policy=policy, hybrid=hybrid)
    request = engine.add(100, {"do_remote_prefill": True})
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.step(received={request.request_id}, failed={request.request_id})
    engine.run(lambda: engine.finished(request))
    assert (request.status == RequestStatus.FINISHED_ERROR) == (policy == "fail")
    engine.nothing_is_left()


def test_worker_aggregation_reports_each_request_once() -> None:
    """Every rank's worker reports each request. vLLM counts up to the number of workers; None stands for that number."""
    aggregate = KVOutputAggregator(2).aggregate

    def said(received: set[str], failed: set[str]) -> Any:
        return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(finished_recving=received, failed_recving=failed))

    assert aggregate([said({"a"}, {"a"}), said(set(), set())]).kv_connector_output.finished_recving is None
    told = aggregate([said(set(), set()), said({"a"}, set())]).kv_connector_output
    assert told.finished_recving == {"a"} and told.failed_recving == {"a"}
