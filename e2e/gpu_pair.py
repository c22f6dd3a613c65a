#!/usr/bin/env python3
"""Two real vLLM servers whose caches are on one GPU, and kvconn between them.

    python e2e/gpu_pair.py [--prompts N] [--tokens N] [--transport NAME] [--dtype TYPE] [--workdir DIR] [-- VLLM-ARGUMENT ...]

Run it with the Python of an environment that has a vLLM for CUDA and kvconn, on a machine with a GPU of 20 GB or more. Each prompt goes
through the router, and once straight to the decode server: the texts must be equal. In bfloat16 an engine's own texts may differ by
rounding, so float32 is the default; FlashAttention has no float32, so `--attention-backend TRITON_ATTN` is given with it.
Without arguments of your own vLLM runs eagerly; `-- --no-enforce-eager` has CUDA graphs.
Exit code 0: all texts are equal. 1: a text differs, a prompt went without a transfer, or a server failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import demo
import tiny_model
from asking import Answer, ServerError
from vllm_pair import Pair

CACHE_BYTES = 8 << 30  # of each server
LENGTH = 8192  # the model's most tokens


def per_token(answers: list[Answer]) -> float:
    """The median of the seconds between two tokens of a text, the first of which a pair's prefill server computed."""
    return statistics.median(after - before for answer in answers for before, after in zip(answer.came[1:], answer.came[2:], strict=False))


def run(args: argparse.Namespace, workdir: Path) -> int:
    config = {"transport": args.transport}
    attention = ["--attention-backend", "TRITON_ATTN"] if args.dtype == "float32" else []
    pair = Pair(
        tiny_model.make(workdir / "model", True, layers=8),
        workdir / "logs",
        executor="",  # vLLM's own: the engine in a process beside the server's
        dtype=args.dtype,
        max_model_len=LENGTH,
        progress=demo.progress,
        prefill_config=config,
        decode_config=config,
        extra_args=["--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(CACHE_BYTES), *attention, *args.vllm],
    )
    begin = time.monotonic()
    with pair:
        demo.say(f"ready after {time.monotonic() - begin:.0f} s")
        rows: list[tuple[Answer, Answer, dict[str, Any]]] = []
        for number in range(-demo.WARM_UP, args.prompts):
            row = demo.ask_both(pair, number, args.tokens, 32)
            if number >= 0:
                rows.append(row)
        equal = 0
        for number, (single, through, _) in enumerate(rows):
            same = single.ok and through.ok and single.text == through.text
            equal += same
            if not same:
                demo.say(f"prompt {number}: {single.error or single.text!r}, through the pair {through.error or through.text!r}")
        demo.summary(rows, args.tokens)
        demo.say(demo.went_by(rows, args.transport, pair.decode.log_since(0))[0])
        single_s, through_s = per_token([row[0] for row in rows]), per_token([row[1] for row in rows])
        demo.say(f"time per token, median: {through_s * 1e3:.2f} ms through the pair, {single_s * 1e3:.2f} ms with a single engine")
        demo.say(f"{equal} of {args.prompts} texts equal the single engine's")
    return 0 if equal == args.prompts else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, metavar="N")
    parser.add_argument("--tokens", type=int, default=900, metavar="N", help="length of a prompt")
    parser.add_argument("--transport", default="auto", help="of both agents: auto, local, rdma or tcp, or several with commas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="model and logs go there (default: a new one)")
    parser.add_argument("vllm", nargs="*", metavar="VLLM-ARGUMENT", help="behind --: for both servers")
    args = parser.parse_args()
    for name in ("prompts", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: at least 1 was expected")
    try:
        return run(args, (args.workdir or Path(tempfile.mkdtemp(prefix="kvconn-gpu-pair-"))).absolute())
    except (ServerError, TimeoutError) as error:
        demo.say(f"\nFAILED: {error}")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
