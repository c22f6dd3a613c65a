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


# As vLLM's example router for NixlPushConnector sends it, with the header X-Request-Id: 9f, to both engines at once.
PUSHED = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "p", "remote_port": 5600}
PUSHES = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None, "remote_port": None}


def test_requests_that_one_x_request_id_joins() -> None:
    base = params.base_of("cmpl-9f-0-1a2b3C4d")
    assert base == "cmpl-9f-0" == params.base_of(base)
    assert params.parse(PUSHES, base) == params.PrefillParams("cmpl-9f-0", early=True)
    assert params.parse({**PUSHES, "transfer_id": "t"}, base) == params.PrefillParams("t", early=True)

    def loads(base: str, **more: Any) -> Any:
        return params.parse({**PUSHED, **more}, base).transfer_id  # type: ignore[union-attr]

    assert loads(base, remote_request_id="9f") == "cmpl-9f-0"
    # Prefill's answer, handed on with NIXL's words alone, all words, and to a request with another X-Request-Id.
    assert loads(base, remote_request_id="cmpl-9f-0") == loads(base, remote_request_id="cmpl-9f-0", transfer_id="cmpl-9f-0") == base
    assert loads("cmpl-77-0", remote_request_id="cmpl-9f-0") == base
    for missing in ("", None):
        with pytest.raises(params.BadParams, match=r"is empty|is missing"):
            loads(base, remote_request_id=missing)
    # Under other names the ids are what they are.
    assert loads("", remote_request_id="9f") == "9f"
    minted = params.parse(PUSHES)
    assert isinstance(minted, params.PrefillParams) and minted.transfer_id.startswith("kvconn-") and not minted.early


def test_send_early() -> None:
    whole, in_parts = like(PARALLEL_CONFIG, use_ubatching=False), like(PARALLEL_CONFIG, use_ubatching=True)
    assert [params.send_early({}, config) for config in (like(PARALLEL_CONFIG), whole, in_parts)] == ["layers", "layers", "chunks"]
    assert [params.send_early({"send_early": value}, in_parts) for value in ("layers", "chunks", "off")] == ["chunks", "chunks", "off"]
    with pytest.raises(ValueError, match="send_early is True"):
        params.send_early({"send_early": True}, whole)
