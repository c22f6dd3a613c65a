#!/usr/bin/env python3
"""Two real vLLM servers, one prefilling, one decoding, and kvconn carrying the KV cache between them.

    python e2e/demo.py [--prompts N] [--fat] [--transport NAME] [--workdir DIR]

Run it with the Python of an environment that has vLLM and kvconn (setup_vllm.py prints one; `make demo` does it all).
Every prompt goes through the router, and once straight to one server without any transfer: the texts must be equal.
Both servers are on this host, so each transfer goes by local, and must if --transport is local. Where auto takes another one, the
demo says so with decode's reason: a container may forbid what local needs.
Exit code 0: all as it must be. 1: a text differs, a transfer went by another transport, or a server failed. 130: interrupted.
No process is left behind in any case.
"""

from __future__ import annotations

import argparse
import collections
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import Answer, ServerError, ask, metric, wait_until
from vllm_pair import Pair

SUBJECTS = (
    "the lighthouse keeper",
    "a retired clockmaker",
    "the night train",
    "an old map of the harbour",
    "the beekeeper's daughter",
    "a letter without a sender",
    "the second violin",
    "a winter without snow",
    "the ferry across the lake",
    "the last page of the book",
    "an orchard at the border",
    "the cartographer's mistake",
)
WARM_UP = 3


def prompt_text(number: int, tokens: int) -> str:
    """A prompt of so many tokens (the tiny model has one a byte), unlike any other from its first words on."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    sentence = f"Story {number}: {subject} knew that the tide would turn {number + 2} times before morning came. "
    return (sentence * (tokens // len(sentence) + 1))[:tokens]


def say(text: str = "") -> None:
    print(text, flush=True)


def progress(name: str, seconds: float, text: str) -> None:
    say(f"  [{seconds:4.0f} s] {name}: {text}")


def one_line(text: str, width: int = 60) -> str:
    text = text.encode("unicode_escape").decode()
    return text if len(text) <= width else text[: width - 1] + "…"


def ask_both(pair: Pair, number: int, tokens: int, max_tokens: int) -> tuple[Answer, Answer, dict[str, Any]]:
    """Sends one prompt to one server alone and to the pair. Returns both answers, and the log's words on the transfer."""
    body = {
        "model": pair.served,
        "prompt": prompt_text(number, tokens),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    # Different salts: neither way finds the other's prefix in a cache and looks faster than it is.
    single = ask(pair.decode.url, {**body, "cache_salt": f"single-{number}"})
    position = pair.decode.log_size()
    before = hand_overs(pair)
    through = ask(pair.router.url, {**body, "cache_salt": f"pair-{number}"})
    loads: list[dict[str, Any]] = []

    def logged() -> bool:
        loads[:] = pair.loads(position)
        return bool(loads)

    if through.ok:
        try:
            wait_until("the load's line in the decode server's log", logged)
        except TimeoutError:
            through.error = "the text came without a transfer: the decode server computed the prompt itself"
    if not loads:
        return single, through, {}
    if before is not None:
        try:  # the router may read prefill's answer after decode's first token
            wait_until("the router's count of hand-overs", lambda: hand_overs(pair)[0] > before[0])
            loads[-1]["hand_over_ms"] = (hand_overs(pair)[1] - before[1]) * 1e3
        except TimeoutError as error:
            through.error = str(error)
    return single, through, loads[-1]


def hand_overs(pair: Pair) -> tuple[float, float] | None:
    """How many hand-overs the router has seen, and their seconds; None: another router, which does not say."""
    name = "kvconn_proxy_hand_over_seconds"
    try:
        return metric(pair.router.url, f"{name}_count"), metric(pair.router.url, f"{name}_sum")
    except ServerError:
        return None


def show(number: int, single: Answer, through: Answer, load: dict[str, Any]) -> bool:
    equal = single.ok and through.ok and single.text == through.text
    say(f"prompt {number + 1:2d}  {one_line(through.text)!s}")
    if equal:
        say("           text equal to the single engine's: yes")
    else:
        say("           text equal to the single engine's: NO")
        say(f"           single engine: {one_line(single.text)} {single.error}")
        if through.error:
            say(f"           pair: {through.error}")
    say(
        f"           first token {through.ttft_s * 1e3:6.1f} ms, single engine {single.ttft_s * 1e3:6.1f} ms"
        f" ({through.ttft_s / max(single.ttft_s, 1e-9):.2f} times)"
    )
    if load:
        say(
            f"           carried {load['bytes']:,} bytes in {load['blocks']} blocks by {load['transport']}: {load['ms']:.2f} ms under way,"
            f" {load['gb_per_s']:.2f} GB/s; the other {load['wait_ms']:.1f} ms it waited for the prefill"
        )
    if (took := load.get("hand_over_ms")) is not None:
        say(f"           hand-over {took:.1f} ms, from prefill's first token to decode's")
    return equal


def went_by(rows: list[tuple[Answer, Answer, dict[str, Any]]], asked: str, log: str) -> tuple[str, bool]:
    """Says by which transports the transfers of rows went, and whether they may. log: the decode server's, which has the reason."""
    by = collections.Counter(row[2]["transport"] for row in rows if row[2])
    text = "transfers went by " + (", ".join(f"{name}: {by[name]}" for name in sorted(by)) or "no transport: there were none")
    if asked not in ("auto", "local") or set(by) == {"local"}:
        return text, True
    why = [found for found in re.findall(r"pair goes (?:on )?over [^:\s]+: (.*?)(?: peer=|$)", log, re.MULTILINE) if found]
    said = f"decode says: {why[-1]}" if why else "decode's log has no reason"
    return f"NOT BY LOCAL: {text}, though both servers are on this host ({said})", asked == "auto" and bool(by)


def run(args: argparse.Namespace, workdir: Path) -> int:
    import tiny_model

    begin = time.monotonic()
    say("model")
    model = tiny_model.make(workdir / ("model-fat" if args.fat else "model"), args.fat)
    say(f"  {model}")
    say("servers (prefill, decode, router)")
    config = {"transport": args.transport}
    pair = Pair(
        model,
        workdir / "logs",
        executor=args.executor,
        dtype=args.dtype,
        progress=progress,
        router_argv=args.router,
        prefill_config=config,
        decode_config=config,
    )
    different, right = 0, False
    try:
        with pair:
            say(f"  all ready after {time.monotonic() - begin:.0f} s; logs in {workdir / 'logs'}")
            say(f"warm-up ({WARM_UP} prompts)")
            for number in range(-WARM_UP, 0):
                single, through, _ = ask_both(pair, number, args.tokens, args.max_tokens)
                if not (single.ok and through.ok):
                    raise ServerError(f"no answer: {single.error or through.error}\n{pair.decode.log_tail()}")
            say()
            rows: list[tuple[Answer, Answer, dict[str, Any]]] = []
            for number in range(args.prompts):
                row = ask_both(pair, number, args.tokens, args.max_tokens)
                rows.append(row)
                different += not show(number, *row)
            say()
            summary(rows, args.tokens)
            by, right = went_by(rows, args.transport, pair.decode.log_since(0))
            say(by)
    finally:
        left = pair.leftovers()
        if left:
            say("LEFT BEHIND: " + "; ".join(left))
            different += 1
    if different:
        say(f"\nFAILED: {different} of {args.prompts} prompts differ; logs in {workdir / 'logs'}")
        return 1
    if not right:
        say(f"\nFAILED: transfers went by another transport than local; logs in {workdir / 'logs'}")
        return 1
    say(f"\nall {args.prompts} texts equal the single engine's; {time.monotonic() - begin:.0f} s in all")
    return 0


def summary(rows: list[tuple[Answer, Answer, dict[str, Any]]], tokens: int) -> None:
    single = statistics.median(row[0].ttft_s for row in rows) * 1e3
    through = statistics.median(row[1].ttft_s for row in rows) * 1e3
    say(
        f"time to first token, median of {len(rows)} prompts of {tokens} tokens: {through:.1f} ms through the pair, "
        f"{single:.1f} ms with a single engine: {through / max(single, 1e-9):.2f} times"
    )
    loads = [row[2] for row in rows if row[2]]
    if loads:
        say(
            f"transfers: {sum(load['bytes'] for load in loads):,} bytes in {len(loads)} loads, median "
            f"{statistics.median(load['ms'] for load in loads):.2f} ms under way, "
            f"{statistics.median(load['gb_per_s'] for load in loads):.2f} GB/s"
        )
    handed = [load["hand_over_ms"] for load in loads if "hand_over_ms" in load]
    if handed:
        say(f"hand-over, from prefill's first token to decode's: median {statistics.median(handed):.1f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12, metavar="N")
    parser.add_argument("--tokens", type=int, default=900, metavar="N", help="length of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="length of an answer")
    parser.add_argument("--fat", action="store_true", help="a cache of 64 KiB a token instead of 4 KiB (in float32)")
    parser.add_argument(
        "--executor", choices=("uni", "mp"), default="uni", help="vLLM's worker in the engine's process, or in one of its own"
    )
    parser.add_argument("--transport", default="auto", help="of both agents: auto, local, rdma or tcp, or several with commas")
    parser.add_argument("--dtype", default="float32", help="in bfloat16 texts may differ by rounding, also from one engine")
    parser.add_argument("--workdir", type=Path, metavar="DIR", help="model and logs go there (default: a new one)")
    parser.add_argument("--router", nargs="+", metavar="ARG", help="another router's command")
    args = parser.parse_args()
    for name in ("prompts", "tokens", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1 was expected")
    # SIGTERM takes the way of Ctrl-C: through every finally on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    workdir = args.workdir or Path(tempfile.mkdtemp(prefix="kvconn-demo-"))
    try:
        return run(args, workdir.absolute())
    except KeyboardInterrupt:
        say("\ninterrupted; the servers are stopped")
        return 130
    except (ServerError, TimeoutError) as error:
        say(f"\nFAILED: {error}")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
