"""Calls that the typed API of the installed wheel refuses, and the words of the refusals."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from side import BLOCK, BLOCKS, LAYERS, Side

import kvconn


def test_partial_offers_that_are_refused(prefill: Side, decode: Side, transfer_id: str) -> None:
    with pytest.raises(
        kvconn.InvalidError, match="blocks up to 2 of group 0 are said to be ready or being computed, but block ids are given up to 1 only"
    ):
        prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [2])])
    with pytest.raises(kvconn.InvalidError, match="region 99"):
        prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [1])], [99])
    with pytest.raises(kvconn.InvalidError, match="regions is empty"):
        prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [1])], [])
    with pytest.raises(kvconn.InvalidError, match="ready has 2 groups, block_ids 1"):
        prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [1, 1])])
    with pytest.raises(kvconn.InvalidError, match="computing has 2 groups, block_ids 1"):
        prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [1], computing=[1, 1])])
    with pytest.raises(IndexError):
        prefill.agent.written[LAYERS] = 1
    with pytest.raises(kvconn.InvalidError, match="role"):
        decode.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [1])])
    prefill.agent.offer_partial([kvconn.PartialOffer(transfer_id, [[1]], [1])])
    with pytest.raises(kvconn.InvalidError, match="withdraw the transfer first"):
        prefill.agent.offer([kvconn.Offer(transfer_id, [[2]])])
    prefill.agent.withdraw([transfer_id, "nobody's"])
    prefill.agent.offer([kvconn.Offer(transfer_id, [[2]])])
    with pytest.raises(kvconn.InvalidError, match="is offered"):
        prefill.agent.withdraw([transfer_id])
    prefill.agent.cancel([transfer_id])
    assert prefill.finished(transfer_id).code == kvconn.Status.CANCELLED


@pytest.mark.parametrize("prompt", [-1, 2**64, 1.5, "1", None])
def test_prompt_that_is_no_number(prefill: Side, decode: Side, transfer_id: str, prompt: object) -> None:
    with pytest.raises(kvconn.InvalidError, match="prompt"):
        prefill.agent.offer([kvconn.Offer(transfer_id, [[1]], prompt=prompt)])  # type: ignore[arg-type]
    with pytest.raises(kvconn.InvalidError, match="prompt"):
        decode.agent.start_load([kvconn.Load(transfer_id, "http://p:1", "p", [[1]], prompt=prompt)])  # type: ignore[arg-type]


def test_failure_says_where_and_when(prefill: Side, decode: Side, transfer_id: str) -> None:
    prefill.agent.cancel([transfer_id], "out of memory")
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    reason = decode.finished(transfer_id).reason
    for part in ("out of memory [load of engine", "dp0 tp0 pp0", '"engine-prefill"', prefill.agent.bootstrap_address, "requesting", " ms]"):
        assert part in reason


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://", "ftp://x", "127.0.0.1:8998", "http://[::1"])
def test_unreachable_bootstrap(decode: Side, transfer_id: str, address: str) -> None:
    decode.agent.start_load([kvconn.Load(transfer_id, address, "engine-prefill", [[1]])])
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.UNREACHABLE and address in done.reason


def test_unknown_engine(prefill: Side, decode: Side, transfer_id: str) -> None:
    decode.agent.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "somebody-else", [[1]])])
    done = decode.finished(transfer_id)
    assert done.code == kvconn.Status.UNREACHABLE and "somebody-else" in done.reason


def test_layouts_that_differ_name_both_values(prefill: Side, transfer_id: str) -> None:
    other = kvconn.Agent({"engine_id": "d", "role": "decode"})
    cache = np.zeros((LAYERS, BLOCKS, BLOCK // 2), np.uint8)
    other.register_kv_caches([r for i in range(LAYERS) for r in kvconn.regions_from_tensor(f"layer.{i}", cache[i], 0)])
    other.start_load([kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])])
    other.wait(30)
    (done,) = other.get_finished()
    assert done.code == kvconn.Status.REFUSED and str(BLOCK) in done.reason and str(BLOCK // 2) in done.reason
    other.close()


def test_models_that_differ_are_refused(prefill: Side, transfer_id: str) -> None:
    one = Side("prefill", model="llama", engine_id="m").register()
    two = Side("decode", model="qwen").register()
    two.agent.start_load([kvconn.Load(transfer_id, one.agent.bootstrap_address, "m", [[1]])])
    done = two.finished(transfer_id)
    assert done.code == kvconn.Status.REFUSED and "llama" in done.reason and "qwen" in done.reason
    one.agent.close()
    two.agent.close()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "engine_id"),
        ({"engine_id": "e"}, "role"),
        ({"engine_id": "e", "role": "chef"}, "chef"),
        ({"engine_id": 5, "role": "decode"}, "engine_id"),
        ({"engine_id": "e", "role": "decode", "leas_s": 3}, "leas_s"),
        ({"engine_id": "e", "role": "decode", "lease_s": -3}, "lease_s"),
        ({"engine_id": "e", "role": "decode", "lease_s": "long"}, "lease_s"),
        ({"engine_id": "e", "role": "decode", "transport": "pigeon"}, "pigeon"),
        ({"engine_id": "e", "role": "decode", "max_transfers": 0}, "max_transfers"),
        ({"engine_id": "e", "role": "prefill", "bootstrap_port": 70000}, "70000"),
        ({"engine_id": "e", "role": "decode", "nats_url": "http://x"}, "nats_url"),
        ({"engine_id": "e", "role": "decode", "model": object()}, "JSON"),
    ],
)
def test_bad_config_names_the_key(config: dict, says: str) -> None:
    with pytest.raises(kvconn.ConfigError, match=says) as e:
        kvconn.Agent(config)
    assert e.value.code == kvconn.Status.INVALID


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
        with pytest.raises(kvconn.AddressError, match=str(port)):
            kvconn.Agent({"engine_id": "e", "role": "prefill", "bootstrap_host": "127.0.0.1", "bootstrap_port": port})


def region(**change: object) -> kvconn.Region:
    return kvconn.Region("r", 1 << 20, 4096, 4096, 8)._replace(**change)


@pytest.mark.parametrize(
    ("regions", "says"),
    [
        ([], "no regions"),
        ([region(address=0)], "null"),
        ([region(address=(1 << 20) + 2)], "unaligned"),
        ([region(block_bytes=8192)], "stride"),
        ([region(), region()], "twice"),
        ([region(), region(name="s", address=(1 << 20) + 4096)], "overlaps"),
        ([region(group=1)], "group 0"),
        ([region(name="")], "name"),
        ([region(num_blocks=0)], "0"),
        ([region(address=-1)], "address"),
        ([region(address=(1 << 64) - 4096)], "address space"),
    ],
)
def test_bad_regions(regions: list[kvconn.Region], says: str) -> None:
    with kvconn.Agent({"engine_id": "e", "role": "decode"}) as agent, pytest.raises(kvconn.InvalidError, match=says):
        agent.register_kv_caches(regions)


@pytest.mark.parametrize("role", ["decode", "both", "prefill"])
def test_memory_that_cannot_be_written(role: str, tmp_path: Path) -> None:
    """Only an agent that never loads takes such memory. numpy's mark counts even if the pages could be written."""
    path = tmp_path / "kv"
    np.zeros((8, 4096), np.uint8).tofile(path)
    cache = np.memmap(path, np.uint8, "r", shape=(8, 4096))
    marked = np.zeros((8, 4096), np.uint8)
    marked.flags.writeable = False
    bare = [r._replace(read_only=False) for r in kvconn.regions_from_tensor("k", cache, 0)]
    config = {"engine_id": "e", "role": role, "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}
    for regions, says in (
        (kvconn.regions_from_tensor("k", cache, 0), "region 'k' .* read-only"),
        (kvconn.regions_from_tensor("k", marked, 0), "region 'k' .* read-only"),
        (bare, 'region "k".* not writable, among them block 0 of 8'),
    ):
        with kvconn.Agent(config) as agent:
            if role == "prefill":
                agent.register_kv_caches(regions)
            else:
                with pytest.raises(kvconn.InvalidError, match=says):
                    agent.register_kv_caches(regions)


def test_memory_that_is_not_there() -> None:
    with kvconn.Agent({"engine_id": "e", "role": "decode"}) as agent, pytest.raises(kvconn.InvalidError, match=r'region "r".* not mapped'):
        agent.register_kv_caches([region()])


@pytest.mark.parametrize(
    ("load", "error", "says"),
    [
        (kvconn.Load("", "http://x:1", "e", [[1]]), kvconn.InvalidError, "transfer_id"),
        (kvconn.Load("a\0b", "http://x:1", "e", [[1]]), kvconn.InvalidError, "NUL"),
        (kvconn.Load("a\ud800", "http://x:1", "e", [[1]]), kvconn.InvalidError, "surrogates"),
        (kvconn.Load("t" * 200, "http://x:1", "e", [[1]]), kvconn.InvalidError, "128"),
        (kvconn.Load("t", "", "", [[1]]), kvconn.InvalidError, "bootstrap"),
        (kvconn.Load("t", "http://x:1", "e", [[BLOCKS]]), kvconn.InvalidError, f"block id {BLOCKS}"),
        (kvconn.Load("t", "http://x:1", "e", [[1, 1]]), kvconn.InvalidError, "twice"),
        (kvconn.Load("t", "http://x:1", "e", [[-1]]), kvconn.InvalidError, "block ids"),
        (kvconn.Load("t", "http://x:1", "e", [[1], [1]]), kvconn.InvalidError, "groups"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], [1, 2]), kvconn.InvalidError, "first_block"),
        (kvconn.Load(7, "http://x:1", "e", [[1]]), kvconn.InvalidError, "transfer_id"),  # type: ignore[arg-type]
        (kvconn.Load("t", "http://x:1", "e", [[1]], [-1]), kvconn.InvalidError, "first_block.*0 to 4294967295"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], token=2**64), kvconn.InvalidError, "token.*0 to 18446744073709551615"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], token=-1), kvconn.InvalidError, "token"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], tokens=[2**32]), kvconn.InvalidError, "tokens.*0 to 4294967295"),
        (kvconn.Load("t", "http://x:1", "e", [[1]], tokens=[1, 2]), kvconn.InvalidError, "tokens has 2 groups"),
    ],
)
def test_bad_loads(decode: Side, load: kvconn.Load, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        decode.agent.start_load([load])
    assert decode.agent.stats()["outstanding"] == 0


def test_same_transfer_twice(prefill: Side, decode: Side, transfer_id: str) -> None:
    prefill.agent.announce([transfer_id])
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])
    decode.agent.start_load([load])
    with pytest.raises(kvconn.DuplicateError, match=transfer_id) as e:
        decode.agent.start_load([load])
    assert e.value.transfer_id == transfer_id
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    assert decode.finished(transfer_id).ok


def test_second_decoder_is_refused(prefill: Side, decode: Side, transfer_id: str) -> None:
    other = Side("decode", engine_id="other").register()
    load = kvconn.Load(transfer_id, prefill.agent.bootstrap_address, "engine-prefill", [[1]])
    decode.agent.start_load([load])
    prefill.until("offers_under_way", 1)
    other.agent.start_load([load._replace(block_ids=[[2]])])
    done = other.finished(transfer_id)
    assert done.code == kvconn.Status.REFUSED and "already" in done.reason
    prefill.agent.offer([kvconn.Offer(transfer_id, [[1]])])
    assert decode.finished(transfer_id).ok and prefill.finished(transfer_id).ok
    other.agent.close()


def test_overload_is_refused_and_passes() -> None:
    prefill = Side("prefill", max_transfers=4).register()
    offers = [kvconn.Offer(f"o{i}", [[1]]) for i in range(6)]
    with pytest.raises(kvconn.OverloadError, match="max_transfers") as e:
        prefill.agent.offer(offers)
    assert e.value.transfer_id == "o4"
    prefill.agent.cancel([o.transfer_id for o in offers[:4]])
    for o in offers[:4]:
        assert prefill.finished(o.transfer_id).code == kvconn.Status.CANCELLED
    prefill.agent.offer([kvconn.Offer("later", [[1]])])
    prefill.agent.close()


def test_transfers_before_registration() -> None:
    with kvconn.Agent({"engine_id": "e", "role": "decode"}) as agent, pytest.raises(kvconn.NotRegisteredError):
        agent.start_load([kvconn.Load("t", "http://x:1", "e", [[1]])])


def test_closed_agent(decode: Side) -> None:
    agent = decode.agent
    agent.close()
    agent.close()
    for call in (
        agent.get_finished,
        agent.stats,
        agent.fileno,
        lambda: agent.wait(0),
        lambda: agent.cancel(["x"]),
        lambda: agent.announce(["x"]),
        lambda: agent.register_kv_caches([]),
    ):
        with pytest.raises(kvconn.ClosedError):
            call()
    assert "closed" in repr(agent)
