"""kv_transfer_params, as routers send them. Needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from like import PARALLEL_CONFIG, like

from kvconn.vllm import params

DECODE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t",
    "remote_bootstrap_addr": "http://p:8998",
    "remote_engine_id": "engine-p",
}


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ([], "an object was expected"),
        ({"do_remote_prefill": True}, "transfer_id is missing"),
        ({"do_remote_decode": True, "transfer_id": ""}, "transfer_id is empty"),
        ({**DECODE, "remote_request_id": "u"}, "transfer_id is 't', but remote_request_id is 'u'"),
        ({**DECODE, "remote_bootstrap_addr": None, "remote_host": "p"}, "remote_port is None: a port"),
        ({**DECODE, "remote_bootstrap_addr": None, "remote_host": "p", "remote_port": True}, "remote_port is True"),
        ({**DECODE, "kvconn_error": "no"}, "the prefill engine says: no"),
        ({**DECODE, "remote_engine_id": None}, "remote_engine_id is missing"),
        ({**DECODE, "transfer_id": 3}, "transfer_id is 3: a string was expected, not int"),
        ({**DECODE, "do_remote_prefill": 1}, "do_remote_prefill is 1: true or false was expected"),
        ({**DECODE, "do_remote_decode": True}, "both true"),
    ],
)
def test_bad_params(kv: Any, said: str) -> None:
    with pytest.raises(params.BadParams, match=said):
        params.parse(kv)


@pytest.mark.parametrize("kv", [None, {}, {"transfer_id": "t"}, {"do_remote_decode": False}, {"do_remote_decode": None}])
def test_params_that_ask_for_nothing(kv: Any) -> None:
    assert params.parse(kv) is None


def test_send_early() -> None:
    whole, in_parts = like(PARALLEL_CONFIG, use_ubatching=False), like(PARALLEL_CONFIG, use_ubatching=True)
    assert [params.send_early({}, config) for config in (like(PARALLEL_CONFIG), whole, in_parts)] == ["layers", "layers", "chunks"]
    assert [params.send_early({"send_early": value}, in_parts) for value in ("layers", "chunks", "off")] == ["chunks", "chunks", "off"]
    with pytest.raises(ValueError, match="send_early is True"):
        params.send_early({"send_early": True}, whole)
