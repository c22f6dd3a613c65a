"""Tests of scripts/rxe-vm and scripts/rdma-test.sh: what becomes of them when an emulated machine dies. The machines are doubles."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent
HANG_S = 60.0

# In place of QEMU. What host N does is the shell text of HOST_N, which knows the run's folder and where each host's process is told.
QEMU = """#!/bin/bash
[[ "$*" =~ rxerun=([^ ]+)\\ rxehost=([01]) ]] || exit 9
run=${BASH_REMATCH[1]} host=${BASH_REMATCH[2]}
echo $$ >"$run/pid$host"
ended() { until [[ -s $run/pid$1 ]] && ! kill -0 "$(<"$run/pid$1")" 2>/dev/null; do sleep 0.02; done; }
text=HOST_$host
eval "${!text}"
"""
# In place of rxe-vm. What its Nth start does is the shell text of MACHINE_N.
MACHINE = """#!/bin/bash
[[ $1 != --prepare ]] || exit 0
printf x >>{starts}
text=MACHINE_$(wc -c <{starts})
eval "${{!text}}"
"""
DIES, FAILS, ENDS, STAYS = "exit 0", "echo 3 >$run/rc$host", "echo 0 >$run/rc$host", "exec sleep 600"


@pytest.fixture
def doubles(tmp_path: Path) -> dict[str, str]:
    """An environment in which rxe-vm is prepared and starts doubles of its machines."""
    script, cache, commands = SCRIPTS / "rxe-vm", tmp_path / "cache", tmp_path / "bin"
    (cache / "kernel").mkdir(parents=True)
    commands.mkdir()
    modules = re.search(r'^modules="(.*)"$', script.read_text(), re.MULTILINE)
    assert modules
    (cache / "kernel" / "modules").write_text(modules[1] + "\n")
    (cache / f"initrd.{hashlib.sha256(script.read_bytes()).hexdigest()[:16]}").write_text("x")
    answers = {"dpkg-query": "echo ii", "apt-get": "exit 9", "uname": "echo x86_64"}
    for name, text in {"qemu-system-x86_64": QEMU, **{name: f"#!/bin/sh\n{text}\n" for name, text in answers.items()}}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "RXE_VM_CACHE": str(cache)}


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        pytest.param((STAYS, DIES), 125, id="the second dies and the first goes on"),
        pytest.param((DIES, STAYS), 125, id="the first dies and the second goes on"),
        pytest.param(("ended 1; sleep 0.5; " + FAILS, DIES), 125, id="what ends after a death is no result"),
        pytest.param((FAILS, "ended 0; " + DIES), 3, id="what failed before a death has failed"),
        pytest.param((ENDS, "ended 0; " + FAILS), 3, id="the second fails"),
        pytest.param((ENDS, ENDS), 0, id="both end well"),
        pytest.param((DIES,), 125, id="one alone dies"),
        pytest.param((FAILS,), 3, id="one alone fails"),
    ],
)
def test_status_of_machines(hosts: tuple[str, ...], status: int, doubles: dict[str, str], tmp_path: Path) -> None:
    doubles |= {f"HOST_{i}": text for i, text in enumerate(hosts)}
    arguments = ["--two-hosts", "first", "second"] if len(hosts) > 1 else ["first"]
    ran = subprocess.run([SCRIPTS / "rxe-vm", *arguments], env=doubles, cwd=tmp_path, timeout=HANG_S, check=False)
    assert ran.returncode == status


@pytest.mark.parametrize("hosts", [(STAYS,), (STAYS, "trap '' TERM; while :; do sleep 0.05; done")])
def test_machines_that_stay_are_killed_in_time(hosts: tuple[str, ...], doubles: dict[str, str], tmp_path: Path) -> None:
    doubles |= {f"HOST_{i}": text for i, text in enumerate(hosts)}
    arguments = ["--two-hosts", "first", "second"] if len(hosts) > 1 else ["first"]
    ran = subprocess.run([SCRIPTS / "rxe-vm", "--timeout", "1", *arguments], env=doubles, cwd=tmp_path, timeout=HANG_S, check=False)
    assert ran.returncode == 124


@pytest.fixture
def rdma_test(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts rdma-test.sh with stages and the texts of its machines."""
    (tmp_path / "scripts").mkdir()
    for name in ("rdma-test.sh", "await.sh"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts" / name)
    machine = tmp_path / "scripts" / "rxe-vm"
    machine.write_text(MACHINE.format(starts=tmp_path / "starts"))
    machine.chmod(0o755)

    started: list[subprocess.Popen[bytes]] = []

    def start(stages: Sequence[str], machines: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GO": "true", "MAKE": "true", **{f"MACHINE_{i}": text for i, text in enumerate(machines, 1)}}
        started.append(subprocess.Popen([tmp_path / "scripts" / "rdma-test.sh", *stages], env=environment, stdin=subprocess.DEVNULL))
        return started[-1]

    yield start
    for each in started:
        each.terminate()
        each.wait(HANG_S)


@pytest.mark.parametrize(
    ("machines", "status", "started"),
    [
        pytest.param(["exit 125", "exit 0"], 0, 2, id="a machine dies, the next one ends well"),
        pytest.param(["exit 125", "exit 125"], 125, 2, id="two die"),
        pytest.param(["exit 1"], 1, 1, id="a stage fails"),
        pytest.param(["touch build/rdma-test/hosts.0.log.failed; exit 125"], 125, 1, id="a stage fails, then a machine dies"),
    ],
)
def test_a_machine_that_died_is_followed_by_one_more(
    rdma_test: Any, machines: list[str], status: int, started: int, tmp_path: Path
) -> None:
    assert rdma_test(["hosts"], machines).wait(HANG_S) == status
    assert len((tmp_path / "starts").read_text()) == started


SIDE_BY_SIDE = ["yama", "agents"]  # are of two machines
MEETS = "touch met.$$; until (($(ls met.* | wc -l) == 2)); do sleep 0.02; done; "


@pytest.mark.parametrize(("ends", "status"), [("exit 0", 0), ("exit $(($(ls met.* | sort | head -1 | cut -d. -f2) == $$ ? 0 : 3))", 3)])
def test_machines_of_one_guest_run_side_by_side(rdma_test: Any, ends: str, status: int) -> None:
    """Each waits for the other. In the second case one of the two fails."""
    assert rdma_test(SIDE_BY_SIDE, 2 * [MEETS + ends]).wait(HANG_S) == status


@pytest.mark.parametrize(("end", "status"), [("terminate", 143), ("kill", -9)])
def test_no_machine_outlives_the_script(rdma_test: Any, tmp_path: Path, end: str, status: int) -> None:
    script = rdma_test(SIDE_BY_SIDE, 2 * [MEETS + "echo $$ >>pids; exec sleep 600"])
    until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 2)
    getattr(script, end)()
    assert script.wait(HANG_S) == status
    pids = (tmp_path / "pids").read_text().split()
    until(lambda: not any(lives(pid) for pid in pids))


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < HANG_S
        time.sleep(0.02)
