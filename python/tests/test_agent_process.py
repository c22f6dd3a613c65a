"""An agent and the process that it lives in: forks, signals, output, memory, the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **env})


def test_forked_child_gets_an_error() -> None:
    r = run(
        """
import os, signal, kvconn
a = kvconn.Agent({"engine_id": "e", "role": "decode"})
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    errors = 0
    for call in (a.get_finished, a.stats, lambda: kvconn.Agent({"engine_id": "e", "role": "decode"})):
        try:
            call()
        except kvconn.ForkedError:
            errors += 1
    os._exit(0 if errors == 3 else 1)
assert os.waitpid(pid, 0)[1] == 0
a.close()
"""
    )
    assert r.returncode == 0, r.stderr


def test_fork_before_first_use_is_fine() -> None:
    r = run(
        """
import os, signal, kvconn
pid = os.fork()
signal.alarm(60)
kvconn.Agent({"engine_id": "e", "role": "decode"}).close()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""
    )
    assert r.returncode == 0, r.stderr


def test_import_loads_no_library() -> None:
    r = run(
        """
import sys, kvconn
assert "ctypes" not in sys.modules and "libkvconn" not in open("/proc/self/maps").read()
from kvconn import Agent
assert "libkvconn" not in open("/proc/self/maps").read()
Agent({"engine_id": "e", "role": "decode"}).close()
assert "libkvconn" in open("/proc/self/maps").read()
"""
    )
    assert r.returncode == 0, r.stderr


def test_missing_library_says_what_to_do() -> None:
    r = run("import kvconn; kvconn.Agent({})", KVCONN_LIBRARY="/nowhere/libkvconn.so")
    assert r.returncode != 0 and "KVCONN_LIBRARY" in r.stderr


def test_host_keeps_its_signals_and_output() -> None:
    r = run(
        """
import signal, kvconn
before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
a = kvconn.Agent({"engine_id": "e", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
assert before == {s: signal.getsignal(s) for s in before}
caught = []
signal.signal(signal.SIGINT, lambda *_: caught.append(1))
signal.raise_signal(signal.SIGINT)
assert caught == [1]
a.close()
"""
    )
    assert (r.returncode, r.stdout, r.stderr) == (0, "", "")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    r = run(
        """
import os, tempfile, time, kvconn
def once():
    a = kvconn.Agent({"engine_id": "e", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
    a.close()
once()
fds = len(os.listdir("/proc/self/fd"))
for _ in range(5):
    once()
until = time.monotonic() + 30  # the other end of a connection may close a moment later
while len(os.listdir("/proc/self/fd")) > fds:
    assert time.monotonic() < until, (fds, os.listdir("/proc/self/fd"))
    time.sleep(0.01)
left = [f for f in os.listdir(tempfile.gettempdir()) if f.startswith("kvconn")]
assert not left, left
""",
        TMPDIR=str(tmp_path),
    )
    assert r.returncode == 0, r.stderr


def test_killed_with_a_child(tmp_path: Path) -> None:
    """A child that was forked has the lock of its parent's folder too. The folder of a killed agent goes while the child lives."""
    token = '{"engine_id": "e", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "nats_token": "sixteen-characters"}'
    r = run(
        f"""
import json, os, signal, time, kvconn
agent = kvconn.Agent(json.loads('{token}') | {{"role": "prefill"}})
child = os.fork()
if child == 0:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    time.sleep(100)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
        TMPDIR=str(tmp_path),
    )
    assert r.returncode == -signal.SIGKILL, r.stdout + r.stderr
    child = int(r.stdout)
    try:
        (folder,) = tmp_path.glob("kvconn-nats-*")
        assert str(folder / "lock") in [os.readlink(each) for each in Path(f"/proc/{child}/fd").iterdir()]
        r = run(
            f"""
import json, os, sys, time, kvconn
with kvconn.Agent(json.loads('{token}') | {{"role": "decode"}}):
    until = time.monotonic() + 60
    while left := os.listdir("{tmp_path}"):
        assert time.monotonic() < until, left
        time.sleep(0.01)
""",
            TMPDIR=str(tmp_path),
        )
        assert r.returncode == 0, r.stdout + r.stderr
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_host_process_stays_small() -> None:
    # A thread that is blocked in a system call for long on a busy machine has Go make another. What the agent needs shows in each try.
    tries: list[dict[str, float]] = []
    while not tries or min(used["mb"] for used in tries) > 40 or min(used["threads"] for used in tries) > 12:
        assert len(tries) < 20, tries
        tries.append(small_process())


def small_process() -> dict[str, float]:
    """What an agent takes in a process of its own: MB and threads."""
    r = run(
        """
import json, os, kvconn
def rss():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) / 1024
from kvconn import agent, errors, logs, types, _lib
before, threads = rss(), len(os.listdir("/proc/self/task"))
a = kvconn.Agent({"engine_id": "e", "role": "both", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0})
import ctypes, mmap
memory = mmap.mmap(-1, 1 << 15)
a.register_kv_caches([kvconn.Region("r", ctypes.addressof(ctypes.c_char.from_buffer(memory)), 4096, 4096, 8)])
print(json.dumps({"mb": rss() - before, "threads": len(os.listdir("/proc/self/task")) - threads}))
a.close()
"""
    )
    used: dict[str, float] = json.loads(r.stdout)
    return used


def test_command_line() -> None:
    command = [sys.executable, "-m", "kvconn"]
    r = subprocess.run([*command, "demo"], capture_output=True, text=True, timeout=120)
    assert r.returncode == 0 and r.stdout.count("verified") == 5, r.stdout + r.stderr
    r = subprocess.run(
        [*command, "bench", "--block", "16K", "--total", "8M", "--rounds", "2", "--transfers", "5", "--token", "--iperf3=false", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    (row,) = json.loads(r.stdout)["results"]
    assert row["block_bytes"] == 16384 and row["total_bytes"] == 8 << 20 and row["transfers"] == 5 and row["median_gb_per_s"] > 0
    assert set(row) >= {"transport", "best_gb_per_s", "iperf3_gb_per_s"}
    assert row["transport"] == "local" and row["process_vm_readv_gb_per_s"] > 0 and row["with_token_median_gb_per_s"] > 0, row
    assert row["how"] == "process_vm_readv" and row["memcpy_gb_per_s"] > 0 and "memcpy_of_shared_memory_gb_per_s" not in row, row
    r = subprocess.run([*command, "doctor", "--json"], capture_output=True, text=True, timeout=120)
    found = json.loads(r.stdout)
    assert found["local"]["available"] and found["local"]["tried"] and found["auto"].startswith("local with engines of this host"), found
    for args, says in (([], "Usage"), (["cook"], "cook"), (["bench", "--block", "3"], "block"), (["proxy"], "--prefill")):
        r = subprocess.run([*command, *args], capture_output=True, text=True, timeout=60)
        assert r.returncode == 2 or (args == ["proxy"] and r.returncode != 0), (args, r)
        assert says in r.stderr, (args, r.stderr)


def test_bench_of_shared_memory() -> None:
    """What local maps is measured beside memcpy out of such memory, in JSON and in words."""
    command = [sys.executable, "-m", "kvconn", "bench", "--memory", "shared", "--block", "16K", "--total", "8M", "--rounds", "2"]
    r = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    (row,) = json.loads(r.stdout)["results"]
    figures = [row[of + "_gb_per_s"] for of in ("median", "process_vm_readv", "memcpy", "memcpy_of_shared_memory")]
    assert (row["transport"], row["how"]) == ("local", "mapping") and all(figure > 0 for figure in figures), row
    r = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = r"by mapping; .* plain loop ([\d.]+) .* memcpy by one thread ([\d.]+) .* out of shared memory ([\d.]+) GB/s"
    found = re.search(said, r.stdout)
    assert found and all(float(figure) > 0 for figure in found.groups()), r.stdout + r.stderr


def test_environment_is_the_one_of_now(tmp_path: Path) -> None:
    """Go's copy of the environment is of the process's beginning, and engines overwrite it with a title (setproctitle)."""
    code = """
import os, pathlib, sys
os.environ["TMPDIR"] = sys.argv[1]
import kvconn
config = {"engine_id": "p", "role": "prefill", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}
with kvconn.Agent(config | {"nats_token": "sixteen-characters"}):
    assert list(pathlib.Path(sys.argv[1]).glob("kvconn-nats-*")), os.listdir(sys.argv[1])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
