"""Time to first token through a real pair, beside a single engine's and a pair's that sends nothing early.

Each prompt goes, in turn, to the decode server alone, through a pair whose prefill sends layer by layer, and through a pair
whose prefill sends when the prompt is computed, or through one that differs by its transport alone (--beside). Then sixteen
prompts go through the pair at once, and the same sixteen to the prefill server alone. The cache has 32 KiB a token (bfloat16).

--at-once measures the sixteen alone, in more rounds, each of which begins with another way, and says what the engines' threads did
meanwhile: how long they ran, and how long they were ready to run and others had the processors.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import Answer, ServerError, ask
from guard import descendants
from servers import Server
from vllm_pair import Pair

AT_ONCE = 16
numbers = itertools.count(1)


def body(pair: Pair, tokens: int, max_tokens: int = 2) -> dict[str, Any]:
    text = f"{next(numbers)} of {time.monotonic_ns()}: some say the world will end in fire, some say in ice. "
    return {"model": pair.served, "prompt": (text * (tokens // len(text) + 1))[:tokens], "max_tokens": max_tokens, "temperature": 0}


def checked(answer: Answer) -> Answer:
    if not answer.ok:
        raise ServerError(answer.error)
    return answer


def ttft_ms(pair: Pair, url: str, tokens: int) -> float:
    return checked(ask(url, {**body(pair, tokens), "stream": True}, timeout_s=120)).ttft_s * 1e3


def wall_s(urls: list[tuple[Pair, str]], tokens: int, max_tokens: int) -> float:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        began = time.monotonic()
        list(pool.map(lambda to: checked(ask(to[1], body(to[0], tokens, max_tokens), timeout_s=300)), urls))
        return time.monotonic() - began


def measure(early: Pair, late: Pair, what: str, prompts: int) -> None:
    ways: list[tuple[str, Pair, Callable[[Pair], str]]] = [
        ("single engine", early, lambda pair: pair.decode.url),
        ("pair, layer by layer", early, lambda pair: pair.router.url),
        (what, late, lambda pair: pair.router.url),
    ]
    for tokens in (900, 3000):
        for _, pair, url in ways:
            for _ in range(3):
                ttft_ms(pair, url(pair), tokens)
        rows = [[ttft_ms(pair, url(pair), tokens) for _, pair, url in ways] for _ in range(prompts)]
        medians = [statistics.median(column) for column in zip(*rows)]
        print(f"\n{tokens} tokens, medians of {prompts} prompts, one at a time")
        for (name, _, _), median in zip(ways, medians):
            print(f"  {name:28} {median:8.1f} ms  {median / medians[0]:5.2f}")
        each = [row[1] / row[2] for row in rows]
        print(f"  the first pair to the second, median of the ratios: {statistics.median(each):.3f} ({min(each):.2f} to {max(each):.2f})")
    # As many tokens are computed on either way: a loaded prompt's last one is decode's.
    at_once = [("prefill alone", early, lambda pair: pair.prefill.url), *ways[1:]]
    rounds = [[wall_s([(pair, url(pair))] * AT_ONCE, 900, 1) for _, pair, url in at_once] for _ in range(5)]
    medians = [statistics.median(column) for column in zip(*rounds)]
    print(f"\n{AT_ONCE} prompts of 900 tokens at once, medians of {len(rounds)} rounds")
    for (name, _, _), median in zip(at_once, medians):
        print(f"  {name:28} {median:8.2f} s   {median / medians[0]:5.2f}")
    print(f"  the first pair to the second, median of the ratios: {statistics.median(row[1] / row[2] for row in rounds):.3f}")


def threads_s(server: Server) -> tuple[float, float]:
    """For how long the threads of a server have run, and for how long they were ready to run and waited for a processor."""
    ran = waited = 0
    for pid in [server.pid, *descendants(server.pid)]:
        for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that has ended
                one, other, _ = map(int, each.read_text().split())
                ran, waited = ran + one, waited + other
    return ran / 1e9, waited / 1e9


def measure_at_once(early: Pair, late: Pair, what: str, rounds: int) -> None:
    ways = [
        ("prefill alone", early, early.prefill.url),
        (f"pair, by {early.transport}", early, early.router.url),
        (what, late, late.router.url),
    ]
    rows: dict[str, list[list[float]]] = {name: [] for name, _, _ in ways}
    for number in range(-1, rounds):  # the first round warms up
        first = number % len(ways)
        for name, pair, url in [*ways[first:], *ways[:first]]:
            servers = (pair.prefill, pair.decode)
            before = [threads_s(server) for server in servers]
            took = wall_s([(pair, url)] * AT_ONCE, 900, 1)
            after = [threads_s(server) for server in servers]
            if number >= 0:
                rows[name].append([took, *(b - a for was, now in zip(before, after) for a, b in zip(was, now))])
    alone = rows[ways[0][0]]
    print(f"\n{AT_ONCE} prompts of 900 tokens at once, medians of {rounds} rounds, s; in brackets the rounds' ratios to {ways[0][0]}")
    print(f"  {'':28} {'whole':>14}  {'prefill ran, waited':>22}  {'decode ran, waited':>22}")
    for name, measured in rows.items():
        wall, *used = [statistics.median(column) for column in zip(*measured)]
        ratio = statistics.median(mine[0] / its[0] for mine, its in zip(measured, alone))
        print(f"  {name:28} {wall:6.2f} ({ratio:5.3f})  {used[0]:14.2f} {used[1]:7.2f}  {used[2]:14.2f} {used[3]:7.2f}")
    each = [mine[0] / its[0] for mine, its in zip(rows[ways[1][0]], rows[ways[2][0]])]
    print(f"  the first pair to the second, median of the ratios: {statistics.median(each):.3f} ({min(each):.2f} to {max(each):.2f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, metavar="N")
    parser.add_argument("--dtype", choices=tiny_model.FAT_LAYERS, default="float32", help="(default float32)")
    parser.add_argument("--transport", default="auto", help="of all engines (default auto, which is local here)")
    parser.add_argument("--beside", default="", metavar="TRANSPORT", help="of a further pair, in place of the one that sends late")
    parser.add_argument("--at-once", type=int, default=0, metavar="ROUNDS", help="only the sixteen at once, in so many rounds")
    args = parser.parse_args()
    workdir = Path(tempfile.mkdtemp(prefix="kvconn-ttft-"))
    model = tiny_model.make_32k(workdir / "model-fat", args.dtype)
    way = {"transport": args.transport}
    forked = args.at_once > 0  # so that the servers are there sooner
    early = Pair(model, workdir / "early", dtype=args.dtype, prefill_config=way, decode_config=way, forked=forked)
    other: dict[str, str] = {"transport": args.beside} if args.beside else way
    config = other if args.beside else {"send_early": "off", **way}
    late = Pair(model, workdir / "late", dtype=args.dtype, prefill_config=config, decode_config=other, forked=forked)
    what = f"pair, by {args.beside}" if args.beside else "pair, when it is computed"
    try:
        with early, late:
            if args.at_once:
                measure_at_once(early, late, what, args.at_once)
            else:
                measure(early, late, what, args.prompts)
    finally:
        left = [*early.leftovers(), *late.leftovers()]
    if left:
        print("LEFT BEHIND: " + "; ".join(left))
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
