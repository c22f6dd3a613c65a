"""What the thresholds change for short prompts: their time to first token, and what a stream beside them pays.

One real pair, and a second decode server with kv_recompute_threshold above every prompt. Three routers: one before the pair; one that
gives every prompt of this program to decode alone (--decode-below); one before the second decode server, which computes each prompt itself
while the prefill server computes it too. The prompts take turns. Then a stream runs on the decode server while prompts come by one of the
routers: the gaps between its tokens.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import ask, metric
from bench_ttft import body, checked, ttft_ms
from servers import Server, stop_all, wait_ready
from vllm_pair import Pair

LENGTHS = (16, 64, 250, 900)
STREAM = 160  # tokens
WARM = 3


class Way(NamedTuple):
    name: str
    pair: Pair  # whose decode server the prompts come to
    router: Server


def beside(pair: Pair, workdir: Path) -> tuple[Pair, list[Way]]:
    """The second decode server, and the ways that a prompt can go."""
    short = copy.copy(pair)
    short._router_argv = [*pair._router_argv, "--decode-below", str(1 << 20)]
    other = Pair(Path(pair.model), workdir, decode_config={"kv_recompute_threshold": 1 << 20})
    key = copy.copy(pair)
    key.decode, key._router_ports = other.decode, other._router_ports
    ways = [("by the pair", pair, pair.router), ("--decode-below", pair, short._router("router-short"))]
    return other, [Way(*way) for way in (*ways, ("kv_recompute_threshold", key, key._router("router-key")))]


def gaps_ms(decode: str, way: Way | None, pair: Pair, tokens: int) -> list[float]:
    """The gaps between a stream's tokens; way: by which prompts come meanwhile, one after the other."""
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, decode, {**body(pair, 64, STREAM), "stream": True, "ignore_eos": True})
        while way is not None and not stream.done():
            ttft_ms(pair, way.router.url, tokens)
        came = checked(stream.result()).came
    return [(b - a) * 1e3 for a, b in zip(came, came[1:])]


def measure(ways: list[Way], prompts: int) -> None:
    print(
        f"\ntime to first token, ms: medians of {prompts} prompts each, one at a time; in brackets the median of the ratios to the pair's"
    )
    for tokens in LENGTHS:
        rows = [[ttft_ms(way.pair, way.router.url, tokens) for way in ways] for _ in range(prompts + WARM)][WARM:]
        said = f"  {tokens:4} tokens:"
        for number, way in enumerate(ways):
            ratio = statistics.median(row[number] / row[0] for row in rows)
            said += f"  {way.name} {statistics.median(row[number] for row in rows):7.1f}" + (f" ({ratio:.2f})" if number else "")
        print(said)
    asked = len(LENGTHS) * (prompts + WARM)
    for way in ways[1:]:  # each did what its name says
        count = metric(way.pair.decode.url, "vllm:kvconn_computed_prompts_total", absent=0, reason="below_threshold")
        print(f"  {way.name}: decode computed {count:.0f} of {asked} prompts under below_threshold")
    print(f"\ngaps between a stream's {STREAM} tokens, ms, while prompts come one after the other: median, 95 of 100, longest")
    for tokens in (64, 900):
        for name, way in (("none", None), *((way.name, way) for way in ways)):
            pair = (way or ways[0]).pair
            gaps = sorted(gap for _ in range(3) for gap in gaps_ms(pair.decode.url, way, pair, tokens))
            said = (statistics.median(gaps), gaps[len(gaps) * 95 // 100], gaps[-1])
            print(f"  {tokens:4} tokens {name:24}" + "".join(f"{ms:8.1f}" for ms in said))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=20, metavar="N")
    args = parser.parse_args()
    workdir = Path(tempfile.mkdtemp(prefix="kvconn-threshold-"))
    pair = Pair(tiny_model.make_32k(workdir / "model-fat", "float32"), workdir / "logs")
    other, ways = beside(pair, workdir / "beside")
    servers = [other.decode, *(way.router for way in ways[1:])]
    try:
        with pair:
            try:
                for server in servers:
                    server.start()
                wait_ready(servers)
                other.warm(other.decode)
                measure(ways, args.prompts)
            finally:
                stop_all(servers)
    finally:
        left = [*pair.leftovers(), *other.leftovers()]
    if left:
        print("LEFT BEHIND: " + "; ".join(left))
    return bool(left)


if __name__ == "__main__":
    raise SystemExit(main())
