"""What a host gets that cannot have its caches in device memory, or loses them: an error with the value and the remedy, and it lives on.

Each case is a process of its own, since a process opens one driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_device import DOUBLE

import kvconn

pytestmark = pytest.mark.skipif(not DOUBLE.is_file(), reason="NOT RUN: the driver double is not built, see `make gpu-double`")

BEGIN = """
import ctypes as c, sys
import kvconn
from test_device import BLOCK, BLOCKS, LAYERS, DeviceSide, Gpu, load
from kvconn import Memory

def attempt(address, size=BLOCK, memory=Memory.DEVICE):
    agent = kvconn.Agent({"engine_id": "e", "role": "decode"})
    try:
        agent.register_kv_caches([kvconn.Region("layer.0", address, size, size, BLOCKS, memory=memory)])
        print("taken")
    except kvconn.KvconnError as e:
        print(type(e).__name__, kvconn.Status(e.code).name.lower(), e)
    finally:
        agent.close()
"""
END = "print('the process lives')"


def begin(code: str, **env: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "KVCONN_LIBCUDA": str(DOUBLE), **env}
    command = [sys.executable, "-c", BEGIN + code + "\n" + END]
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=Path(__file__).parent, env=environment, stdin=out, stdout=out, stderr=out, text=True)


def ended(child: subprocess.Popen[str], say: str = "") -> str:
    try:
        stdout, stderr = child.communicate(say, timeout=60)
    except subprocess.TimeoutExpired:
        child.kill()
        stdout, stderr = child.communicate()
    assert child.returncode == 0 and END[7:-2] in stdout, stdout + stderr
    return stdout


def outcome(code: str, **env: str) -> str:
    return ended(begin(code, **env))


SOMEWHERE = "attempt(0x7f0000000000)"
CASES = {
    "no driver": (
        SOMEWHERE,
        {"KVCONN_LIBCUDA": "/nowhere/libcuda.so"},
        "KvconnError system",
        'region "layer.0"',
        "/nowhere/libcuda.so",
        "install NVIDIA's driver, start the container with GPUs (docker run --gpus all)",
    ),
    "a library that is no driver": (
        SOMEWHERE,
        {"KVCONN_LIBCUDA": "libc.so.6"},
        "libc.so.6 has no cuInit",
        "install a driver of CUDA 12.2 or newer",
    ),
    "no device": (
        SOMEWHERE,
        {"KVGPU_DEVICES": "0"},
        "KvconnError system",
        "CUDA_ERROR_NO_DEVICE (100)",
        "see nvidia-smi, CUDA_VISIBLE_DEVICES",
    ),
    "all devices hidden": (SOMEWHERE, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_ERROR_NO_DEVICE (100)", "docker run --gpus all"),
    "an older driver": (
        SOMEWHERE,
        {"KVGPU_DRIVER": "11080"},
        "is of CUDA 11.8, and CUDA 12.2 or newer is needed",
        "install a newer driver",
    ),
    "a driver of other kernel modules": (SOMEWHERE, {"KVGPU_FAIL": "cuInit:1:803"}, "(803)", "load the new modules, or restart the host"),
    "a container without the fabric": (SOMEWHERE, {"KVGPU_FAIL": "cuInit:1:802"}, "(802)", "see nvidia-fabricmanager"),
    "a child made by fork": (SOMEWHERE, {"KVGPU_FAIL": "cuInit:1:3"}, "(3)", "was it forked from one that uses CUDA? Use spawn"),
    "no context": (SOMEWHERE, {}, "KvconnError system", "no primary context is active", "a tensor on it is enough"),
    "another context": (
        """
gpu, other, address = Gpu(), c.c_void_p(), c.c_uint64()
gpu.call("cuCtxCreate_v2", c.byref(other), 0, 0)
gpu.call("cuMemAlloc_v2", c.byref(address), c.c_size_t(BLOCKS * BLOCK))
gpu.call("cuCtxPopCurrent_v2", None)
attempt(address.value)""",
        {},
        "InvalidError invalid",
        "memory of another context than the device's primary one",
        "kvconn uses primary contexts",
    ),
    "another process's address": (
        "gpu = Gpu()\n" + SOMEWHERE,
        {},
        "InvalidError invalid",
        "0x7f0000000000 is no memory of CUDA's in this process",
        "another process's address",
    ),
    "pageable memory": (
        "gpu, room = Gpu(), c.create_string_buffer(2 * BLOCKS * BLOCK)\nattempt(c.addressof(room) // 4096 * 4096 + 4096)",
        {},
        "InvalidError invalid",
        "no memory of CUDA's in this process: host memory",
        "Declare host memory as such",
    ),
    "pinned memory": (
        """
gpu, pinned = Gpu(), c.c_void_p()
gpu.call("cuMemHostAlloc", c.byref(pinned), c.c_size_t(BLOCKS * BLOCK), 0)
attempt(pinned.value)""",
        {},
        "InvalidError invalid",
        "pinned host memory: declare it as host memory",
    ),
    "managed memory": (
        """
gpu, managed = Gpu(), c.c_uint64()
gpu.call("cuMemAllocManaged", c.byref(managed), c.c_size_t(BLOCKS * BLOCK), 1)
attempt(managed.value)""",
        {},
        "InvalidError invalid",
        "managed memory, which moves between host and devices",
    ),
    "device memory as host memory": (
        "attempt(Gpu().cache().address, memory=Memory.HOST)",
        {},
        "InvalidError invalid",
        'region "layer.0"',
        "not readable",
    ),
    "an unaligned region": ("attempt(Gpu().cache().address + 2)", {}, "InvalidError invalid", "layer.0", "multiple"),
    "a region beyond its allocation": (
        "attempt(Gpu().cache().address + LAYERS * BLOCKS * BLOCK - BLOCK)",
        {},
        "InvalidError invalid",
        'region "layer.0"',
        "only the first 65536 are there",
    ),
    "pinned memory that cannot be had": (
        "attempt(Gpu().cache().address)",
        {"KVGPU_FAIL": "cuMemHostAlloc:1:2"},
        "(2)",
        "make the ring of pinned memory smaller",
    ),
    "memory that was freed": (
        """
gpu = Gpu()
p, d = DeviceSide(gpu, "prefill"), DeviceSide(gpu, "decode")
p.register(), d.register()
p.agent.offer([kvconn.Offer("t", [[1]])])
gpu.call("cuMemFree_v2", c.c_uint64(d.device.address))
load(p, d, [1])
print(d.finished("t").reason)
d.agent.close(), p.agent.close()""",
        {},
        "region layer.0: its memory at ",
        "was freed or mapped anew since it was registered",
        "register a cache that was allocated anew with another agent",
    ),
    "a device that is lost": (
        """
gpu = Gpu()
p, d = DeviceSide(gpu, "prefill"), DeviceSide(gpu, "decode")
p.register(), d.register()
load(p, d, [1])
gpu.lib.kvgpu_stick(0, 719)
p.agent.offer([kvconn.Offer("t", [[1]])])
print(p.finished("t").reason)
d.agent.close(), p.agent.close()""",
        {},
        "CUDA_ERROR_LAUNCH_FAILED (719)",
        "; see the kernel's log for NVRM Xid, and restart the engine",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refusal(case: str) -> None:
    code, env, *says = CASES[case]
    text = outcome(code, **env)
    for say in says:
        assert say in text


def test_the_oldest_driver_will_do() -> None:
    """It lacks the call that copies in batches."""
    old = DOUBLE.with_name("libkvgpu-double-old.so")
    assert "taken" in outcome("attempt(Gpu().cache().address)", KVCONN_LIBCUDA=str(old))


def test_hidden_devices_do_not_matter() -> None:
    """Each process numbers its devices from 0 on: the one that is 1 elsewhere is 0 here."""
    assert "taken" in outcome("attempt(Gpu().cache().address)", CUDA_VISIBLE_DEVICES="1")


def test_processes_that_see_other_devices() -> None:
    """What is device 0 to prefill is device 0 to decode too, and another one: only the memory's own process names it."""
    prefill = begin(
        """
gpu = Gpu()
p, stream = DeviceSide(gpu, "prefill"), gpu.stream()
p.register()
for layer in range(LAYERS):
    gpu.kernel(stream, p.device.block(layer, 1), 7 + layer)
p.agent.offer([kvconn.Offer("t", [[1]], after=p.agent.moment(0, stream))])
print(p.agent.bootstrap_address, flush=True)
print("offer", p.finished("t").code)
p.agent.close()""",
        CUDA_VISIBLE_DEVICES="0",
    )
    decode = begin(
        """
gpu = Gpu()
d = DeviceSide(gpu, "decode")
d.register()
d.agent.start_load([kvconn.Load("t", input(), "engine-prefill", [[3]])])
print("load", d.finished("t").code, sum(gpu.wrong(d.device.block(layer, 3), 7 + layer) for layer in range(LAYERS)))
d.agent.close()""",
        CUDA_VISIBLE_DEVICES="1",
    )
    assert prefill.stdout
    address = prefill.stdout.readline()
    assert "load 0 0" in ended(decode, address) and "offer 0" in ended(prefill)


def test_host_memory_opens_no_driver() -> None:
    code = "room = c.create_string_buffer(2 * BLOCKS * BLOCK)\nattempt(c.addressof(room) // 4096 * 4096 + 4096, memory=Memory.HOST)"
    maps = '\nprint("driver" if "libkvgpu" in open("/proc/self/maps").read() else "none")'
    assert outcome(code + maps, KVCONN_LIBCUDA=str(DOUBLE)).split()[:2] == ["taken", "none"]
    assert kvconn.Memory.HOST == 0
