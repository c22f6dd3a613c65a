"""Pairs of real vLLM servers with caches of other kinds than test_pair's: texts must equal a single engine's.

One pair is up at a time. With KVCONN_E2E_KINDS="mla window" only those are run.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import HOST, Answer, ask, metric, wait_idle, wait_until
from asking import request as http_request
from servers import Server, free_ports, leaving_nothing, stop_all
from vllm_pair import Pair

BLOCK = 128  # tokens, vLLM's on CPU
KINDS = os.environ.get("KVCONN_E2E_KINDS", "llama mla window").split()
numbers = itertools.count(1)


def progress(name: str, seconds: float, text: str) -> None:
    print(f"  [{seconds:4.0f} s] {name}: {text}", file=sys.stderr, flush=True)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind = request.param
    workdir = tmp_path_factory.mktemp(f"pair-{kind}")
    the_pair = Pair(
        tiny_model.make(workdir / f"model-{kind}", kind=kind),
        workdir / "logs",
        progress=progress,
        forked=True,
        extra_env={"KVCONN_SERVES": "MooncakeConnector"} if kind == "window" else {},
        written_for={"mla": "NixlPushConnector", "window": "MooncakeConnector"}.get(kind),
        both=kind == "mla",  # as NIXL's pages have it
        beside=storage(workdir / "storage") if kind == "llama" else None,
        # That connector knows no chunked prefill (test_pair has prompts in chunks).
        extra_args=["--max-num-batched-tokens", "4096"] if kind == "llama" else [],
        prefill_args=["--max-num-batched-tokens", "512"] if kind == "window" else [],  # it goes on while a prompt is computed
    )
    with leaving_nothing(the_pair):
        yield the_pair


def storage(where: Path) -> dict[str, Any]:
    """The grouped-query pair has its connector inside a MultiConnector, before one that keeps caches on a disk (vLLM's
    connectors that keep them in host memory want a GPU)."""
    where.mkdir()
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(where)}}


@pytest.fixture(autouse=True)
def servers_live(pair: Pair) -> Iterator[None]:
    yield
    for server in (pair.prefill, pair.decode):
        server.check_alive()
        wait_idle(server.name, server.url, 15)


def words(tokens: int) -> str:
    """A prompt that no cache has seen."""
    text = f"{next(numbers)} of {time.monotonic_ns()}: the woods are lovely, dark and deep, but I have promises to keep. "
    return (text * (tokens // len(text) + 1))[:tokens]


def body(pair: Pair, prompt: str, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    return {"model": pair.served, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}


def alone(pair: Pair, request: dict[str, Any]) -> Answer:
    answer = ask(pair.decode.url, {**request, "cache_salt": f"alone-{next(numbers)}"})
    assert answer.ok, (answer, pair.decode.log_tail())
    return answer


def asked(pair: Pair, tokens: int) -> tuple[dict[str, Any], str]:
    """A request with a prompt of so many tokens, and the text that a single engine gives."""
    if "mla" not in pair.model:
        request = body(pair, words(tokens))
        return request, alone(pair, request).text
    # vLLM's MLA computes a token of the prompt by another formula than one that it decodes, and rounds differently; the
    # decode engine computes the prompt's last token by the latter. So that token is one that the single engine decodes.
    begin = words(tokens - 1)
    text = alone(pair, body(pair, begin, max_tokens=17)).text
    return body(pair, begin + text[0]), text[1:]


def tries(pair: Pair) -> int:
    """How many prompts a text may take to equal a single engine's. vLLM's MLA on CPU caches other values for a prompt of
    n tokens than for its first n - 1 (in float32, by up to their own size). So one text in some twenty differs, each time in
    the same way. With a wrong cache every text differs."""
    return 3 if "mla" in pair.model else 1


def through(pair: Pair, request: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    position = pair.decode.log_size()
    answer = ask(pair.router.url, request)
    assert answer.ok, (answer, pair.decode.log_tail())
    wait_until("the load's line in the decode server's log", lambda: bool(pair.loads(position)))
    (load,) = pair.loads(position)
    return answer, load


def test_log_says_under_which_name_it_serves(pair: Pair) -> None:
    """And what became of the other connector's words, once in each engine."""
    says = {
        "mla": [
            "serves as NixlPushConnector",
            "push_registration_timeout (of NIXL's connector) is not used",
        ],
        "window": ["serves as MooncakeConnector", "mooncake_protocol (of Mooncake's connector) is taken as transport = 'tcp'"],
    }
    for server in (pair.prefill, pair.decode):
        log = server.log_since(0)
        for kind, parts in says.items():
            assert [log.count(part) for part in parts] == [int(kind in pair.model)] * len(parts), kind


# 895 and 1023: the last token's window begins on a block's boundary, where vLLM keeps one token too little of it.
@pytest.mark.parametrize("tokens", [2, BLOCK - 1, BLOCK, BLOCK + 1, 300, 7 * BLOCK - 1, 900, 8 * BLOCK - 1, 2200])
def test_text_equals_a_single_engines(pair: Pair, tokens: int) -> None:
    for _ in range(tries(pair)):
        request, expected = asked(pair, tokens)
        answer, load = through(pair, request)
        if answer.text == expected:
            break
    assert answer.text == expected
    assert len(answer.text) == 16
    assert load["blocks"] > 0


def test_window_moves_while_the_prompt_is_computed(pair: Pair) -> None:
    if "window" not in pair.model:
        pytest.skip("of the pair whose model has windows")
    bootstrap = f"http://127.0.0.1:{pair.bootstrap_port}"
    before = metric(bootstrap, "kvconn_partial_offers_bytes_total")
    request, expected = asked(pair, 2300)
    answer, load = through(pair, request)
    assert answer.text == expected
    assert metric(bootstrap, "kvconn_partial_offers_bytes_total") - before == load["bytes"]  # nothing was left for the end


def test_cached_prefix(pair: Pair) -> None:
    if "mla" in pair.model:
        pytest.skip("vLLM has no prefix cache for MLA on CPU")
    prefix = words(5 * BLOCK)
    first, second = body(pair, prefix + words(200)), body(pair, prefix + words(2 * BLOCK))
    expected = [alone(pair, request).text for request in (first, second)]
    assert [through(pair, request)[0].text for request in (first, second)] == expected


def test_many_at_once(pair: Pair) -> None:
    requests, expected = zip(*(asked(pair, 100 + 170 * n) for n in range(10)))
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: ask(pair.router.url, {**request, "stream": True}), requests))
    assert [answer.error for answer in answers] == [""] * len(requests)
    # vLLM's MLA on CPU gives another text for a prompt in a batch than for one that is alone, without any transfer too.
    if "mla" not in pair.model:
        assert [answer.text for answer in answers] == list(expected)


# -- the contract of NIXL's routers: first prefill, then decode with prefill's answer, word for word ------------------------


@pytest.mark.parametrize("known", [None, ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")])
def test_nixl_contract(pair: Pair, known: tuple[str, ...] | None) -> None:
    for _ in range(tries(pair)):
        request, expected = asked(pair, 700)
        answer = by_nixl(pair, request, known)
        if answer.text == expected:
            break
    assert answer.text == expected


def example_router(name: str) -> str:
    """An example of vLLM's, out of its source distribution."""
    script = Path(__file__).resolve().parent.parent / "scripts" / "vllm-example-router.py"
    found = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True, check=False)
    if found.returncode == 75:
        pytest.skip(f"NOT RUN: {found.stderr.strip()}")
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def by_urls(pair: Pair) -> list[str]:
    return ["--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url]


def push_router(pair: Pair) -> list[str]:
    """Asks both engines at once, and knows of prefill what its command says."""
    if pair._written_for != "NixlPushConnector":
        pytest.skip("of the pair that serves as NixlPushConnector")
    status, text = http_request("GET", f"http://{HOST}:{pair.bootstrap_port}/query")
    assert status == 200, text
    prefill, decode = (server.url.removeprefix("http://") for server in (pair.prefill, pair.decode))
    its = ["--prefill-engine-id", json.loads(text)["0"]["engine_id"], "--prefill-kv-host", HOST]
    its += ["--prefill-side-channel-port", str(pair.bootstrap_port)]
    return [example_router("push"), "--model", pair.served, "--prefill", prefill, "--decode", decode, *its]


# Each router's answer when it is up, and its command.
ROUTERS: dict[str, tuple[str, Callable[[Pair], list[str]]]] = {
    "vllm-example-mooncake": ("/openapi.json", lambda pair: [example_router("mooncake"), *by_urls(pair)]),
    "vllm-example-push": ("/status", push_router),
    "nixl": ("/health", lambda pair: ["-m", "kvconn", "proxy", "--contract", "nixl", *by_urls(pair)]),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_other_routers(pair: Pair, name: str) -> None:
    """vLLM's own examples as they are, and ours by the other contract."""
    at, command = ROUTERS[name]
    (port,) = free_ports(1)
    url = f"http://{HOST}:{port}"
    argv = [pair.python, *command(pair), "--port", str(port)]
    router = Server(name, argv, pair._env(), pair.workdir / f"{name}.log", url)
    router.start()
    try:
        wait_until(f"{name} is up", lambda: answers(url + at), 60)
        for _ in range(tries(pair)):
            request, expected = asked(pair, 700)
            position = pair.decode.log_size()
            answer = when_ready(url, request)
            assert answer.ok, (answer, router.log_tail(), pair.decode.log_tail())
            wait_until("the load's line in the decode server's log", lambda position=position: bool(pair.loads(position)))
            if answer.text == expected:
                break
        assert answer.text == expected
    finally:
        stop_all([router])


# What an operator registers of each server in smg, by the contract that smg is to follow. smg does not ask a vLLM that it
# reaches by HTTP for its connector: where nobody says it, smg tells neither server of the other.
SMG = {"nixl": ("mla", "NixlConnector"), "mooncake": ("window", "MooncakeConnector"), "passthrough": ("window", "")}


def smg_workers(pair: Pair, connector: str) -> list[dict[str, Any]]:
    of_prefill: dict[str, Any] = {"bootstrap_port": pair.bootstrap_port}
    of_both: dict[str, Any] = {}
    if connector:
        status, text = http_request("GET", f"http://{HOST}:{pair.bootstrap_port}/query")
        assert status == 200, text
        of_both["kv_connector"] = connector
        of_prefill["kv_engine_id"] = json.loads(text)["0"]["engine_id"]
    return [
        {"url": pair.prefill.url, "worker_type": "prefill", **of_both, **of_prefill},
        {"url": pair.decode.url, "worker_type": "decode", **of_both},
    ]


def computed_alone(pair: Pair) -> float:
    """Tokens of prompts that named no transfer, of a decode server of role kv_consumer."""
    return metric(pair.decode.url, "vllm:kvconn_computed_tokens_total", absent=0, reason="no_transfer")


@pytest.mark.parametrize("mode", SMG)
def test_smg(pair: Pair, mode: str) -> None:
    """SGLang's model gateway before vLLM's servers."""
    kind, connector = SMG[mode]
    if kind not in pair.model:
        pytest.skip(f"of the pair with {kind}")
    if importlib.util.find_spec("smg") is None:
        pytest.skip("NOT RUN: this environment has no smg: pip install --no-deps -r scripts/requirements-smg.txt")
    manifest = pair.workdir / f"smg-{mode}.json"
    manifest.write_text(json.dumps({"version": 1, "workers": smg_workers(pair, connector)}), encoding="utf-8")
    port, metrics = free_ports(2)
    url = f"http://{HOST}:{port}"
    argv = [pair.python, "-m", "smg", "launch", "--pd-disaggregation", "--discovery-provider", "file", "--discovery-file", str(manifest)]
    argv += ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(metrics)]
    router = Server("smg", argv, pair._env(), pair.workdir / f"smg-{mode}.log", url)
    router.start()
    try:
        wait_until("smg is up", lambda: answers(url + "/health"), 60)
        for _ in range(tries(pair)):
            before = computed_alone(pair)
            request, expected = asked(pair, 700)
            position = pair.decode.log_size()
            answer = when_ready(url, request)
            assert answer.ok, (answer, router.log_tail(), pair.decode.log_tail())
            if connector:
                wait_until("the load's line in the decode server's log", lambda position=position: bool(pair.loads(position)))
            if answer.text == expected:
                break
        assert answer.text == expected, router.log_tail()
        said = metric(f"http://{HOST}:{metrics}", "smg_pd_kv_connector_mode_total", absent=0, mode=mode)
        assert said >= 1, http_request("GET", f"http://{HOST}:{metrics}/metrics")[1].decode()
        if not connector:
            assert not pair.loads(position)
            wait_until("the prompt is counted, and the single engine's", lambda: computed_alone(pair) >= before + 2 * 700)
    finally:
        stop_all([router])


def when_ready(url: str, request: dict[str, Any]) -> Answer:
    """Its first answers are 503: vLLM's example asks the prefill servers' ports after it has begun to serve."""
    deadline = time.monotonic() + 60
    while (answer := ask(url, request)).status == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def answers(url: str) -> bool:
    try:
        return http_request("GET", url)[0] == 200
    except OSError:
        return False


def by_nixl(pair: Pair, request: dict[str, Any], known: tuple[str, ...] | None) -> Answer:
    ask_prefill = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    status, text = http_request(
        "POST", pair.prefill.url + "/v1/completions", {**request, "max_tokens": 1, "stream": False, "kv_transfer_params": ask_prefill}
    )
    assert status == 200, text
    answered = json.loads(text)["kv_transfer_params"]
    # In Mooncake's configuration nobody says which address engines tell each other: kvconn finds one.
    host = answered["remote_host"] if "window" in pair.model else HOST
    assert answered["remote_bootstrap_addr"] == f"http://{host}:{pair.bootstrap_port}"
    if known is not None:  # a router that keeps only what it knows
        answered = {key: answered[key] for key in ("do_remote_prefill", "do_remote_decode", *known)}
    position = pair.decode.log_size()
    answer = ask(pair.decode.url, {**request, "kv_transfer_params": answered})
    assert answer.ok, (answer, pair.decode.log_tail())
    wait_until("the load's line in the decode server's log", lambda: bool(pair.loads(position)))
    return answer


# -- metrics --------------------------------------------------------------------------------------------------------


def test_metrics(pair: Pair) -> None:
    names = ["transfers_total", "bytes_total", "transfer_time_seconds_count", "wait_time_seconds_count", "descriptors_count"]

    def counts(url: str) -> list[float]:
        return [metric(url, f"vllm:kvconn_{name}", absent=0) for name in names]

    before = [counts(server.url) for server in (pair.prefill, pair.decode)]
    _, load = through(pair, body(pair, words(700)))
    for server, then in zip((pair.prefill, pair.decode), before):
        wait_until(f"{server.name} counts", lambda server=server, then=then: counts(server.url)[0] == then[0] + 1)
        moved = [now - was for now, was in zip(counts(server.url), then)]
        assert moved == [1, load["bytes"], 1, 1, 1]
        wait_until("nothing in flight", lambda server=server: metric(server.url, "vllm:kvconn_transfers_in_flight") == 0)
        assert metric(server.url, "vllm:kvconn_step_time_seconds_count") > 0
        assert metric(server.url, "vllm:kvconn_failed_transfers_total", absent=0) == 0
    # NIXL's, of an engine that serves in its place; decode counts them.
    same = [metric(pair.decode.url, f"vllm:{name}", absent=0) for name in ("kvconn_bytes_total", "nixl_bytes_transferred_sum")]
    assert same == [same[0], same[0] if "mla" in pair.model else 0]
