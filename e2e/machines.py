"""Machines of their own on this one, for the commands of pages that have several hosts. Each has a network and its own names of hosts, and
kvconn takes each for another host: no byte goes but over the network.

A page's command `vllm` or `python` is not run where bash would find it: what stands in its place hands the arguments that bash has made
to the test, which starts the server in that machine, forked (warm.py) and with what a CPU needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm
from asking import wait_until
from readme import ROOT, the_blocks
from servers import RUN_VARIABLE, START_S, Server, leftovers, stop_all

NETWORK = "10.77.33"
_BOOT = "/proc/sys/kernel/random/boot_id"  # by which agents know that they are on one host
# What is written into /etc there is of that machine alone.
_BEGINS = f"""
cd "$1"
mount -t tmpfs etc etc
mkdir etc/upper etc/work
cp hosts etc/upper/hosts
mount -t overlay -o lowerdir=/etc,upperdir=etc/upper,workdir=etc/work etc /etc
mount --bind boot {_BOOT}
ip link set lo up
echo up
exec cat
"""
_GIVES = '#!/bin/sh\nprintf "%s\\0" "$@" >"$GIVEN"\n'


class Machine:
    """It lives as long as this process has its standard input open."""

    def __init__(self, name: str, where: Path, hosts: Mapping[str, str]) -> None:
        self.name, self._where = name, where / name
        for folder in ("bin", "etc"):
            (self._where / folder).mkdir(parents=True)
        (self._where / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{ip} {host}\n" for host, ip in hosts.items()))
        (self._where / "boot").write_text(f"{uuid.uuid4()}\n")
        self._holds = subprocess.Popen(
            ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-e", "-c", _BEGINS, "sh", str(self._where)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holds.stdout is not None
        if (said := self._holds.stdout.readline()) != "up\n":
            self.end()
            pytest.skip(f"NOT RUN: this machine makes no namespaces: {said.strip()}")
        self.pid = self._holds.pid

    def end(self) -> None:
        self._holds.communicate()  # closes its standard input

    def cable(self, switch: Machine, ip: str) -> None:
        """To a bridge `br0` of the other machine."""
        far = f"to-{self.pid}"
        self.has("ip", "link", "add", "eth0", "type", "veth", "peer", "name", far, "netns", str(switch.pid))
        self.has("ip", "addr", "add", f"{ip}/24", "dev", "eth0")
        self.has("ip", "link", "set", "eth0", "up")
        switch.has("ip", "link", "set", far, "master", "br0", "up")

    def argv(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", *command]

    def has(self, *command: str) -> str:
        """What a command prints there."""
        done = subprocess.run(self.argv(*command), capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, (self.name, command, done.stdout, done.stderr)
        return done.stdout

    def bash(self, block: str, folder: Path) -> list[str]:
        return self.argv("bash", "-e", "-o", "pipefail", "-c", f"cd {folder}\n{block}")

    def given(self, block: str, folder: Path) -> list[str]:
        """The arguments that a block's command has, which is `vllm` or `python`."""
        stand_ins, given = self._where / "bin", self._where / "given"
        for name in ("vllm", "python"):
            (stand_ins / name).write_text(_GIVES)
            (stand_ins / name).chmod(0o755)
        env = {**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}", "GIVEN": str(given)}
        subprocess.run(self.bash(block, folder), env=env, check=True, timeout=60)
        return given.read_bytes().decode().split("\0")[:-1]

    def variables(self, folder: Path) -> dict[str, str]:
        """By which a server that is forked begins there."""
        return {warm.MACHINE: f"{self.pid} {folder}"}


@contextlib.contextmanager
def machines(names: Sequence[str], where: Path) -> Iterator[list[Machine]]:
    """Machines with one network, where each is known by its name."""
    for program in ("ip", "unshare", "nsenter", "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"NOT RUN: the program {program} is not here")
    hosts = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    with contextlib.ExitStack() as all_of_them:
        every: list[Machine] = []
        for name in ("switch", *names):
            every.append(Machine(name, where, hosts))
            all_of_them.callback(every[-1].end)
        switch, *made = every
        switch.has("ip", "link", "add", "br0", "up", "type", "bridge")
        for machine, ip in zip(made, hosts.values()):
            machine.cable(switch, ip)
        yield made


HEADING = "A pair on two machines"


class Pair(NamedTuple):
    """What a page has below HEADING, running: the prefill host, the decode host, and where the router is."""

    prefill: Server
    decode: Server
    client: Machine  # the router's, from which requests come

    def ask(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        said = self.client.has("curl", "-s", url, "-H", "Content-Type: application/json", "-d", json.dumps(body))
        answer: dict[str, Any] = json.loads(said)
        assert "choices" in answer, (said, self.decode.log_tail())
        return answer


@contextlib.contextmanager
def pair_of(
    page: str,
    where: Path,
    model: Path,
    program: str,
    more: Sequence[str],
    env: Mapping[str, str],
    before: Callable[[Machine, Machine], Mapping[str, str]] = lambda *_: {},
) -> Iterator[Pair]:
    """The page's three blocks as they stand, each on its machine. program: of warm.PROGRAMS, for the first two; more: further options.

    before: what is done on the two hosts first. It gives further variables.
    """
    first, second, third = the_blocks(page, HEADING)
    shows = re.search(r"`(curl http://ROUTER:8000/health)` says `([^`]+)`", (ROOT / "docs/quickstart-vllm.md").read_text(encoding="utf-8"))
    assert shows
    run, folder = uuid.uuid4().hex, where / "folder"
    folder.mkdir()
    (folder / "MODEL").symlink_to(model)  # as the page calls it
    env = {**env, RUN_VARIABLE: run}
    servers: list[Server] = []
    with machines(("prefill-host", "decode-host", "ROUTER"), where) as (prefill, decode, router):
        try:
            env |= before(prefill, decode)
            for machine, block in ((prefill, first), (decode, second)):
                given = machine.given(block, folder)
                if given[0] == "-m":  # python's
                    assert given[1] == "sglang.launch_server" and program == "forked_sglang", given
                    del given[:2]
                argv = [sys.executable, str(warm.HERE.with_name(f"{program}.py")), *given, *more]
                servers.append(Server(machine.name, argv, {**env, **machine.variables(folder)}, where / f"{machine.name}.log", ""))
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            servers.append(Server("ROUTER", router.bash(third, folder), {**env, "PATH": path}, where / "router.log", ""))
            for server in servers:
                server.start()

            def works() -> bool:
                for server in servers:
                    server.check_alive()
                with contextlib.suppress(AssertionError):  # nobody listens yet
                    return shows[2] in router.has(*shows[1].replace("curl", "curl -s").split())
                return False

            wait_until("the page's sign that the pair works", works, START_S, every_s=0.5)
            yield Pair(servers[0], servers[1], router)
        finally:
            stop_all(servers)
    assert not leftovers(run)
