"""What the router's --decode-below changes for short prompts: their time to first token, and what a stream beside them pays.

One real pair has two routers: one gives every prompt of this program to decode alone, the other gives none. The prompts take turns.
Then a stream runs on the decode server while prompts come by one of the routers: the gaps between its tokens.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask
from bench_ttft import body, checked, ttft_ms
from servers import Server, wait_ready
from vllm_pair import Pair

LENGTHS = (16, 64, 250, 900)
STREAM = 160  # tokens


def short_router(pair: Pair) -> Server:
    other = copy.copy(pair)
    other._router_argv = [*pair._router_argv, "--decode-below", str(1 << 20)]
    return other._router("router-short")


def gaps_ms(pair: Pair, router: Server | None, tokens: int) -> list[float]:
    """The gaps between a stream's tokens; router: by which prompts come meanwhile, one after the other."""
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, pair.decode.url, {**body(pair, 64, STREAM), "stream": True, "ignore_eos": True})
        while router is not None and not stream.done():
            ttft_ms(pair, router.url, tokens)
        came = checked(stream.result()).came
    return [(b - a) * 1e3 for a, b in zip(came, came[1:])]


def measure(pair: Pair, short: Server, prompts: int) -> None:
    print(f"\ntime to first token, ms: medians of {prompts} prompts each, one at a time")
    for tokens in LENGTHS:
        rows = [[ttft_ms(pair, router.url, tokens) for router in (pair.router, short)] for _ in range(prompts + 3)][3:]
        by_pair, alone = (statistics.median(column) for column in zip(*rows))
        ratio = statistics.median(row[1] / row[0] for row in rows)
        print(f"  {tokens:4} tokens: by the pair {by_pair:7.1f}, by decode alone {alone:7.1f}, median of the ratios {ratio:.2f}")
    print(f"\ngaps between a stream's {STREAM} tokens, ms, while prompts come one after the other: median, 95 of 100, longest")
    for tokens in (64, 900):
        for name, router in (("none", None), ("by the pair", pair.router), ("by decode alone", short)):
            gaps = sorted(gap for _ in range(3) for gap in gaps_ms(pair, router, tokens))
            said = (statistics.median(gaps), gaps[len(gaps) * 95 // 100], gaps[-1])
            print(f"  {tokens:4} tokens {name:16}" + "".join(f"{ms:8.1f}" for ms in said))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, metavar="N")
    args = parser.parse_args()
    workdir = Path(tempfile.mkdtemp(prefix="kvconn-threshold-"))
    pair = Pair(tiny_model.make_32k(workdir / "model-fat", "float32"), workdir / "logs")
    short = short_router(pair)
    try:
        with pair:
            try:
                short.start()
                wait_ready([short])
                measure(pair, short, args.prompts)
            finally:
                short.stop()
    finally:
        left = pair.leftovers()
    if left:
        print("LEFT BEHIND: " + "; ".join(left))
    return bool(left)


if __name__ == "__main__":
    raise SystemExit(main())
