"""Pairs of real vLLM servers with caches of other kinds than test_pair's: texts must equal a single engine's.

One pair is up at a time. With KVCONN_E2E_KINDS="mla window" only those are run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_model
from asking import HOST, Answer, ask, metric, wait_idle, wait_until
from asking import request as http_request
from kinds import BLOCK, alone, asked, body, numbers, progress, through, tries, words
from other_routers import LLMD, ROUTERS, SMG, carried, computed, router_up, smg_workers
from servers import free_ports, leaving_nothing
from vllm_pair import HERE, Pair

KINDS = os.environ.get("KVCONN_E2E_KINDS", "llama mla window").split()


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
    for _ in range(4):
        before = metric(bootstrap, "kvconn_partial_offers_bytes_total")
        request, expected = asked(pair, 2300)
        answer, load = through(pair, request)
        assert answer.text == expected
        if early := metric(bootstrap, "kvconn_partial_offers_bytes_total") - before:
            break  # else prefill was done before decode asked, as on a machine with much else to do
    assert early == load["bytes"]  # nothing was left for the end


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


@pytest.mark.parametrize("name", ROUTERS)
def test_other_routers(pair: Pair, name: str) -> None:
    """vLLM's own examples as they are, and ours by the other contract."""
    at, command = ROUTERS[name]
    with router_up(pair, name, command(pair), at) as router:
        carried(pair, router)


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
    (metrics,) = free_ports(1)
    argv = ["-m", "smg", "launch", "--pd-disaggregation", "--discovery-provider", "file", "--discovery-file", str(manifest)]
    argv += ["--host", HOST, "--prometheus-host", HOST, "--prometheus-port", str(metrics)]
    with router_up(pair, f"smg-{mode}", argv, "/readiness") as router:  # it serves, and has both servers
        if connector:
            carried(pair, router)
        else:
            computed(pair, router)
        said = metric(f"http://{HOST}:{metrics}", "smg_pd_kv_connector_mode_total", absent=0, mode=mode)
        assert said >= 1, http_request("GET", f"http://{HOST}:{metrics}/metrics")[1].decode()


@pytest.mark.parametrize("protocol", LLMD)
def test_llmd(pair: Pair, protocol: str) -> None:
    """llm-d's sidecar, replayed (llmd_sidecar.py)."""
    if LLMD[protocol] not in pair.model:
        pytest.skip(f"of the pair with {LLMD[protocol]}")
    argv = [str(HERE / "llmd_sidecar.py"), "--decode", pair.decode.url, "--kv-connector", protocol]
    argv += ["--bootstrap-port", str(pair.bootstrap_port)]
    to = {"x-prefiller-host-port": pair.prefill.url.removeprefix("http://") + ",10.255.255.1:1"}
    with router_up(pair, f"llmd-{protocol}", argv) as sidecar:
        # By mooncake's protocol it lowers max_tokens for prefill, and leaves min_tokens: prefill refuses such a request.
        more = {"min_tokens": 16} if protocol == "nixlv2" else {}
        for stream in (False, True):
            carried(pair, sidecar, {**to, "X-Request-Id": f"ours-{next(numbers)}"}, stream=stream, **more)
        request = {"model": pair.served, "max_completion_tokens": 16, "temperature": 0}
        request["messages"] = [{"role": "user", "content": words(700)}]
        single = ask(pair.decode.url, {**request, "cache_salt": f"alone-{next(numbers)}"}, chat=True)
        position = pair.decode.log_size()
        answer = ask(sidecar.url, {**request, "stream": True}, chat=True, headers=to)
        assert single.ok and answer.ok and answer.text == single.text, (single, answer, sidecar.log_tail())
        wait_until("its load", lambda: len(pair.loaded(position)) == 1)
        assert ask(sidecar.url, body(pair, "a", temperature=-1), headers=to).status == 400
        computed(pair, sidecar)  # no prefill server is named


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
    wait_until("the load's line in the decode server's log", lambda: bool(pair.loaded(position)))
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
