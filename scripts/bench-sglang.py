#!/usr/bin/env python3
"""Time to first token of a real SGLang pair on this machine: through kvconn, and through Mooncake's TCP in the same run.

    scripts/bench-sglang.sh [--requests 20] [--fat] [--backends kvconn,mooncake_tcp] [--page-size 16] [--tokens 300,1900]

Both pairs are up all the time and take turns every few requests, since a machine is never the same twice: idle ones poll, so that
each is measured beside the other's loops (it is not stopped meanwhile, of which Mooncake's connections die). On a few cores that weighs
more than the transfer. Prints a line for each length: medians, and the first backend's part of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "e2e"))

import tiny_model
from sglang_servers import SGLangPair, prompt

TURN = 5  # requests


def measure(pair: SGLangPair, tokens: int, seeds: range) -> list[float]:
    times = []
    for seed in seeds:
        _, answer = pair.ask_both(pair.body(prompt(tokens, f"{pair.run} {seed}"), 4, stream=True))
        if not answer.ok:
            raise SystemExit(f"{answer.error}\n{pair.decode.log_tail()}")
        times.append(answer.ttft_s * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--fat", action="store_true", help="a cache of 32 KiB a token")
    parser.add_argument("--backends", default="kvconn,mooncake_tcp")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tokens", default="300,1900")
    args = parser.parse_args()
    names = args.backends.split(",")
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as stack:
        model = tiny_model.make(Path(workdir) / "model", fat=args.fat)
        pairs: dict[str, SGLangPair] = {}
        for name in names:
            # In bfloat16 the fat model's cache has 32 KiB a token.
            pair = SGLangPair(model, Path(workdir) / name, "--page-size", str(args.page_size), backend=name, dtype="bfloat16")
            pairs[name] = stack.enter_context(pair)
        for tokens in (int(text) for text in args.tokens.split(",")):
            times: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(-1, -(-args.requests // TURN)):
                for name in names:
                    taken = measure(pairs[name], tokens, range(1000 * tokens + turn * TURN, 1000 * tokens + (turn + 1) * TURN))
                    if turn >= 0:  # the first turn warms
                        times[name] += taken
            line = [f"{tokens} tokens"]
            for name in names:
                ordered = sorted(times[name])
                line.append(f"{name} {statistics.median(ordered):.1f} ms ({ordered[0]:.1f} to {ordered[-1]:.1f})")
            if len(names) == 2:
                line.append(f"{names[0]} takes {statistics.median(times[names[0]]) / statistics.median(times[names[1]]):.2f} of {names[1]}")
            print(", ".join(line), flush=True)


if __name__ == "__main__":
    main()
