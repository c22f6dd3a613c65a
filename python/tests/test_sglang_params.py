"""The SGLang backend's names, addresses and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvconn._engine import Rank as RankOf
from kvconn.sglang.layout import ids
from kvconn.sglang.params import agent_config, bootstrap_address, from_environment, server_config


def test_ids() -> None:
    assert list(ids(np.array([[3], [4]], np.int64), "pages")) == [3, 4]
    assert list(ids((), "pages")) == []
    with pytest.raises(ValueError, match="rows hold -2"):
        ids([1, -2], "rows")


def test_addresses() -> None:
    assert bootstrap_address("0.0.0.0", 8998, None) == "127.0.0.1:8998"
    assert bootstrap_address("::", 8998, None) == "[::1]:8998"
    assert bootstrap_address("127.0.0.1", 8998, "10.0.0.7") == "10.0.0.7:8998"


def test_settings_from_the_environment(tmp_path: Any) -> None:
    assert from_environment({}) == {}
    assert from_environment({"KVCONN_SGLANG_CONFIG": '{"lease_s": 5}'}) == {"lease_s": 5}
    file = tmp_path / "kvconn.json"
    file.write_text('{"nats_token": "t", "tcp_port": 9000}')
    extra = from_environment({"KVCONN_SGLANG_CONFIG": str(file)})
    assert server_config("0.0.0.0", 8998, extra) == {
        "role": "bootstrap",
        "bootstrap_host": "0.0.0.0",
        "bootstrap_port": 8998,
        "nats_token": "t",
    }
    config = agent_config(
        "prefill",
        {"model": "tiny", "model_fingerprint": "1:a"},
        "float32",
        16,
        RankOf(1, 2),
        "127.0.0.1:8998",
        {"kv_layout": "x"},
        300,
        extra,
    )
    assert (config["model"], config["model_fingerprint"]) == ("tiny", "1:a")
    assert config["dtype"] == "float32" and config["tcp_port"] == 9000 and config["tp_rank"] == 1
    named = agent_config("decode", {"model": "tiny", "model_fingerprint": "1:a"}, "f", 1, RankOf(), None, {}, 300, {"model": "mine"})
    assert named["model"] == "mine" and "model_fingerprint" not in named, "who names the model vouches for it"
    secure = agent_config("prefill", {}, "f", 1, RankOf(), "127.0.0.1:8998", {}, 300, {"tls_cert_file": "c", "tls_key_file": "k"})
    assert secure["bootstrap_join"] == "https://127.0.0.1:8998"
    for key, value in (("engine_id", "mine"), ("bootstrap_port", 1), ("tp_size", 2), ("must_match", {})):
        with pytest.raises(ValueError, match=f"KVCONN_SGLANG_CONFIG sets {key}"):
            agent_config("decode", {}, "f", 1, RankOf(), None, {}, 300, {key: value})
    file.write_text("[1]")
    with pytest.raises(ValueError, match="an object was expected"):
        from_environment({"KVCONN_SGLANG_CONFIG": str(file)})
    with pytest.raises(ValueError, match="KVCONN_SGLANG_CONFIG"):
        from_environment({"KVCONN_SGLANG_CONFIG": "{"})
