"""What this machine is, as far as it decides about caches in GPU memory: MPS, MIG, confidential computing, NUMA. Prints JSON.

A question that this machine cannot answer stands there as not asked, with the reason, and is printed as NOT ASKED. Nothing is judged: the
status is 1 only if a question ended in an error.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

from caches import Driver

HERE = Path(__file__).resolve().parent
SECONDS = 300
# CUdevice_attribute
COMPUTE_MODE, MPS_ENABLED, HOST_NUMA_ID = 20, 133, 134
PORTABLE = 1  # of cuMemHostAlloc, as kvconn's ring
RING = 4 << 20
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # the system call

CLIENT = "MPS: do moments, IPC handles and the copy kernel work in a client"
OTHER_CLIENT = "MPS: does a client's fault end the others"
INSTANCE = "MIG: what is an instance's UUID"
TWO_INSTANCES = "MIG: can two instances open each other's memory"
BOUNCED = "confidential computing: are pinned copies bounced, and are IPC and dma-buf refused"
GPU_NODE = "NUMA: on which node does the GPU lie"
RING_NODE = "NUMA: on which node do the ring's pages lie"
FAR_RING = "NUMA: how much slower is a ring on another node"


class Asked:
    """The answers of one topic, and which questions were not asked, and why."""

    def __init__(self) -> None:
        self.not_asked: dict[str, str] = {}

    def skip(self, question: str, reason: str) -> None:
        self.not_asked[question] = reason


def output(*command: str, seconds: int = 20, **more: str) -> tuple[Optional[str], str]:
    """What a command prints; None and the reason where it is not there, fails or does not end."""
    if shutil.which(command[0]) is None:
        return None, f"there is no {Path(command[0]).name}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ | more, check=False)
    except subprocess.TimeoutExpired:
        return None, f"{Path(command[0]).name} has not ended within {seconds} s"
    said = (done.stdout + done.stderr).strip()
    return (None, f"{Path(command[0]).name} ends with {done.returncode}: {said[-300:]}") if done.returncode else (done.stdout, "")


def attribute(driver: Driver, number: int) -> Optional[int]:
    """None where the driver does not know it."""
    with contextlib.suppress(OSError):
        return driver.number("cuDeviceGetAttribute", number, driver.device)
    return None


def numbers(text: str) -> list[int]:
    """Of a list as the kernel writes them: "0-3,8"."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return [i for p in parts for i in range(int(p[0]), int(p[-1]) + 1)]


def read(path: str) -> Optional[str]:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")  # a process may have any name
    return None


def mps(driver: Driver, asked: Asked) -> dict[str, Any]:
    """The driver says itself whether contexts are shared by MPS, if it is new enough; else the pipe that a client would take does."""
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    said = {
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("CUDA_MPS_")},
        "pipe_directory": pipe,
        "control": os.path.exists(f"{pipe}/control"),
        "processes": sum((read(path) or "").startswith("nvidia-cuda-mps") for path in glob.glob("/proc/[0-9]*/comm")),
        "attribute": attribute(driver, MPS_ENABLED),
        "compute_mode": attribute(driver, COMPUTE_MODE),
    }
    said["in_use"] = bool(said["control"] if said["attribute"] is None else said["attribute"])
    if not said["in_use"]:
        why = "the driver says that contexts are not shared" if said["attribute"] is not None else f"there is no {pipe}/control"
        asked.skip(CLIENT, f"MPS is not in use here: {why}")
        asked.skip(OTHER_CLIENT, "MPS is not in use here")
        return said
    said["client"] = "all parts of this run ran in clients"
    out, why = output(str(HERE / "kvgpu-facts"), "--only", "kernels-astray", seconds=SECONDS)
    if out is None and " ends with 1: " not in why:  # 1: a fact differs, as it may in a client
        asked.skip(OTHER_CLIENT, why)
    else:  # kernels of another process read where nothing is: does this one's context live?
        said["after_another_client_s_fault"] = code_of(driver)
    return said


def code_of(driver: Driver) -> int:
    """What a copy of this process ends with."""
    p = c.c_uint64()
    for name, args in (
        ("cuMemAlloc_v2", (c.byref(p), c.c_size_t(4096))),
        ("cuMemsetD8_v2", (p, c.c_ubyte(1), c.c_size_t(4096))),
        ("cuCtxSynchronize", ()),
    ):
        code = getattr(driver.lib, name)(*args)
        if code:
            return int(code)
    return 0


def uuid(driver: Driver, function: str) -> Optional[str]:
    out = c.create_string_buffer(16)
    try:
        driver.call(function, out, driver.device)
    except (AttributeError, OSError):
        return None
    text = out.raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def mig(driver: Driver, asked: Asked) -> dict[str, Any]:
    """cuDeviceGetUuid names the GPU, and its second version the instance."""
    listed, why = output("nvidia-smi", "-L")
    said = {
        "uuid": uuid(driver, "cuDeviceGetUuid"),
        "uuid_v2": uuid(driver, "cuDeviceGetUuid_v2"),
        "instances": re.findall(r"UUID: (MIG-[^)\s]+)\)", listed or ""),
        "instances_in_proc": len(glob.glob("/proc/driver/nvidia/capabilities/gpu*/mig/gi*")),
    }
    if listed is None:
        said["nvidia_smi"] = why
    divided = said["instances"] or said["instances_in_proc"] or said["uuid"] != said["uuid_v2"]
    if not divided:
        asked.skip(INSTANCE, "the GPU is not divided")
        asked.skip(TWO_INSTANCES, "the GPU is not divided")
    elif len(said["instances"]) < 2:
        asked.skip(TWO_INSTANCES, why or f"nvidia-smi -L lists {len(said['instances'])} instance")
    else:
        first, second = said["instances"][:2]
        out, why = output(sys.executable, str(HERE / "environment.py"), "between", second, seconds=SECONDS, CUDA_VISIBLE_DEVICES=first)
        if out is None:
            asked.skip(TWO_INSTANCES, why)
        else:
            said["between_two"] = json.loads(out)
    return said


def between(second: str) -> int:
    """One transfer by local to this process's instance from another one's."""
    from transfers import Other, transfer

    try:
        said = transfer("cuMemAlloc", "cuMemAlloc", by="local", other=Other(0, second))
    except Exception as e:
        said = {"ok": False, "reason": f"{type(e).__name__}: {e}"}
    print(json.dumps(said))
    return 0


def confidential(_: Driver, asked: Asked) -> dict[str, Any]:
    out, why = output("nvidia-smi", "conf-compute", "-f")
    status = re.search(r"CC status: *(\S+)", out or "")
    guest = [flag for flag in ("tdx_guest", "sev_snp") if re.search(rf"\b{flag}\b", read("/proc/cpuinfo") or "")]
    said: dict[str, Any] = {"nvidia_smi": (out or why).strip()[:300], "guest": guest}
    said["guest_devices"] = [path for path in ("/dev/tdx_guest", "/dev/sev-guest") if os.path.exists(path)]
    said["on"] = None if status is None else status[1].upper() == "ON"
    if status is None:
        asked.skip(BOUNCED, why or f"nvidia-smi does not say: {(out or '').strip()[:100]}")
    elif not said["on"]:
        asked.skip(BOUNCED, f"nvidia-smi says {status[0]}")
    else:
        said["answers"] = "the speed of copies, the facts 291 and 310, and the transfers by local of this run"
    return said


def nodes_by_kernel(at: int, size: int) -> tuple[list[int], str]:
    """The nodes of pages, by move_pages, which moves none here; or why the kernel does not tell."""
    number = MOVE_PAGES.get(platform.machine())
    if number is None:
        return [], f"the number of move_pages on {platform.machine()} is not known here"
    page = os.sysconf("SC_PAGESIZE")
    n = size // page
    pages, status = (c.c_void_p * n)(*range(at, at + n * page, page)), (c.c_int * n)()
    libc = c.CDLL(None, use_errno=True)
    if libc.syscall(c.c_long(number), c.c_int(0), c.c_ulong(n), pages, None, status, c.c_int(0)):
        return [], f"move_pages: {os.strerror(c.get_errno())}"
    if min(status) < 0:
        return [], f"move_pages: a page: {os.strerror(-min(status))}"
    return sorted(set(status)), ""


def nodes_by_maps(at: int, maps: Optional[str]) -> tuple[list[int], str]:
    """Of the mapping that an address lies in, by numa_maps."""
    below = [line for line in (maps or "").splitlines() if int(line.split()[0], 16) <= at]
    if not below:
        return [], "there is no /proc/self/numa_maps" if maps is None else "numa_maps has no such mapping"
    line = max(below, key=lambda line: int(line.split()[0], 16))
    found = sorted(int(node) for node in re.findall(r"\bN(\d+)=", line))
    return found, "" if found else f"numa_maps counts no pages: {line[:100]}"


@contextlib.contextmanager
def on_node(cpus: set[int]) -> Iterator[None]:
    """On these processors, from where the kernel and the driver take memory of their node first."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numa(driver: Driver, asked: Asked, sys_at: str = "/sys") -> dict[str, Any]:
    place = c.create_string_buffer(32)
    driver.call("cuDeviceGetPCIBusId", place, 32, driver.device)
    name = place.value.decode().lower()
    own = read(f"{sys_at}/bus/pci/devices/{name}/numa_node")
    if own is None or int(own) < 0:
        asked.skip(GPU_NODE, f"the kernel does not say for {name}" if own else f"there is no {sys_at}/bus/pci/devices/{name}")
    node = f"{sys_at}/devices/system/node"
    online = numbers(read(f"{node}/online") or "")
    cpus = {i: set(numbers(read(f"{node}/node{i}/cpulist") or "")) & os.sched_getaffinity(0) for i in online}
    said: dict[str, Any] = {"nodes": online, "gpu": name, "gpu_node": None if own is None else int(own)}
    said |= {"host_node_by_driver": attribute(driver, HOST_NUMA_ID), "process_nodes": [i for i, of in cpus.items() if of]}
    pinned = c.c_void_p()
    driver.call("cuMemHostAlloc", c.byref(pinned), c.c_size_t(RING), PORTABLE)
    assert pinned.value
    c.memset(pinned, 1, RING)
    said["ring_nodes"], why = nodes_by_kernel(pinned.value, RING)
    if why:
        said["ring_nodes"], more = nodes_by_maps(pinned.value, read("/proc/self/numa_maps"))
        why = f"{why}; {more}" if more else ""
    driver.call("cuMemFreeHost", pinned)
    if why:
        asked.skip(RING_NODE, why)
    reached = {i: of for i, of in cpus.items() if of}
    if len(reached) < 2:
        asked.skip(FAR_RING, f"there are processors of {len(reached)} node for this process")
        return said
    said["speed"] = {}
    for i, of in reached.items():
        with on_node(of):
            out, why = output(str(HERE / "kvgpu-facts"), "--speed", seconds=SECONDS)
        said["speed"][str(i)] = {"error": why} if out is None else json.loads(out)
    return said


TOPICS: dict[str, tuple[Callable[[Driver, Asked], dict[str, Any]], list[str]]] = {
    "mig": (mig, [INSTANCE, TWO_INSTANCES]),
    "confidential_computing": (confidential, [BOUNCED]),
    "numa": (numa, [GPU_NODE, RING_NODE, FAR_RING]),
    "mps": (mps, [CLIENT, OTHER_CLIENT]),  # last: it provokes a fault, which may end this process's context too
}


def main() -> int:
    driver, asked = Driver(0), Asked()
    said: dict[str, Any] = {"device": driver.name(), "double": driver.double}
    failed = False
    for topic, (ask, questions) in TOPICS.items():
        try:
            said[topic] = ask(driver, asked)
        except Exception as e:
            failed, why = True, f"{type(e).__name__}: {e}"
            said[topic] = {"error": why}
            for question in questions:
                asked.skip(question, why)
    for question, reason in asked.not_asked.items():
        print(f"NOT ASKED: {question}: {reason}", file=sys.stderr)
    print(json.dumps({**said, "not_asked": asked.not_asked}, indent=2))
    return int(failed)


if __name__ == "__main__":
    sys.exit(between(sys.argv[2]) if sys.argv[1:2] == ["between"] else main())
