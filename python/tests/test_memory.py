"""Memory of kvconn's own: views of it keep it, and nothing else does."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from side import BLOCK, BLOCKS, LAYERS, Side

import kvconn


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvconn")


def test_a_buffer_is_zeroed_writable_and_aligned() -> None:
    for n in (1, 4096, 5 << 20):
        buffer = kvconn.alloc(n)
        view = memoryview(buffer)
        assert (len(buffer), view.nbytes, view.readonly) == (n, n, False)
        a = np.frombuffer(buffer, np.uint8)
        assert not a.any()
        assert a.ctypes.data % (2 << 20 if n >= 2 << 20 else 4096) == 0
        a[:] = 7
        assert buffer.raw == b"\7" * n


def test_memory_lives_as_long_as_its_last_view() -> None:
    before = mapped()
    buffer = kvconn.alloc(8192)
    a = np.frombuffer(buffer, np.float32).reshape(2, 1024)
    del buffer
    row = a[1, ::2]
    del a
    row[:] = 3
    assert mapped() == before + 1
    assert float(row.sum()) == 3 * 512
    del row
    assert mapped() == before


def test_registered_memory_stays_until_close() -> None:
    before = mapped()
    agent = kvconn.Agent({"engine_id": "m0", "role": "decode"})
    cache = np.frombuffer(kvconn.alloc(1 << 20), np.uint8).reshape(16, -1)
    agent.register_kv_caches(kvconn.regions_from_tensor("k", cache, block_dim=0))
    del cache
    assert mapped() == before + 1
    agent.close()
    assert mapped() == before


def pattern() -> np.ndarray:
    return (np.arange(LAYERS * BLOCKS * BLOCK, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8).reshape(LAYERS, BLOCKS, BLOCK)


def side(role: str, shared: bool) -> Side:
    it = Side(role, transport="local")
    if shared:
        it.cache = np.frombuffer(kvconn.alloc(it.cache.nbytes), np.uint8).reshape(it.cache.shape)
    return it.register()


PREFILL = """
import sys
import kvconn, test_memory
p = test_memory.side("prefill", sys.argv[1] == "mapping")
p.cache[:] = test_memory.pattern()
p.agent.offer([kvconn.Offer("t", [list(range(16))])])
print(p.agent.bootstrap_address, flush=True)
done = p.finished("t")
print(done.ok, p.agent.stats()["pairs"][0]["how"], flush=True)
sys.stdin.read()
p.agent.close()
"""


@pytest.mark.parametrize("how", ["mapping", "process_vm_readv"])
def test_two_processes(how: str) -> None:
    run = [sys.executable, "-c", PREFILL, how]
    where = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": where}) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        address = peer.stdout.readline().strip()
        d = side("decode", True)
        try:
            blocks = [(b * 7 + 3) % BLOCKS for b in range(BLOCKS)]
            d.agent.start_load([kvconn.Load("t", address, "engine-prefill", [blocks])])
            done = d.finished("t")
            assert (done.ok, done.transport) == (True, "local"), done
            assert (d.cache[:, blocks] == pattern()).all()
            stats = d.agent.stats()
            assert stats["pairs"][0]["how"] == how
            assert stats["transports"]["local"]["counters"][f"bytes_by_{how}"] == done.bytes == d.cache.nbytes
            assert peer.stdout.readline().split() == ["True", how]
        finally:
            d.agent.close()
            peer.stdin.close()
    assert peer.returncode == 0


@pytest.mark.parametrize("n", [0, -1, 1 << 63, 1 << 62])
def test_lengths_that_cannot_be_are_refused(n: int) -> None:
    with pytest.raises(kvconn.InvalidError, match="want"):
        kvconn.alloc(n)


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(kvconn.KvconnError, match="available") as e:
        kvconn.alloc(1 << 45)
    assert e.value.code == kvconn.Status.SYSTEM
    with pytest.raises(TypeError):
        kvconn.alloc(1.5)  # type: ignore[arg-type]


def test_a_child_of_fork_has_it_not() -> None:
    buffer = kvconn.alloc(4096)
    child = os.fork()
    if child == 0:
        try:
            kvconn.alloc(1)
        except kvconn.ForkedError:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os._exit(buffer[0][0])
        os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV
