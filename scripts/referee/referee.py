"""Real FastAPI as the referee of what an engine reads behind kvconn's router.

    python referee.py KVCONN PYTHON... [--seed N...] [--chance N] [--seconds N] [--row FILE]

The requests of hostile.py go straight to app.py, which shows what an engine would take, and through the router of each
contract. Whatever an engine then reads must name the host, engine and room that the router chose. PYTHON runs app.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from disguises import AXES, COMPLETIONS, EVIL, OTHERS, PLAIN, TEXTS, length
from hostile import Case, by_chance, one_by_one
from servers import Engines, Router, send

VLLM = {"kv_transfer_params"}  # what vLLM's engines read, of the members that a router sets
NIXL = {"remote_host": "prefill.test", "remote_port": 7, "remote_engine_id": "nixl-engine", "remote_block_ids": [1]}
TRANSFER = re.compile(r"xfer-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
LEAST = 40  # mixtures that are sent whatever the time
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}

# What an engine of each release must be seen to take from a client that reaches it directly, or the referee sees nothing.
BITES = {
    "text": (
        "plain",
        "escaped",
        "ESCAPED",
        "escaped in part",
        "lists",
        "NaN",
        "nested 900",
        "extra_args",
        "parameters",
        "vllm_xargs of texts",
    ),
    "code": ("gzip", "deflate", "utf-8", "utf-16-le", "utf-16-be with a mark", "utf-32-le", "utf-32-be with a mark", "utf-8 with a mark"),
    "kind": ("application/json", "text/plain", "application/vnd.x+json", "application/octet-stream", "multipart/form-data"),
    "header": (
        "overrides",
        "an override alone",
        "gzip",
        "deflate",
        "X-Body-Compressed: gzip",
        "X-Body-Compressed: deflate",
        "X-Body-Compressed that hops",
        "identity and gzip",
    ),
    "frame": ("length", "chunks", "chunks with extensions", "a request behind"),
}


class Contract:
    """A router of one contract, and what its engines may read."""

    def __init__(self, name: str, *options: str):
        self.name, self.options = name, options
        self.completions = COMPLETIONS if name == "sglang" else COMPLETIONS[:2]
        self.ids: dict[str, set] = {}  # of transfers and rooms, by attempt
        self.read: Counter[str] = Counter()

    def alone(self) -> Iterator[Case]:
        """One disguise at a time. Where a router differs by what it says to engines, texts are enough."""
        if self.name in ("mooncake", "sglang"):
            return one_by_one(self.completions)
        return (Case(path, text=text) for text in TEXTS for path in (self.completions[0], "/invocations"))

    def wrong(self, line: dict, engines: Engines) -> str:
        """What is wrong with a line of app.py's, or nothing."""
        read = {n: v for n, v in line["read"].items() if self.name == "sglang" or n in VLLM or n.startswith("x-override-")}
        prefill, mine = line["role"] == "prefill", line["completion"] and line["path"] in self.completions
        self.read[line["role"] if mine else "passed"] += 1
        if not mine:
            if prefill:
                return "a prefill server gets what is no completion"
            return "only the router may set this" if read else ""
        if line["rank"] not in (("0", None) if prefill else (None,)):
            return f"the client chose the rank {line['rank']}"
        want = self.want(prefill, read, engines)
        if read != want:
            return f"the router's are {want}"
        if chosen := self.chosen(read):
            self.ids.setdefault(line["case"], set()).add(chosen)
            if len(self.ids[line["case"]]) > 1:
                return f"the two engines of an attempt have {self.ids[line['case']]}"
        return ""

    def want(self, prefill: bool, read: dict, engines: Engines) -> dict:
        if self.name == "alone":
            return {}
        if self.name == "nixl":
            none = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
            return {"kv_transfer_params": ASKED | none if prefill else NIXL}
        chosen = self.chosen(read)
        if self.name == "sglang":
            return {"bootstrap_host": "127.0.0.1", "bootstrap_port": engines.prefill, "bootstrap_room": chosen}
        if prefill:
            return {"kv_transfer_params": ASKED | {"transfer_id": chosen}}
        return {
            "kv_transfer_params": {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": f"http://127.0.0.1:{engines.prefill}",
                "remote_engine_id": "engine-of-the-router",
                "transfer_id": chosen,
            }
        }

    def chosen(self, read: dict) -> str | int | None:
        """The transfer or room, if it can be one that the router made."""
        if self.name == "sglang":
            room = read.get("bootstrap_room")
            return room if isinstance(room, int) and 0 <= room < 1 << 63 and room != EVIL["bootstrap_room"] else None
        params = read.get("kv_transfer_params")
        id = params.get("transfer_id") if isinstance(params, dict) else None
        return id if isinstance(id, str) and TRANSFER.fullmatch(id) else None


def mixtures(seeds: list[int], completions: tuple[str, ...]) -> Iterator[Case]:
    """The mixtures of all seeds in turn, so that each seed has an equal share of the time."""
    for cases in zip(*(by_chance(seed, completions) for seed in seeds)):
        yield from cases


def named(line: dict) -> bool:
    """Whether an engine has read something of a client's."""
    return "evil" in json.dumps(line["read"]) or "666" in json.dumps(line["read"])


def straight(engines: Engines, release: str) -> None:
    """Sends each value of each axis to the engine itself: the referee must be able to see."""
    own = [Case("/v1/responses", text="vllm_xargs of texts"), Case("/inference/v1/generate", text="extra_args")]
    cases = {f"straight-{i}": case for i, case in enumerate([*one_by_one(COMPLETIONS[:1]), *own])}
    for name, case in cases.items():
        send(engines.decode, case.raw(name))
    taken = {line["case"] for line in engines.taken() if named(line)}
    bites = {(axis, v) for name in taken & cases.keys() for axis, v in cases[name].chosen.items()}
    missing = [(axis, v) for axis, values in BITES.items() for v in values if (axis, v) not in bites]
    if missing:
        raise SystemExit(f"referee: {release}: the engine itself does not take {missing}, so that nothing is shown by the router")
    print(f"referee: {release}: of {len(cases)} requests straight to an engine, {len(taken)} make it read what a client names")


def harmless(contract: Contract, router: Router, engines: Engines) -> None:
    """What must get through, or a router that refuses all would do."""
    bodies = [
        (path, "application/json", json.dumps({"body": PLAIN} if path == "/embedded" else PLAIN)) for path in contract.completions + OTHERS
    ]
    bodies += [
        ("/anything", "multipart/form-data; boundary=b", TEXTS["parts"]),
        ("/anything", "application/x-www-form-urlencoded", "a=b"),
        ("/anything", "text/plain", "hello"),
        ("/anything", "application/octet-stream", "{\x02\x00\xff"),
        ("/anything", "application/json", '{"a":1}'),
    ]
    answers = {}
    for path, kind, text in bodies:
        name, body = f"harmless {path} {kind}", text.encode("latin-1")
        head = f"POST {path} HTTP/1.1\r\nHost: h\r\nX-Request-Id: {name}\r\nContent-Type: {kind}\r\n{length(body)}\r\n"
        answers[name] = send(router.port, head.encode() + body)
    read = {line["case"] for line in engines.taken() if line["role"] == "decode"}
    for name, (status, text) in answers.items():
        if name not in read or status != 200:
            raise SystemExit(f"referee: {contract.name}: {name} does not get through: {status} {text[:500]!r}")


class Judge:
    """What the engines of a release may read, whichever contract's router has sent it."""

    def __init__(self, release: str, engines: Engines):
        self.release, self.engines = release, engines
        self.faults: list[str] = []
        self.cases: dict[str, Case] = {}
        self.contracts: dict[str, Contract] = {}

    def fault(self, contract: Contract, why: str) -> None:
        self.faults.append(f"{self.release}, {contract.name}: {why}")

    def take(self, last: Contract) -> None:
        """Looks at all that was read. What a client has left may be read when its router is gone: the name says whose it was."""
        for line in self.engines.taken():
            contract = self.contracts.get(str(line["case"]).partition("-")[0], last)
            if why := contract.wrong(line, self.engines):
                case = self.cases.get(line["case"], "a request that was not sent under this name")
                self.fault(contract, f"{why}: {case}: {json.dumps(line)[:1000]}")

    def send(self, contract: Contract, router: Router, case: Case) -> None:
        name = f"{contract.name}-{len(self.cases)}"
        self.cases[name] = case
        send(router.port, case.raw(name))

    def run(self, contract: Contract, kvconn: str, mixtures: Iterator[Case], until: float) -> None:
        """Sends each disguise, and mixtures for as long as there is time."""
        self.contracts[contract.name] = contract
        prefill = (
            "http://127.0.0.1:1 none" if contract.name == "alone" else f"http://127.0.0.1:{self.engines.prefill} {self.engines.prefill}"
        )
        router = Router(kvconn, prefill, self.engines.decode, "--retries", "0", *contract.options)
        try:
            router.await_ready()
            harmless(contract, router, self.engines)
            before = len(self.cases)
            for case in contract.alone():
                self.send(contract, router, case)
            alone = len(self.cases) - before
            for n, case in enumerate(mixtures):
                if n >= LEAST and time.monotonic() > until:
                    break
                self.send(contract, router, case)
        finally:
            status = router.close()
        log = "".join(router.log)
        if status != 0 or "panic" in log:
            self.fault(contract, f"the router ended with {status}: {log[-2000:]}")
        self.take(contract)
        read = dict(sorted(contract.read.items()))
        sent = f"{alone} requests and {len(self.cases) - before - alone} mixtures"
        print(f"referee:   {contract.name}: {sent}; the engines read {read}")
        if read.keys() != ({"decode", "passed"} if contract.name == "alone" else {"decode", "passed", "prefill"}):
            self.fault(contract, "no hostile request came through, so that nothing is shown")


VERSIONS = "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('fastapi', 'starlette', 'pydantic')))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kvconn")
    parser.add_argument("python", nargs="+")
    parser.add_argument("--seed", type=int, nargs="+", help="of the mixtures; without it 1 and a random one")
    parser.add_argument("--chance", type=int, default=300, help="at most so many requests with several disguises, for each contract")
    parser.add_argument("--seconds", type=float, default=18, help="no such request is begun later; those with one disguise are always sent")
    parser.add_argument("--row", type=Path, help="file for what the table of `make attack` says of this")
    args = parser.parse_args()
    seeds = args.seed or [1, random.randrange(2, 1 << 32)]
    print("referee: the mixtures are those of --seed", *seeds, flush=True)
    faults: list[str] = []
    releases, sent = [], 0
    began, turn = time.monotonic(), 0
    for python in args.python:
        engines = Engines(python)
        try:
            release = subprocess.check_output([python, "-W", "ignore", "-c", VERSIONS], text=True).strip()
            straight(engines, release)
            judge = Judge(release, engines)
            contracts = (
                Contract("mooncake"),
                Contract("sglang", "--contract", "sglang"),
                Contract("nixl", "--contract", "nixl"),
                Contract("alone", "--fallback-decode"),
            )
            for contract in contracts:
                turn += 1
                until = began + args.seconds * turn / (len(contracts) * len(args.python))
                mixed = itertools.islice(mixtures(seeds, contract.completions), args.chance)
                judge.run(contract, args.kvconn, mixed, until)
            judge.take(contract)
            faults += judge.faults
            releases.append(release.split()[1])
            sent += len(judge.cases)
        finally:
            engines.close()
    for fault in faults[:40]:
        print("referee: WRONG:", fault, file=sys.stderr)
    if faults:
        raise SystemExit(f"referee: {len(faults)} wrong, with --seed {' '.join(map(str, seeds))}")
    took = f"{time.monotonic() - began:.0f} s"
    print(f"referee: ok, {sum(map(len, AXES.values()))} disguises, seeds {seeds}, {took}")
    if args.row:
        numbers = " and ".join(map(str, seeds))
        args.row.write_text(f"0 of {sent} requests name a host, before FastAPI {', '.join(releases)}, seeds {numbers}")


if __name__ == "__main__":
    main()
