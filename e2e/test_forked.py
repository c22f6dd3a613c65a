"""Servers that are forked from a process which has imported vLLM (warm.py) end as others do, and what they leave is found."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
import warm
from asking import HOST, ServerError, wait_until
from guard import descendants
from servers import Server, free_ports, leftovers, wait_ready
from vllm_pair import HERE, environment


class Forked(Server):
    def __init__(self, where: Path, *argv: str, port: int = 0) -> None:
        self.run = uuid.uuid4().hex
        env = {**environment(self.run), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE / "forked_vllm.py"), *argv]
        assert warm.program(command, env)
        super().__init__("forked", command, env, where / "forked.log", f"http://{HOST}:{port}")

    @property
    def guard(self) -> int:
        assert self._guard is not None
        return self._guard.pid


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Forked]:
    (port,) = free_ports(1)
    server = Forked(
        tmp_path, "serve", str(tiny_model.make(tmp_path / "model")), "--enforce-eager", "--host", HOST, "--port", str(port), port=port
    )
    try:
        server.start()
        wait_ready([server])
        yield server
    finally:
        server.stop()
    assert not leftovers(server.run)


@pytest.mark.parametrize(("option", "status", "says"), [("--version", 0, "0."), ("--no-such-option", 2, "no-such-option")])
def test_status_of_one_that_ends(tmp_path: Path, option: str, status: int, says: str) -> None:
    server = Forked(tmp_path, option)
    server.start()
    wait_until("it ends", lambda: not server.alive())
    with pytest.raises(ServerError, match=rf"exit code {status}\)"):
        server.check_alive()
    assert says in server.log_since(0).partition("\n===")[2].partition("\n")[2]
    assert not leftovers(server.run)


def test_one_that_is_killed(serving: Forked) -> None:
    """With all of its processes, as when the machine dies."""
    serving.kill()
    assert not serving.alive() and not serving.healthy()


def test_one_that_was_not_stopped_is_found(serving: Forked) -> None:
    """The server, its engine and the guard."""
    before = set(descendants(serving.pid))
    left = {int(each.partition(":")[0]) for each in leftovers(serving.run)}
    stay = before & set(descendants(serving.pid))
    assert stay and {serving.pid, serving.guard, *stay} <= left


def test_one_whose_guard_is_killed(serving: Forked) -> None:
    """The kernel tells the server to end. A server that hangs is left behind, and is found."""
    os.kill(serving.pid, signal.SIGSTOP)
    os.kill(serving.guard, signal.SIGKILL)
    wait_until("the guard has gone", lambda: not serving.alive())
    with pytest.raises(ServerError, match=r"exit code -9\)"):
        serving.check_alive()
    wait_until("it is found", lambda: any(left.startswith(f"{serving.pid}: ") for left in leftovers(serving.run)))
    os.kill(serving.pid, signal.SIGCONT)
    wait_until("it ends", lambda: not leftovers(serving.run))
