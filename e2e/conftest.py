"""What the tests on real engines share."""

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
    """The small one: SGLang computes attention on the CPU slowly."""
    import tiny_model

    return tiny_model.make(sglang_workdir / "model")


@pytest.fixture(scope="session")
def alone(sglang_model: Path, sglang_workdir: Path) -> Iterator[Any]:
    """An SGLang server that does it all, which says what the pairs' texts must be. It is ready when a pair is."""
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


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Each engine has an environment of its own."""
    if collection_path.name.startswith("test_sglang") and importlib.util.find_spec("sglang") is None:
        return True
    return None
