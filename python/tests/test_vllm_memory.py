"""Tensors over memory of kvconn's own."""

from __future__ import annotations

import gc
import importlib.util
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
