"""Runs what a page has below a heading."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest
from asking import HOST, wait_until

ROOT = Path(__file__).resolve().parent.parent
BOUND_S = 600  # ends a hang: servers that do not become ready are waited for without end
PORTS_S = 60  # for all ports of a page; a killed server of 700 MB had its port for a second
LOCK = Path(f"/tmp/kvconn-pages-{os.getuid()}.lock")
LOGS = tuple(Path("/tmp") / f"{name}.log" for name in ("prefill", "decode", "router"))  # where the pages' servers write


def as_it_stands(heading: str, environment: str, ports: Sequence[int]) -> str:
    """What the README's commands print. They are of an environment by this name, and of these ports."""
    with _may_run(environment, ports):
        done = subprocess.run(_command("README.md", heading), cwd=ROOT, capture_output=True, text=True, timeout=BOUND_S + 60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}{_ends()}"
    return done.stdout


def alone(command: str, environment: str) -> str:
    """What a command of make prints, in an environment by this name. It must need no build and no download, or the test is not run.

    In the check's own environment (KVCONN_E2E_OURS=1) all is there by then, so there it fails in place of not being run.
    """
    _is(environment)
    program, *arguments = shlex.split(command)
    assert program == "make", command
    env = _as_a_user()
    _needs_no_build(command, env)
    child = subprocess.Popen(
        [program, *arguments], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = child.communicate(timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)  # it then ends its servers
        said, _ = child.communicate(timeout=60)
        raise AssertionError(f"{command} has not ended after {BOUND_S} s:\n{said}") from None
    assert child.returncode == 0, said
    return said


def install(page: str, environment: str) -> str:
    """What a page's commands below "Install" print, in an environment by this name, in which the wheel is already."""
    _is(environment)
    env = {**_as_a_user(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    _needs_no_build("make wheel", env)
    done = subprocess.run(_command(page, "Install"), cwd=ROOT, env=env, capture_output=True, text=True, timeout=BOUND_S + 60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def _as_a_user() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("KVCONN_", "MAKE", "MFLAGS", "PYTHONPATH"))}


def _needs_no_build(command: str, env: dict[str, str]) -> None:
    program, *arguments = shlex.split(command)
    would = subprocess.run([program, "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    if builds := re.findall(r"^.*(?:go build|-m venv|/pip ).*$", would, re.M):
        _not_run(f"NOT RUN: {command} would first do: {'; '.join(builds)}")


@contextlib.contextmanager
def between_its_blocks(page: str, heading: str, environment: str, ports: Sequence[int], where: Path) -> Iterator[Path]:
    """Runs the first of two blocks of commands, then what the caller does, then the second block. Gives the file of their output."""
    with _may_run(environment, ports):
        up, on, output = where / "up", where / "on", where / "output"
        pause = f": >{shlex.quote(str(up))}; until [[ -e {shlex.quote(str(on))} ]]; do sleep 0.1; done"
        with output.open("w") as file:
            child = subprocess.Popen(_command(page, heading, "--between", pause), cwd=ROOT, stdout=file, stderr=file)
        try:
            wait_until("the first block has run", lambda: up.exists() or child.poll() is not None, BOUND_S + 60)
            if child.poll() is None:
                yield output
                on.touch()
            status = child.wait(BOUND_S + 60)
            assert status == 0, output.read_text(errors="replace")
        except BaseException:
            print(_ends())
            raise
        finally:
            child.terminate()  # it then ends what the commands have started
            child.wait(60)


@contextlib.contextmanager
def with_logs() -> Iterator[None]:
    """What fails here has the ends of the pages' servers' logs beside it."""
    try:
        yield
    except BaseException:
        print(_ends())
        raise


def _command(page: str, heading: str, *more: str) -> list[str]:
    return [sys.executable, "scripts/run-page.py", page, heading, "--within", str(BOUND_S), *more]


def _is(environment: str) -> None:
    if Path(sys.prefix).resolve() != (ROOT / environment).resolve():
        pytest.skip(f"NOT RUN: these tests run in {sys.prefix}, and the page's commands in {environment}")


@contextlib.contextmanager
def _may_run(environment: str, ports: Sequence[int]) -> Iterator[None]:
    _is(environment)
    with alone_at(ports):
        yield


@contextlib.contextmanager
def alone_at(ports: Sequence[int]) -> Iterator[None]:
    """Pages share ports and logs, so tests that run side by side have one after the other."""
    with LOCK.open("w") as lock:
        wait_until("no other page runs", lambda: _locked(lock), 3 * BOUND_S, every_s=0.5)
        try:  # when what another page's commands left has ended, it gives its ports back
            wait_until("the ports of the page's commands are free", lambda: not _taken(ports), PORTS_S)
        except TimeoutError:
            _not_run(f"NOT RUN: of the page's commands' ports {_taken(ports)}")
        yield


def the_blocks(page: str, heading: str) -> list[str]:
    """The commands that a page has below a heading, block by block."""
    runner = runpy.run_path(str(ROOT / "scripts" / "run-page.py"))
    found: list[str] = runner["blocks"](runner["below"]((ROOT / page).read_text(encoding="utf-8"), heading))[0]
    return found


def _taken(ports: Sequence[int]) -> list[str]:
    """Those that cannot be had, each with the reason."""
    taken: list[str] = []
    for port in ports:
        with socket.socket() as each:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                each.bind((HOST, port))
            except OSError as error:
                taken.append(f"{port}: {error}")
    return taken


def _not_run(told: str) -> None:
    """In the check's own environment (KVCONN_E2E_OURS=1) nothing may be missing."""
    pytest.fail(told) if os.environ.get("KVCONN_E2E_OURS") == "1" else pytest.skip(told)


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ends() -> str:
    return "".join(f"\n== {log}\n{log.read_text(errors='replace')[-4000:]}" for log in LOGS if log.exists())
