"""Which client a request belongs to, and what its cache is of, by ids and requests that vLLM's own code makes."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any, cast

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed here: these run in the environment of `make e2e`", allow_module_level=True)

import like as vllm
from test_checkpoint import tensors, write
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request, RequestStatus
from vllm_sides import Status, decode_params, decode_side, finish, ids, prefill_params, prefill_side, request

from kvconn import fingerprint
from kvconn.vllm.params import BadParams
from kvconn.vllm.requests import Prompts, siblings


def engine_request(name: str) -> EngineCoreRequest:
    """A request as the front end makes it, with the id by which the engine then knows it."""
    made = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=SamplingParams(n=3),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    InputProcessor.assign_request_id(made)
    return made


def samples(name: str) -> list[str]:
    parent = ParentRequest(engine_request(name))
    return [parent.get_child_info(n)[0] for n in range(3)]


@pytest.mark.parametrize("random", [True, False])
def test_siblings_are_one_clients(monkeypatch: pytest.MonkeyPatch, random: bool) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0" if random else "1")
    for base in ("cmpl-0f1e2d3c4b5a", "cmpl-550e8400-e29b-41d4-a716-446655440000", "cmpl-7"):
        # A list of two prompts, each with three samples.
        made = samples(f"{base}-0") + samples(f"{base}-1")
        assert len(set(made)) == 6
        assert all(siblings(a, b) for a in made for b in made if a != b), made
        other = samples(f"{base}9-0")
        assert not any(siblings(a, b) for a in made for b in other)
    chat = samples("chatcmpl-x")
    assert siblings(chat[0], chat[2]) and not siblings(chat[0], samples("chatcmpl-y")[1])


def test_retry_of_one_name_is_no_sibling() -> None:
    """A router that retries hands on one X-Request-Id, and another request must not be taken for a sample of the first."""
    for name in ("cmpl-client-7-0", "chatcmpl-client"):
        first, again = engine_request(name).request_id, engine_request(name).request_id
        assert first != again and not siblings(first, again)
        assert not siblings(samples(name)[0], samples(name)[0])


def a_request(adapter: LoRARequest | None = None) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(max_tokens=4), None, lora_request=adapter)


def an_adapter(where: Path, seed: int) -> str:
    where.mkdir(parents=True)
    (where / "adapter_config.json").write_text('{"r": 8}')
    write(where / "adapter_model.safetensors", tensors(seed, layers=1))
    return str(where)


def test_adapters_make_other_caches(tmp_path: Path) -> None:
    """Adapters are compared by their weights: one name, or one path, may stand for two adapters on two hosts."""
    prompts, first = Prompts(), an_adapter(tmp_path / "a/x", 0)
    plain = prompts.fingerprint(a_request())
    assert plain == fingerprint([1, 2, 3])
    one = prompts.fingerprint(a_request(LoRARequest("x", 1, first)))
    same = prompts.fingerprint(a_request(LoRARequest("y", 2, an_adapter(tmp_path / "b/x", 0))))
    other = prompts.fingerprint(a_request(LoRARequest("x", 3, an_adapter(tmp_path / "c/x", 1))))
    assert one == same and len({plain, one, other}) == 3 and 0 < one < 1 << 64
    write(Path(first) / "adapter_model.safetensors", tensors(1, layers=1))
    assert prompts.fingerprint(a_request(LoRARequest("x", 1, first))) == one  # it was read once
    assert prompts.fingerprint(a_request(LoRARequest("x", 1, first, load_inplace=True))) == other


def test_adapter_that_cannot_be_read_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadParams, match=r"the adapter 'x' cannot be compared: .* holds no weights"):
        Prompts().check(a_request(LoRARequest("x", 1, str(tmp_path))))
    one = request(40, decode_params())
    one.lora_request = LoRARequest("x", 1, str(tmp_path))
    side = decode_side()
    side.on_new_request(one)
    assert side.matched_tokens(one, 0) == (40, True)  # and fails as a load, by the policy
    side.after_alloc(one, [[1, 2, 3]], 40)
    assert [work.req_id for work in side.build_meta(0).refusals] == [one.request_id]
    two = request(40, prefill_params())
    two.lora_request = one.lora_request
    prefill = prefill_side()
    prefill.on_new_request(two)
    assert "the adapter 'x' cannot be compared" in prefill.request_finished(two, [[1, 2, 3]])[1]["kvconn_error"]
    assert "cannot be compared" in caplog.text


def test_stand_ins_of_requests_are_vllms() -> None:
    """The requests of vllm_sides end in the ways of vLLM's, and (by like) have no other fields."""
    assert {status.name for status in Status} <= {status.name for status in RequestStatus}
    real: Any = a_request()
    for name in vars(request(3, {})):
        assert hasattr(real, name), name
    assert {"lora_name", "lora_path", "load_inplace"} <= vllm.fields_of(vllm.LORA_REQUEST)


def test_second_sample_with_a_transfer_id_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvconn.vllm")
    side, one, two = decode_side(), request(40, decode_params()), request(40, decode_params())
    one.request_id, two.request_id = "0_cmpl-x-0-1a2b3c4d", "1_cmpl-x-0-1a2b3c4d"
    side.on_new_request(one)
    side.on_new_request(two)
    assert side.matched_tokens(one, 0) == (40, True)
    assert side.matched_tokens(two, 0) == (0, False)
    assert "belongs to request 0_cmpl-x-0-1a2b3c4d already" in caplog.text and "WARNING" not in caplog.text


class Server:
    """The half of vLLM's server that adds requests: what it sends to the engine is kept."""

    def __init__(self) -> None:
        self.engine_core = self
        self.sent: list[EngineCoreRequest] = []

    async def add_request_async(self, one: EngineCoreRequest) -> None:
        self.sent.append(one)

    def rejects(self, request_id: str, params: dict[str, Any]) -> Request:
        asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(cast(AsyncLLM, self), request_id, params))
        return Request.from_engine_core_request(self.sent.pop(), None)


@pytest.mark.parametrize("known", [False, True])
def test_request_that_the_server_rejects_or_has_failed(caplog: pytest.LogCaptureFixture, known: bool) -> None:
    """The server's own request frees what P keeps for one that the engine never got, and leaves alone one that it got."""
    caplog.set_level("INFO", "kvconn.vllm")
    side, one = decode_side(), request(40, decode_params())
    if known:
        side.on_new_request(one)
    rejected = Server().rejects("cmpl-x", decode_params())
    side.on_new_request(rejected)
    rejected.status = RequestStatus.FINISHED_ABORTED
    side.request_finished(rejected, [[]])
    released = [load.transfer_id for load in side.build_meta(0).loads]  # loads of no block
    assert released == ([] if known else ["t"]) and "WARNING" not in caplog.text
    if known:
        assert side.matched_tokens(one, 0) == (40, True)


@pytest.mark.parametrize("ended", [False, True])
def test_transfer_id_that_is_used_again_is_refused(caplog: pytest.LogCaptureFixture, ended: bool) -> None:
    """A router may count, or retry under one id. The log names both requests, on either side, at once or later; the answer does not."""
    side, one, two = decode_side(), request(40, decode_params()), request(40, decode_params())
    side.on_new_request(one)
    if ended:
        side.after_alloc(one, ids(3), 40)
        step_of = side.build_meta(0)
        assert [load.req_id for load in step_of.loads] == [one.request_id]
        side.worker_reported(None, {one.request_id})
        assert not finish(side, one, ids(3))
    side.on_new_request(two)
    assert side.matched_tokens(two, 0) == (40, True)
    side.after_alloc(two, ids(3, 50), 40)
    meta = side.build_meta(0)
    assert [work.req_id for work in meta.refusals] == [two.request_id] and not meta.loads
    said = f"it belongs to request {one.request_id} already, so it cannot be request {two.request_id}'s"
    assert said in caplog.text and "WARNING" in caplog.text

    prefill, one, two = prefill_side(), request(40, prefill_params()), request(40, prefill_params())
    prefill.on_new_request(one)
    if ended:
        assert finish(prefill, one, ids(3))
        prefill.worker_reported({one.request_id}, None)
    prefill.on_new_request(two)
    kept, answer = prefill.request_finished(two, ids(3))
    assert not kept and "transfer_id 't' was used before" in answer["kvconn_error"]
    assert one.request_id not in answer["kvconn_error"], "the name of another client's request"
