"""Reasons for which a rank does not start, and for which two engines refuse each other; in the environment of `make e2e-sglang`."""

from __future__ import annotations

import importlib.util
import inspect
import re
import socket
from pathlib import Path
from typing import Any, Iterator

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: these run in the environment of `make e2e-sglang`", allow_module_level=True)

import like as sglang
import sglang_engine
import torch
from like import like
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.environ import envs
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel
from sglang_engine import Group, engine, mha, send, settings, start
from test_sglang_caches import SPLITS, dsa, mamba

from kvconn import IndexKind, TransferError, weights
from kvconn.sglang.conn import KVConnManager
from kvconn.sglang.params import for_gpu

FAILED, SUCCESS = 0, 4


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num 2 is not supported by kvconn: .* load no plugins"),
        ({"device": "xpu"}, "--device is xpu: only cpu and cuda are supported"),
        ({"enable_kv_cache_sharding": True}, "enable_kv_cache_sharding is not supported"),
        ({"disaggregation_decode_allocation_policy": "prefill_complete"}, "prefill_complete is not supported"),
    ],
)
def test_option_that_is_not_supported(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        start("decode", lambda: mha(0, 2), **option)


def test_pages_that_would_be_given_back_too_early(port: int) -> None:
    with envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.override(False):
        with pytest.raises(ValueError, match="DEFERRED_DECODE_KV_RELEASE is off: with several ranks"):
            start("decode", lambda: mha(0, 2), tp=(0, 2))
        with pytest.raises(ValueError, match="DEFERRED_DECODE_KV_RELEASE is off: with several ranks"):
            start("decode", lambda: mha(0, 2), pp=(0, 2))
        with engine(port) as ranks:
            ranks.append(start("decode", lambda: mha(0, 2)))  # with a single rank there is no other rank whose load could be under way


def test_context_parallel_decode() -> None:
    args = KVArgs()
    args.engine_rank = args.pp_rank = args.system_dp_rank = 0
    with settings("decode") as server_args, get_parallel().override(attn_dcp_size=2), pytest.raises(ValueError, match="context parallel"):
        KVConnManager(args, DisaggregationMode.DECODE, server_args)


def test_manager_without_its_queue() -> None:
    """Another SGLang may make the manager in another way: then nothing would tell the layers."""
    with settings("decode") as server_args, pytest.raises(ValueError, match="has not called _init_kv_manager"):
        args = KVArgs()
        args.engine_rank = args.pp_rank = args.system_dp_rank = 0
        KVConnManager(args, DisaggregationMode.DECODE, server_args)


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ([[0, 1], [1, 2, 3]], "2 stages of the pipeline have layer 1: stage 0 has layers 0 to 1, stage 1 has layers 1 to 3"),
        ([[0], [2, 3]], "no stage of the pipeline has layer 1 of 4: stage 0 has layers 0 to 0, stage 1 has layers 2 to 3"),
        ([[0, 1], [2]], "no stage of the pipeline has layer 3 of 4: stage 0 has layers 0 to 1, stage 1 has layers 2 to 2"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_stages_that_have_a_layer_twice_or_not_at_all(role: str, stages: list[list[int]], says: str) -> None:
    for n, layers in enumerate(stages):
        with pytest.raises(ValueError, match=says):
            start(role, lambda layers=layers: mha(layers[0], layers[-1] + 1), pp=(n, 2), stages=stages)


def test_stage_without_a_state(port: int) -> None:
    with pytest.raises(
        ValueError, match="no layer of this rank has the state 'mamba': set --pp-size so that each stage has a layer with it"
    ):
        start("decode", lambda: mamba([0]), pp=(0, 2), stages=SPLITS["uneven"])


def test_groups_are_as_sglang_has_them() -> None:
    for name in ("all_gather_object", "broadcast_object"):
        theirs, ours = (list(inspect.signature(getattr(each, name)).parameters) for each in (GroupCoordinator, Group))
        assert theirs[1] == "obj" and len(ours) <= len(theirs) and ours[2:] == theirs[2 : len(ours)]


def test_port_of_the_first_host(port: int) -> None:
    """Each host has reserved a port; the bootstrap server listens at the first one's."""
    with engine(port) as ranks:
        more = {"nnodes": 2, "dist_init_addr": "127.0.0.1:5000", "disaggregation_bootstrap_port": 1}
        ranks.append(start("prefill", lambda: mha(0, 2), world=Group([], port), **more))
        ranks.append(start("decode", lambda: mha(0, 2)))
        assert send([ranks[0]], [ranks[1]], port, ([1], [], 0), ([4], [], 1))[0] == [SUCCESS]


def refused(port: int, p: dict[str, Any], d: dict[str, Any], states: Any = ((), ()), good: Any = None) -> str:
    """The reason for which a request of two such engines fails. Both live, and each serves a request with an engine like itself.

    good: states that fit, where those of the request do not.
    """
    beside = free_port()
    fits = good or states

    def one(role: str, like: dict[str, Any], at: int) -> Any:
        more = {name: value for name, value in like.items() if name != "make"}
        if role == "prefill":
            more["disaggregation_bootstrap_port"] = at
        return start(role, like.get("make", lambda: mha(0, 2)), **more)

    with engine(port) as ranks, engine(beside) as others:
        ranks += [one("prefill", p, port), one("decode", d, port)]
        ends, rooms = send(ranks[:1], ranks[1:], port, ([1], states[0], 0), ([4], states[1], 1))
        assert ends == [FAILED]
        ranks.append(one("decode", p, port))
        assert send(ranks[:1], ranks[2:], port, ([1], fits[0], 0), ([4], fits[0], 1), 7)[0] == [SUCCESS]
        others.append(one("prefill", d, beside))
        assert send(others, ranks[1:2], beside, ([1], fits[1], 0), ([4], fits[1], 1), 8)[0] == [SUCCESS]
        return rooms[0].reason


def test_states_of_unequal_ranks(port: int) -> None:
    """Each rank has a part of a Mamba state, and the part cannot be cut. The reason has both values."""
    with engine(port) as ranks:
        ranks.append(start("prefill", lambda: mamba([0, 1]), disaggregation_bootstrap_port=port))
        ranks += [start("decode", lambda: mamba([0, 1], tp=2), tp=(n, 2)) for n in range(2)]
        ends, rooms = send(ranks[:1], ranks[1:], port, ([1], [[3]], 0), ([4], [[5]], 1))
        assert ends == [FAILED] * 2
        for room in rooms:
            said = 'state conv0 "16x3 by 3x1 float32" at the prefill engine, "8x3 by 3x1 float32" at the decode engine'
            assert said in room.reason, room.reason
        ranks.append(start("decode", lambda: mamba([0, 1])))
        assert send(ranks[:1], ranks[3:], port, ([1], [[3]], 0), ([4], [[5]], 1), 7)[0] == [SUCCESS]


def test_state_of_another_type_of_numbers(port: int) -> None:
    reason = refused(port, {"make": lambda: mamba([0, 1])}, {"make": lambda: mamba([0, 1], dtype=torch.int32)}, ([[3]], [[5]]))
    assert 'state temporal "4x8x8 by 64x8x1 float32" at the prefill engine, "4x8x8 by 64x8x1 int32" at the decode engine' in reason


@pytest.mark.parametrize(
    ("six", "says"),
    [
        ([1, 0, 2, 0, 0, 7], "are of a ring of 7 entries, 6 are registered"),
        ([1, 5, 2, 0, 0, 6], "the runs exceed a ring of 6 entries"),
        ([1, 0, 1, 3, 1, 6], "id 9 of group 2 is entry 3 of ring 1, but position 1 of the prompt lies in entry 1"),
        ([1, 0, 4, 0, 3, 6], "the runs exceed a ring of 6 entries"),
        ([-1, 0, 2, 0, 0, 6], "a row, two runs and the length of a ring were expected"),
        ([1, 0, 2], "a row, two runs and the length of a ring were expected"),
        ([8, 0, 2, 0, 0, 6], "block id 48 .* is out of range: the group has 48 blocks"),
    ],
)
def test_ring_s_entries_that_are_none(port: int, six: list[int], says: str) -> None:
    """The request fails, on the side that was given them; the engine lives, and serves the next one."""
    with engine(port) as ranks:
        ranks.append(start("prefill", lambda: dsa([0, 1], kpool=4, extra=2), page=256, disaggregation_bootstrap_port=port))
        ranks.append(start("decode", lambda: dsa([0, 1], kpool=4, extra=2), page=256))
        good = [1, 0, 2, 0, 0, 6]
        try:
            ends, rooms = send(ranks[:1], ranks[1:], port, ([1], [[1], good], 0), ([4], [[4], six], 1))
            assert ends == [FAILED]
            reason = rooms[0].reason
        except ValueError as error:  # the receiver aborts the room for it
            reason = str(error)
        assert re.search(says, reason), reason
        assert send(ranks[:1], ranks[1:], port, ([1], [[1], good], 0), ([4], [[4], good], 1), 7)[0] == [SUCCESS]


def test_rings_of_unequal_length(port: int) -> None:
    p, d = ({"make": lambda extra=extra: dsa([0, 1], kpool=4, extra=extra), "page": 256} for extra in (2, 3))
    reason = refused(port, p, d, ([[1], []], [[4], []]), ([[1], [1, 0, 2, 0, 0, 6]], [[4], [4, 0, 2, 0, 0, 7]]))
    assert "entries of rings of 6 of 256 bytes at the prefill engine, opaque entries of rings of 7" in reason, reason


def test_what_ids_name() -> None:
    """Both engines compare it: a slot is no page, though it may be as long."""
    tail = {"page": 256}
    for make, more, kinds in (
        (lambda: mamba([0, 1]), {}, [IndexKind.BLOCK, IndexKind.SLOT, IndexKind.ROW]),
        (lambda: dsa([0, 1], kpool=4, extra=2), tail, [IndexKind.BLOCK, IndexKind.BLOCK, IndexKind.ring(6), IndexKind.ROW]),
    ):
        rank = start("decode", make, **more)
        try:
            assert {(region.group, int(region.index_kind)) for region in rank.layout.regions} == set(enumerate(map(int, kinds)))
        finally:
            rank.manager.teardown()


def test_two_slots_for_one_request() -> None:
    rank = start("decode", lambda: mamba([0, 1]))
    try:
        with pytest.raises(ValueError, match="SGLang names 2 slots of the state 'mamba' for a request"):
            rank.layout.blocks([1], [[3, 4]], 0)
    finally:
        rank.manager.teardown()


def test_draft_model_with_stages() -> None:
    with pytest.raises(ValueError, match="a draft model is not carried with --pp-size 2"):
        start("decode", lambda: mha(0, 2), pp=(0, 2), stages=SPLITS["two"], draft=lambda: mha(0, 1))


def test_rows_that_are_not_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang puts them on the GPU for one of Mooncake's transports."""

    class Buffers(MetadataBuffers):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.bootstrap_room = self.bootstrap_room.to("meta")

    monkeypatch.setattr(sglang_engine, "MetadataBuffers", Buffers)
    with pytest.raises(ValueError, match="metadata rows on meta: unset SGLANG_MOONCAKE_CUSTOM_MEM_POOL"):
        start("decode", lambda: mha(0, 2))


MAPPING = '{"0": "mlx5_0", "1": "mlx5_2, mlx5_3"}'


@pytest.mark.parametrize(
    ("option", "gpu", "devices"),
    [("mlx5_0", 3, ["mlx5_0"]), ("mlx5_0,mlx5_1", 0, ["mlx5_0", "mlx5_1"]), (MAPPING, 1, ["mlx5_2", "mlx5_3"])],
)
def test_devices_of_a_gpu(option: str, gpu: int, devices: list[str], tmp_path: Path) -> None:
    assert for_gpu({}, option, gpu) == {"rdma_devices": devices}
    assert for_gpu({"transport": "rdma", "rdma_devices": devices}, option, gpu) == {"transport": "rdma", "rdma_devices": devices}
    file = tmp_path / "devices.json"
    file.write_text(MAPPING)
    assert for_gpu({}, str(file), 0) == {"rdma_devices": ["mlx5_0"]}
    assert for_gpu({"lease_s": 5}, None, 0) == {"lease_s": 5}


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ('{"1": "mlx5_0"}', "No IB devices configured for GPU 0"),
        ('{"0": " "}', "names no device for GPU 0"),
        ("{", "Invalid JSON mapping"),
        ("none.json", "none.json does not exist"),
        ("mlx5_0", r"has \['mlx5_0'\] for GPU 0, KVCONN_SGLANG_CONFIG has rdma_devices \['mlx5_9'\]"),
    ],
)
def test_devices_that_are_not_right(option: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCONN_SGLANG_CONFIG", '{"rdma_devices": ["mlx5_9"]}')
    with pytest.raises(ValueError, match=says):
        start("decode", lambda: mha(0, 2), disaggregation_ib_device=option)


class Model(torch.nn.Module):
    """A model whose weights may be bad."""

    def load_weights(self, tensors: Any) -> None:
        if any(name == "bad" for name, _ in tensors):
            raise RuntimeError("no such tensor")


def updater(**more: Any) -> WeightUpdater:
    """SGLang's own, of a model on the CPU."""
    model = Model()
    fields = {"tp_rank": 0, "device": "cpu", "gpu_id": 0, "custom_weight_loaders": {}, "get_model": lambda: model, **more}
    config = like(sglang.SGLANG_MODEL_CONFIG, model_path="", dtype=torch.float32, hf_config=None, revision=None)
    fields |= dict.fromkeys(("update_model_fields", "recapture_cuda_graph", "get_model_runner"), lambda *_, **__: None)
    return WeightUpdater(**fields, model_config=config)


def replaced() -> int:
    """How often weights were replaced, all to the end."""
    weights.engine.of_prompt(7)
    return weights.engine.replaced


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A rank that SGLang's queue has started: the process counts from then on."""
    monkeypatch.setattr(weights, "engine", weights.Weights())
    rank = start("decode", lambda: mha(0, 2))
    with settings("decode"):
        yield rank
    rank.manager.teardown()


GOOD, BAD = [("good", torch.zeros(1))], [("bad", torch.zeros(1))]


def test_weights_that_are_sent(counts: Any) -> None:
    """In parts, between a first and a last request. SGLang ends them as if all parts were there."""
    one = updater()
    for session, parts in enumerate(([GOOD, GOOD], [GOOD, BAD, GOOD], [GOOD]), 1):
        one.begin_weight_update()
        for number, part in enumerate(parts):
            if part is BAD:
                assert not one.load_weights_from_distributed(part)[0]
            else:
                assert (one.load_weights_from_distributed if number else one.update_weights_from_tensor)(part)[0]
            with pytest.raises(TransferError):
                replaced()
        one.end_weight_update(run_post_load=False)
        if BAD in parts:
            with pytest.raises(TransferError, match="their last replacement has failed"):
                replaced()
        else:
            assert replaced() == session
    one.begin_weight_update()
    with pytest.raises(AssertionError, match="Group none not in"):
        one.receive_weights_from_distributed(names=[], dtypes=[], shapes=[], group_name="none")
    one.end_weight_update(run_post_load=False)
    with pytest.raises(TransferError):
        replaced()


def test_weights_from_disk(counts: Any, tmp_path: Path) -> None:
    """Some experts, which a rank lacks, are those that the engine had. (SGLang refuses weights of this format.)"""
    one = updater()
    assert not one.update_weights_from_disk(str(tmp_path), "dummy", weight_name_filter=lambda _: True)[0]
    assert replaced() == 0
    assert not one.update_weights_from_disk(str(tmp_path), "dummy")[0]
    with pytest.raises(TransferError, match="their last replacement has failed"):
        replaced()
    assert weights.engine.replaced == 1


def test_count_outlives_a_change_of_role(counts: Any, port: int) -> None:
    one = updater()
    one.begin_weight_update()
    one.end_weight_update(run_post_load=False)
    with engine(port) as ranks:
        ranks.append(start("prefill", lambda: mha(0, 2), scheduler=counts.queue.scheduler, disaggregation_bootstrap_port=port))
        assert replaced() == 1


@pytest.mark.parametrize(
    ("role", "option", "times"),
    [
        ("prefill", {"enable_pd_role_switch": True}, 1),
        ("prefill", {"enable_pd_role_switch": True, "tp": (1, 2)}, 0),  # the first rank has said it
        ("prefill", {"enable_pd_role_switch": True, "disable_radix_cache": True}, 0),
        ("prefill", {"enable_pd_role_switch": True, "disaggregation_decode_enable_radix_cache": True}, 0),
        ("prefill", {}, 0),
        ("decode", {"enable_pd_role_switch": True}, 0),
    ],
)
def test_warning_of_pages_that_sglang_loses(
    role: str, option: dict[str, Any], times: int, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = like(sglang.SGLANG_SCHEDULER)
    with engine(port) as ranks:
        for _ in range(2):  # the second is that of a server that has turned
            ranks.append(start(role, lambda: mha(0, 2), scheduler=one, disaggregation_bootstrap_port=port, **option))
            ranks.pop().manager.teardown()
    assert caplog.text.count("start it with --disable-radix-cache") == times


def test_variables_of_another_backend_are_said_once(port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first rank, and by name only."""
    monkeypatch.setenv("MC_REDIS_PASSWORD", "secret")
    monkeypatch.setenv("SGLANG_MOONCAKE_SEND_AUX_TCP", "1")
    caplog.set_level("INFO", "kvconn.sglang")
    with engine(port) as ranks:
        for rank in range(2):
            ranks.append(start("decode", lambda: mha(0, 2), tp=(rank, 2)))
    said = "MC_REDIS_PASSWORD, SGLANG_MOONCAKE_SEND_AUX_TCP: of SGLang's own transfer backends, and not used by kvconn"
    assert caplog.text.count(said) == 1 and "secret" not in caplog.text


@pytest.mark.parametrize("name", ["update_weights_from_disk", "begin_weight_update"])
def test_sglang_of_which_nobody_could_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(WeightUpdater, name)
    with pytest.raises(ValueError, match=rf"WeightUpdater is not as kvconn knows it \(it has no {name}\)"):
        start("decode", lambda: mha(0, 2))
