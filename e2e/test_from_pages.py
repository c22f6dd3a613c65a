"""The configurations of docs/from-nixl.md and docs/from-mooncake.md behind vllm-router: the pages' commands as they stand.

A single engine without a connector says what the texts are. vllm-router comes with scripts/requirements-vllm-router.txt.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import test_dynamo as dynamo
import tiny_model
from asking import HOST, ask, metric, wait_until
from asking import request as http_request
from demo import prompt_text
from pair_tests import progress
from readme import LOGS, ROOT, between_its_blocks, with_logs
from servers import Server, free_ports, leftovers, wait_ready
from vllm_pair import HERE, environment

HEADING = "The whole commands"
SERVED = "/tmp/tiny-model"  # as the pages call it
BLOCK = 128  # tokens, vLLM's on CPU
PROMPTS = [(prompt_text(number, 100 + 61 * number), bool(number % 2)) for number in range(16)]  # and whether the answer is streamed
SOURCE = "vllm:prompt_tokens_by_source_total"  # vLLM's own count of where a prompt's tokens came from
ROUTER_METRICS = 29000  # vllm-router's own, by default
PREFILL_LOG, DECODE_LOG, _ = LOGS


class Case(NamedTuple):
    page: str
    name: str  # the connector's, as the configuration has it
    prefill_port: int
    decode_port: int
    ports: tuple[int, ...]  # further ones of the commands


CASES = (
    Case("docs/from-nixl.md", "NixlConnector", 8100, 8200, (8000, 5600, 5601, ROUTER_METRICS)),
    Case("docs/from-mooncake.md", "MooncakeConnector", 8010, 8020, (8000, 8998, ROUTER_METRICS)),
)


@pytest.fixture(scope="module")
def router() -> str:
    """The version of vllm-router that this environment has."""
    try:
        return importlib.metadata.version("vllm-router")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("NOT RUN: this environment has no vllm-router: pip install --no-deps -r scripts/requirements-vllm-router.txt")


@pytest.fixture(scope="module")
def expected(router: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The texts of a vLLM that has no connector. It has ended when the pairs start."""
    where, run, (port,) = tmp_path_factory.mktemp("alone"), uuid.uuid4().hex, free_ports(1)
    model, url = tiny_model.make(where / "model"), f"http://{HOST}:{port}"
    argv = [sys.executable, str(HERE / "forked_vllm.py"), "serve", str(model), "--served-model-name", SERVED]
    argv += [
        "--host",
        HOST,
        "--port",
        str(port),
        "--max-model-len",
        "4096",
        "--enforce-eager",
        "--dtype",
        "float32",
        "--distributed-executor-backend",
        "uni",
    ]
    env = {**environment(run), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    server = Server("alone", argv, env, where / "alone.log", url)
    try:
        server.start()
        wait_ready([server], progress=progress)
        texts = asked(url)
    finally:
        server.stop()
    assert not leftovers(run)
    yield texts


def asked(url: str) -> list[str]:
    """One after the other: what is computed together could round in another way."""
    texts = []
    for prompt, stream in PROMPTS:
        answer = ask(url, {"model": SERVED, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": stream})
        assert answer.ok, answer
        texts.append(answer.text)
    return texts


def loads(position: int) -> list[dict[str, Any]]:
    lines = DECODE_LOG.read_bytes()[position:].decode(errors="replace").splitlines()
    found = [line.partition("kvconn load ")[2] for line in lines]
    return [json.loads(text) for text in found if text.endswith("}")]


def named(text: str) -> set[str]:
    """The metrics of engines that a page names."""
    return set(re.findall(r"`(vllm:(?:nixl|kvconn)_\w+)`", text))


def as_prefill_knows_itself(case: Case, page: str) -> dict[str, Any]:
    """The prefill engine's configuration and environment, by the page's command. Mooncake's engine id is the one that its port tells."""
    command = re.search(rf"^((?:\w+=\S+ )*)vllm serve \S+ --port {case.prefill_port} [^']*'([^']*)'", page, re.M)
    assert command, page
    config = {**json.loads(command[2]), "environment": dict(each.split("=") for each in command[1].split())}
    if case.name == "MooncakeConnector":
        port = config["environment"]["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
        config["engine_id"] = json.loads(http_request("GET", f"http://{HOST}:{port}/query")[1])["0"]["engine_id"]
    return config


class Running(NamedTuple):
    """The servers of a page's commands, which have computed one prompt."""

    case: Case
    page: str
    decode: str
    loads: list[int]  # that a test has seen


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def running(
    request: pytest.FixtureRequest, router: str, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    case: Case = request.param
    page = (ROOT / case.page).read_text(encoding="utf-8")
    assert f"pip install vllm-router=={router}\n" in page, "the page's release and that of scripts/requirements-vllm-router.txt are one"
    one, failed = Running(case, page, f"http://{HOST}:{case.decode_port}", []), request.session.testsfailed
    ports, where = (case.prefill_port, case.decode_port, *case.ports), tmp_path_factory.mktemp(case.name)
    with between_its_blocks(case.page, HEADING, ".venv-vllm", ports, where) as output:
        # A CPU engine whose first forward pass is a single token may die: see Pair.warm.
        warm = ask(one.decode, {"model": SERVED, "prompt": "warm " * 80, "max_tokens": 4})
        assert warm.ok, warm
        wait_until("its prompt is counted", lambda: metric(one.decode, SOURCE, source="local_compute") > 0, 60)
        yield one
    if request.session.testsfailed == failed:  # else nobody knows how many loads there were
        said = output.read_text(errors="replace")
        assert said.count('"text":') == 2 and '"error"' not in said, said
        assert len(re.findall("kvconn load {", said)) == sum(one.loads) + 1, said


def test_texts_of_a_pair_that_is_configured_for_another(running: Running, expected: list[str]) -> None:
    case, decode = running.case, running.decode
    with with_logs():
        position, computed = DECODE_LOG.stat().st_size, metric(decode, SOURCE, source="local_compute")

        texts = asked(f"http://{HOST}:8000")
        equal = sum(text == single for text, single in zip(texts, expected))
        assert equal == len(PROMPTS), list(zip(texts, expected))

        wait_until("each has its load in the log", lambda: len(loads(position)) >= len(PROMPTS), 60)
        carried = loads(position)
        running.loads.append(len(carried))
        assert sorted(load["blocks"] for load in carried) == sorted(-(-len(prompt) // BLOCK) for prompt, _ in PROMPTS), carried
        carried_tokens = sum(len(prompt) for prompt, _ in PROMPTS)  # the tiny model has one a byte
        wait_until("vLLM counts them", lambda: metric(decode, SOURCE, source="external_kv_transfer") >= carried_tokens, 60)
        assert metric(decode, SOURCE, source="external_kv_transfer") == carried_tokens
        assert metric(decode, SOURCE, source="local_compute") == computed, "decode has computed what it was to load"
        for log in (PREFILL_LOG, DECODE_LOG):
            assert f"kvconn serves as {case.name}" in log.read_text(errors="replace"), log

        count, total = "vllm:kvconn_transfers_total", sum(load["bytes"] for load in carried)
        wait_until("each is counted", lambda: metric(decode, count, absent=0, side="load") == len(PROMPTS), 60)
        assert metric(decode, "vllm:kvconn_bytes_total", side="load") == total > 0
        told = http_request("GET", decode + "/metrics")[1].decode()
        if case.name == "NixlConnector":
            assert metric(decode, "vllm:nixl_xfer_time_seconds_count") == metric(decode, "vllm:nixl_num_descriptors_count") == len(PROMPTS)
            assert metric(decode, "vllm:nixl_bytes_transferred_sum") == total
        missing = [name for name in named(running.page) if not re.search(rf"^# TYPE {name} ", told, re.M)]
        assert not missing, missing


def test_dynamo_s_handler_before_the_same_servers(running: Running, tmp_path: Path) -> None:
    """The texts are a single engine's (dynamo_handlers.py). The test above counts from the servers' start, so it comes first."""
    env = dynamo.skip_without_dynamo()
    case, decode, (port,) = running.case, running.decode, free_ports(1)
    argv = [sys.executable, str(dynamo.HANDLERS), "serve", json.dumps(as_prefill_knows_itself(case, running.page))]
    argv += ["--port", str(port), "--prefill", f"http://{HOST}:{case.prefill_port}", "--decode", decode]
    worker = Server("dynamo", argv, env, tmp_path / "dynamo.log", f"http://{HOST}:{port}")
    position = DECODE_LOG.stat().st_size
    with with_logs():
        try:
            worker.start()
            wait_ready([worker], bound_s=120, progress=progress)
            for number in range(4):
                request = {"model": SERVED, "prompt": prompt_text(100 + number, 700), "max_tokens": 16, "temperature": 0}
                single = ask(decode, {**request, "cache_salt": "a single engine"})
                answer = ask(worker.url, {**request, "stream": bool(number % 2)})
                assert single.ok and answer.ok and answer.text == single.text, (single, answer, worker.log_tail())
            wait_until("each has its load in the log", lambda: len(loads(position)) == 4, 60)
            running.loads.append(4)
        finally:
            worker.stop()
