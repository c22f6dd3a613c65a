"""Fixtures of the tests on real engines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def sglang_workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("KVCONN_E2E_WORKDIR") or tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="session")
def sglang_model(sglang_workdir: Path) -> Path:
    """The small model: SGLang computes attention on the CPU slowly."""
    import tiny_model

    return tiny_model.make(sglang_workdir / "model")


@pytest.fixture(scope="session")
def alone(sglang_model: Path, sglang_workdir: Path) -> Iterator[Any]:
    """An SGLang server that prefills and decodes: a pair's text must be this server's. It is ready when a pair is."""
    from sglang_servers import Alone

    server = Alone(sglang_model, sglang_workdir / "logs")
    try:
        for each in server.servers:
            each.start()
        yield server
    finally:
        server.stop()
    left = server.leftovers()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two vLLM servers and the router before them. For test_pair they start as users start them."""
    import tiny_model
    from pair_tests import CHUNK, LEASE_S, progress
    from servers import leaving_nothing
    from vllm_pair import Pair

    workdir = Path(os.environ.get("KVCONN_E2E_WORKDIR") or tmp_path_factory.mktemp("pair"))
    router = os.environ.get("KVCONN_E2E_ROUTER")
    model = tiny_model.make(workdir / "model-fat", fat=True)
    # The fat cache: a transfer that takes long enough to be interrupted.
    the_pair = Pair(
        model,
        workdir / "logs",
        executor=os.environ.get("KVCONN_E2E_EXECUTOR", "uni"),
        prefill_config={"lease_s": LEASE_S},
        prefill_args=["--max-num-batched-tokens", str(CHUNK)],
        extra_env={"VLLM_SERVER_DEV_MODE": "1"},  # the server then has a call that preempts all running requests
        progress=progress,
        router_argv=router.split() if router else None,
        forked=request.module.__name__ != "test_pair",
    )
    with leaving_nothing(the_pair):
        yield the_pair


@pytest.fixture
def servers_live(pair: Any) -> Iterator[None]:
    """Checks after each test that the engines live, serve, and hold no block of a request that is over."""
    from pair_tests import idle

    yield
    for server in pair.servers:
        server.check_alive()
    idle(pair)


@pytest.fixture(scope="module")
def narrow(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A second decode engine, which takes one request at a time, and all caches by tcp."""
    from pair_tests import progress
    from servers import wait_ready
    from vllm_pair import Pair

    other = Pair(
        Path(pair.model),
        tmp_path_factory.mktemp("narrow"),
        failure_policy="recompute",
        decode_args=["--max-num-seqs", "1"],
        decode_config={"bootstrap_allow": ["127.0.0.1"], "transport": "tcp"},
        forked=True,
        progress=progress,
    )
    try:
        other.decode.start()
        wait_ready([other.decode], progress=progress)
        other.warm(other.decode)
        yield other
    finally:
        other.stop()
    assert not other.leftovers()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Each engine has an environment of its own."""
    if collection_path.name.startswith("test_sglang") and importlib.util.find_spec("sglang") is None:
        return True
    return None
