#!/usr/bin/env python3
"""Time to first token of a real SGLang pair on this machine: through kvconn, and through Mooncake's TCP in the same run.

    scripts/bench-sglang.sh [--requests 20] [--fat] [--backends kvconn,mooncake_tcp] [--alone] [--apart]
                            [--page-size 16] [--tokens 300,1900] [--dtype float32|bfloat16]

With --alone a single server that prefills and decodes takes turns too: a pair takes longer by the way between its servers.
All backends are up all the time and take turns every few requests, since a machine is never the same twice. Idle servers
poll, so each backend is measured beside the other's loops. It is not stopped meanwhile, since Mooncake's connections would
die. On a few cores the loops weigh more than the transfer. With --apart one backend is up at a time, for half of its requests
and later for the other half, so that no other server polls; each start takes a minute. Prints a line for each length:
medians, and the first backend's part of the other.
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
from sglang_servers import Alone, SGLangPair, generate, plugin, post, prompt

TURN = 5  # requests
# Mooncake's sender takes the pages' numbers from memory pinned by CUDA, unless it says that it does not.
ON_CPU = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def without_cuda(found, *_):
        if hasattr(found, "supports_host_tensor_indices"):
            found.supports_host_tensor_indices = False

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", without_cuda, HookType.AFTER)
"""


def measure(engines: SGLangPair | Alone, tokens: int, seeds: range) -> list[float]:
    times = []
    for seed in seeds:
        ids = prompt(tokens, f"{engines.run} {seed}")
        if isinstance(engines, Alone):
            answer = post(engines.server.url, {**generate(ids, 4), "stream": True})
        else:
            _, answer = engines.ask_both(engines.body(ids, 4, stream=True))
        if not answer.ok:
            raise SystemExit(f"{answer.error}\n{engines.servers[-1].log_tail()}")
        times.append(answer.ttft_s * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--fat", action="store_true", help="a cache of 32 KiB a token")
    parser.add_argument("--backends", default="kvconn,mooncake_tcp")
    parser.add_argument("--alone", action="store_true", help="a single server beside them")
    parser.add_argument("--apart", action="store_true", help="one of them at a time")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tokens", default="300,1900")
    parser.add_argument("--dtype", choices=tiny_model.FAT_LAYERS, default="float32", help="(default float32)")
    args = parser.parse_args()
    names = args.backends.split(",")
    with tempfile.TemporaryDirectory() as workdir, contextlib.ExitStack() as stack:
        directory = Path(workdir) / "model"
        model = tiny_model.make_32k(directory, args.dtype) if args.fat else tiny_model.make(directory)
        on_cpu = plugin(Path(workdir) / "plugin", ON_CPU)
        engines: dict[str, SGLangPair | Alone] = {}
        for name in names:
            more = {"dtype": args.dtype, "extra_env": on_cpu}
            engines[name] = SGLangPair(model, Path(workdir) / name, "--page-size", str(args.page_size), backend=name, **more)
        if args.alone:
            engines["alone"] = Alone(model, Path(workdir) / "alone", dtype=args.dtype)
        lengths = [int(text) for text in args.tokens.split(",")]
        times: dict[int, dict[str, list[float]]] = {tokens: {name: [] for name in engines} for tokens in lengths}
        if args.apart:
            for half in range(2):
                for name, each in engines.items():
                    with each:
                        for tokens in lengths:
                            first = 1000 * tokens + half * args.requests
                            measure(each, tokens, range(first - TURN, first))
                            times[tokens][name] += measure(each, tokens, range(first, first + -(-args.requests // 2)))
        else:
            for each in engines.values():
                stack.enter_context(each)
            for tokens in lengths:
                for turn in range(-1, -(-args.requests // TURN)):
                    for name, each in engines.items():
                        taken = measure(each, tokens, range(1000 * tokens + turn * TURN, 1000 * tokens + (turn + 1) * TURN))
                        if turn >= 0:  # the first turn warms
                            times[tokens][name] += taken
        for tokens in lengths:
            line = [f"{tokens} tokens"]
            for name in engines:
                ordered = sorted(times[tokens][name])
                line.append(f"{name} {statistics.median(ordered):.1f} ms ({ordered[0]:.1f} to {ordered[-1]:.1f})")
            if len(names) == 2:
                ratio = statistics.median(times[tokens][names[0]]) / statistics.median(times[tokens][names[1]])
                line.append(f"{names[0]} takes {ratio:.2f} of {names[1]}")
            print(", ".join(line), flush=True)


if __name__ == "__main__":
    main()
