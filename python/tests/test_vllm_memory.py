"""Tensors over memory of kvconn's own."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import torch

import kvconn
from kvconn import memory


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvconn")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64])
def test_a_tensor_of_any_type(dtype: torch.dtype) -> None:
    t = memory.empty((3, 5, 7), dtype)
    assert (t.dtype, t.shape, t.is_contiguous(), t.device.type) == (dtype, (3, 5, 7), True, "cpu")
    assert not t.view(torch.uint8).any()
    assert t.data_ptr() % 4096 == 0
    want = torch.arange(3 * 5 * 7).view(3, 5, 7).to(dtype)
    t.copy_(want)
    assert torch.equal(t.view(torch.uint8), want.view(torch.uint8))


def test_shapes() -> None:
    assert memory.empty(5).shape == (5,) and memory.empty(5).dtype == torch.get_default_dtype()
    assert memory.empty(()).shape == ()
    assert memory.empty(torch.Size([2, 3])).shape == (2, 3)
    with pytest.raises(kvconn.InvalidError, match="0 bytes"):
        memory.empty((4, 0))
    with pytest.raises(kvconn.InvalidError, match=r"\(-1, -2\)"):
        memory.empty((-1, -2))


def test_a_tensor_keeps_the_memory_and_lets_it_go() -> None:
    before = mapped()
    t = memory.empty((4, 2, 1 << 17), torch.float16)
    t.fill_(1.5)
    part = t[3, 1]
    del t
    assert mapped() == before + 1
    assert float(part.float().sum()) == 1.5 * part.numel()
    regions = kvconn.regions_from_tensor("k", part.view(16, -1), block_dim=0)
    assert regions[0].address == part.data_ptr()
    del part
    assert mapped() == before


def test_an_agent_keeps_a_tensors_memory() -> None:
    before = mapped()
    agent = kvconn.Agent({"engine_id": "t0", "role": "decode"})
    cache = memory.empty((16, 4096), torch.uint8)
    agent.register_kv_caches(kvconn.regions_from_tensor("k", cache, block_dim=0))
    del cache
    assert mapped() == before + 1
    agent.close()
    assert mapped() == before


LAYERS, BLOCKS, ROWS, HEADS = 2, 16, 16, 128


def cache() -> torch.Tensor:
    return memory.empty((LAYERS, BLOCKS, ROWS, HEADS), torch.bfloat16)


def pattern() -> torch.Tensor:
    """Bit patterns of any kind, NaN too: bytes are compared."""
    n = LAYERS * BLOCKS * ROWS * HEADS
    return ((torch.arange(n, dtype=torch.int64) * 2654435761) >> 13).to(torch.int16).view(torch.bfloat16).view(LAYERS, BLOCKS, ROWS, HEADS)


def opened(role: str, tensor: torch.Tensor) -> kvconn.Agent:
    # Two processes import torch and write memory: a peer that is late is not gone.
    config: dict[str, object] = {"engine_id": f"torch-{role}", "role": role, "transport": "local"}
    config |= {"connect_timeout_s": 60, "peer_timeout_s": 60}
    if role == "prefill":
        config |= {"bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
    agent = kvconn.Agent(config)
    agent.register_kv_caches([r for i in range(LAYERS) for r in kvconn.regions_from_tensor(f"layer.{i}", tensor[i], block_dim=0)])
    return agent


def end_of(agent: kvconn.Agent, transfer: str) -> kvconn.Completion:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for done in agent.get_finished():
            assert done.transfer_id == transfer, done
            return done
        agent.wait(1)
    raise AssertionError(f"no completion within 60 s: {agent.stats()}")


PREFILL = """
import sys
import kvconn, test_vllm_memory as here
tensor = here.cache()
agent = here.opened("prefill", tensor)
tensor.copy_(here.pattern())
agent.offer([kvconn.Offer("t", [list(range(here.BLOCKS))])])
print(agent.bootstrap_address, flush=True)
done = here.end_of(agent, "t")
print(done.ok, agent.stats()["pairs"][0]["how"], flush=True)
sys.stdin.read()
agent.close()
"""


def test_two_processes() -> None:
    """The tensor of one process is mapped by the other one, whose tensor gets its bytes."""
    where = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    run = [sys.executable, "-c", PREFILL]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": where}) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        address = peer.stdout.readline().strip()
        before = mapped()
        tensor = cache()
        agent = opened("decode", tensor)
        try:
            blocks = [(b * 7 + 3) % BLOCKS for b in range(BLOCKS)]
            agent.start_load([kvconn.Load("t", address, "torch-prefill", [blocks])])
            done = end_of(agent, "t")
            assert (done.ok, done.transport) == (True, "local"), done
            assert torch.equal(tensor[:, blocks].view(torch.int16), pattern().view(torch.int16))
            stats = agent.stats()
            assert stats["pairs"][0]["how"] == "mapping"
            assert stats["transports"]["local"]["counters"]["bytes_by_mapping"] == done.bytes == tensor.nbytes
            assert mapped() == before + 2  # its own, and prefill's
            assert peer.stdout.readline().split() == ["True", "mapping"]
        finally:
            agent.close()
            peer.stdin.close()
        assert mapped() == before + 1
        del tensor
        assert mapped() == before
    assert peer.returncode == 0
