"""The SGLang backend's names, addresses and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvconn._engine import Rank as RankOf
from kvconn.sglang.layout import ids
from kvconn.sglang.params import Prefill, agent_config, bootstrap_address, from_environment, of_rank, prefill_api_key, server_config, unused
from kvconn.sglang.served import _adapters


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
    tiny = {"model": "tiny", "model_fingerprint": "1:a"}
    port = Prefill("127.0.0.1:8998", {"kv_layout": "x"}, 300)
    config = agent_config(RankOf(1, 2), tiny, "float32", 16, extra, port)
    assert (config["role"], config["early_load_s"], config["route_info"]) == ("prefill", 300, {"kv_layout": "x"})
    assert (config["model"], config["model_fingerprint"]) == ("tiny", "1:a")
    assert config["dtype"] == "float32" and config["tcp_port"] == 9000 and config["tp_rank"] == 1
    named = agent_config(RankOf(), tiny, "f", 1, {"model": "mine"})
    assert named["role"] == "decode" and named["report_claims"] and "bootstrap_join" not in named
    assert named["model"] == "mine" and "model_fingerprint" not in named, "who names the model vouches for it"
    secure = agent_config(RankOf(), {}, "f", 1, {"tls_cert_file": "c", "tls_key_file": "k"}, port)
    assert secure["bootstrap_join"] == "https://127.0.0.1:8998"
    for key, value in (("engine_id", "mine"), ("bootstrap_port", 1), ("tp_size", 2), ("must_match", {})):
        with pytest.raises(ValueError, match=f"KVCONN_SGLANG_CONFIG sets {key}"):
            agent_config(RankOf(), {}, "f", 1, {key: value})
    file.write_text("[1]")
    with pytest.raises(ValueError, match="an object was expected"):
        from_environment({"KVCONN_SGLANG_CONFIG": str(file)})
    with pytest.raises(ValueError, match="KVCONN_SGLANG_CONFIG"):
        from_environment({"KVCONN_SGLANG_CONFIG": "{"})


def test_variables_of_other_backends() -> None:
    """They are named, without their values. What SGLang's own code around the backends reads counts with each of them."""
    theirs = ["MC_GID_INDEX", "SGLANG_DISAGGREGATION_NIXL_BACKEND", "SGLANG_MOONCAKE_SEND_AUX_TCP"]
    others = ["SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "MOONCAKE_MASTER", "KVCONN_SGLANG_CONFIG"]
    assert unused(dict.fromkeys([*reversed(theirs), *others], "1")) == theirs
    assert unused(dict.fromkeys(theirs, "")) == []


def test_prefill_key_goes_to_named_hosts_only(tmp_path: Any) -> None:
    file = tmp_path / "key"
    environ = {"KVCONN_SGLANG_PREFILL_API_KEY_FILE": str(file)}
    allowed = {"bootstrap_allow": ["10.0.0.0/8"]}
    assert prefill_api_key({}, {}) == ""
    with pytest.raises(ValueError, match="has no bootstrap_allow"):
        prefill_api_key({}, environ)
    with pytest.raises(FileNotFoundError):
        prefill_api_key(allowed, environ)
    for text, fine in (("secret\n", True), ("", False), ("one\ntwo", False)):
        file.write_text(text)
        if fine:
            assert prefill_api_key(allowed, environ) == "secret"
        else:
            with pytest.raises(ValueError, match="a key of one line was expected"):
                prefill_api_key(allowed, environ)


def test_keys_of_a_server_that_changes_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang ends a server whose other role does not start, so the keys are looked at for both."""
    given = {"join_token": "secret", "lease_s": 5}
    assert of_rank(given, None, 0, True, True) == of_rank(given, None, 0, False, False) == given
    assert of_rank(given, None, 0, False, True) == {"lease_s": 5}
    for prefill in (True, False):
        with pytest.raises(ValueError, match="tls_ca_file without tls_cert_file"):
            of_rank({"tls_ca_file": "/ca.pem"}, None, 0, prefill, True)
        with monkeypatch.context() as patch:
            patch.setenv("KVCONN_SGLANG_PREFILL_API_KEY_FILE", "/key")
            assert of_rank(given, None, 0, prefill, False) == given
            with pytest.raises(ValueError, match="has no bootstrap_allow"):
                of_rank(given, None, 0, prefill, True)


def test_adapters_of_options() -> None:
    """A path may have the sign that stands behind a name, as SGLang takes it."""
    words = ["mine=/adapters/rank=8", "/adapters/plain", "other=/adapters/other"]
    assert _adapters(words) == [("/adapters/plain", "/adapters/plain"), ("mine", "/adapters/rank=8"), ("other", "/adapters/other")]
    assert _adapters({"mine": "/a=b"}) == [("mine", "/a=b")] and _adapters(None) == []
