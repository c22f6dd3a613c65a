"""A real pair of SGLang servers with pages of one token, whose decode server keeps prefixes, and bad input. All caches go by tcp.

Run with the Python of an environment that has SGLang, kvconn and pytest.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from asking import HOST, ask, request, wait_until
from servers import Server, free_ports, leaving_nothing, wait_ready
from sglang_servers import Alone, Reply, SGLangPair, post, prompt
from test_sglang import same


@pytest.fixture(scope="module")
def pair(sglang_model: Path, sglang_workdir: Path, alone: Alone) -> Iterator[SGLangPair]:
    the_pair = SGLangPair(
        sglang_model,
        sglang_workdir / "logs" / "pages1",
        "--page-size",
        "1",
        decode_args=["--disaggregation-decode-enable-radix-cache"],
        config={"early_load_s": 2, "transport": "tcp"},
    )
    with leaving_nothing(the_pair):
        wait_ready(alone.servers)
        yield the_pair


@pytest.fixture(autouse=True)
def servers_live(pair: SGLangPair) -> Iterator[None]:
    yield
    pair.check()


@pytest.mark.parametrize("tokens", [1, 2, 300, 1900])
def test_text_equals_single_server(pair: SGLangPair, alone: Alone, tokens: int) -> None:
    same(pair, alone, prompt(tokens, "pages of one"))
    assert pair.ways() == {"tcp"}


def test_eight_at_once(pair: SGLangPair, alone: Alone) -> None:
    prompts = [prompt(tokens, "eight pages") for tokens in (1, 7, 40, 100, 101, 180, 250, 333)]
    expected = [alone.ask(ids) for ids in prompts]
    answers = pair.ask_many(prompts)
    assert [answer.error for answer in answers] == [""] * len(prompts)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]


@pytest.mark.parametrize("more", [0, 1, 60])
def test_prefix_that_decode_has(pair: SGLangPair, alone: Alone, more: int) -> None:
    """Only the pages that the decode server lacks are sent; if it has the whole prompt, only the first token is sent."""
    ids = prompt(250, f"prefix {more}")
    same(pair, alone, ids)
    same(pair, alone, ids + prompt(more, "more") if more else ids)


# -- bad input ------------------------------------------------------------------------------------------------------


def fails(reply: Reply, *says: str) -> None:
    """The request fails with the reason, and not for want of an answer."""
    assert not reply.ok and "timed out" not in reply.error, reply
    assert all(text in reply.error for text in says), reply


def test_room_that_is_used_twice(pair: SGLangPair, alone: Alone) -> None:
    body = pair.body(prompt(30, "twice"), room=4711)
    assert pair.ask_both(body)[1].ok
    _, again = pair.ask_both(body)
    fails(again, "room 4711", "ended already")
    both = [pair.body(prompt(900, f"at once {n}"), room=4712) for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda each: pair.ask_both(each)[1], both))
    assert sum(reply.ok for reply in replies) <= 1, replies
    fails(next(reply for reply in replies if not reply.ok), "room 4712")
    same(pair, alone, prompt(30, "after twice"))


def test_requests_that_cross_in_a_room(pair: SGLangPair, alone: Alone) -> None:
    """Prefill has one of two requests, decode the other: neither gets the other's cache, nor does it stay in decode's."""
    ids, other = prompt(40, "crosses"), prompt(40, "crosses too")
    body, others = pair.body(ids, room=4713), pair.body(other, room=4713)
    with ThreadPoolExecutor(2) as pool:
        for reply in pool.map(post, (pair.prefill.url, pair.decode.url), (others, body)):
            fails(reply, "room 4713", "decode asks for another prompt than prefill has")
    same(pair, alone, ids[:1] + prompt(30, "after crosses"))
    same(pair, alone, ids)


def test_room_that_only_decode_knows(pair: SGLangPair, alone: Alone) -> None:
    fails(post(pair.decode.url, pair.body(prompt(30, "decode only"))), "room", "not named")
    same(pair, alone, prompt(30, "after decode only"))


@pytest.mark.parametrize("room", [-5, 1 << 63])
def test_room_that_is_none(pair: SGLangPair, alone: Alone, room: int) -> None:
    replies = pair.ask_both(pair.body(prompt(30, "no room"), room=room), timeout_s=30)
    for reply in replies:
        fails(reply)
    same(pair, alone, prompt(30, "after no room"))


def test_data_parallel_rank_that_is_none(pair: SGLangPair, alone: Alone) -> None:
    reply = post(pair.decode.url, pair.body(prompt(30, "rank"), disagg_prefill_dp_rank=3))
    fails(reply, "1 data parallel ranks", "no rank 3")
    same(pair, alone, prompt(30, "after rank"))


@contextmanager
def bootstrap(answer: Callable[[str], tuple[int, str]]) -> Iterator[int]:
    """A bootstrap port that is not kvconn's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_PUT = do_GET

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer((HOST, 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


MOONCAKE = {
    "attn_tp_size": 1,
    "attn_cp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "page_size": 1,
    "kv_cache_dtype": None,
    "follow_bootstrap_room": True,
}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda _path: (200, json.dumps(MOONCAKE)), "bootstrap address"),  # another backend's
        (lambda _path: (200, json.dumps({**MOONCAKE, "page_size": 16})), "page_size is 16"),
        (lambda _path: (200, json.dumps({**MOONCAKE, "kv_cache_dtype": "float8_e4m3fn"})), "kv_cache_dtype is float8"),
        (lambda _path: (200, json.dumps({**MOONCAKE, "dp_size": "many"})), "dp_size is 'many'"),
        (lambda _path: (404, "not found"), "404"),
        (lambda _path: (200, "<html>hello</html>"), "hello"),
    ],
    ids=["another backend's", "page size", "data type", "nonsense", "not found", "a web page"],
)
def test_bootstrap_port_that_is_another(pair: SGLangPair, alone: Alone, answer: Any, says: str) -> None:
    with bootstrap(answer) as port:
        body = {**pair.body(prompt(30, "another")), "bootstrap_port": port}
        fails(post(pair.decode.url, body, timeout_s=30), "room", f":{port}", says)
    same(pair, alone, prompt(20, "after another"))


def test_bootstrap_port_where_nobody_listens(pair: SGLangPair, alone: Alone) -> None:
    (port,) = free_ports(1)
    fails(
        post(pair.decode.url, {**pair.body(prompt(30, "nobody")), "bootstrap_port": port}, timeout_s=30),
        "room",
        f":{port}",
        "nobody answers",
    )
    same(pair, alone, prompt(20, "after nobody"))


# -- routers --------------------------------------------------------------------------------------------------------


def router_works(pair: SGLangPair, alone: Alone, router: Server) -> None:
    """The bootstrap fields are the router's."""
    router.start()
    try:
        ids = prompt(40, router.name)
        expected = alone.ask(ids)
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
        wait_until("the router serves", lambda: post(router.url, body, timeout_s=20).ok, 60, every_s=0.5)
        for stream in (False, True):
            answer = post(router.url, {**body, "stream": stream})
            assert answer.ok and answer.ids == expected.ids, (answer, router.log_tail())
        served = json.loads(request("GET", alone.server.url + "/v1/models")[1])["data"][0]["id"]  # smg knows no other name
        text = {"model": served, "prompt": "whose woods these are", "max_tokens": 8, "temperature": 0}
        status, said = request("POST", router.url + "/v1/completions", text)
        assert status == 200, (said, router.log_tail())
        plain = json.loads(request("POST", alone.server.url + "/v1/completions", text)[1])
        assert json.loads(said)["choices"][0]["text"] == plain["choices"][0]["text"]
    finally:
        router.stop()


# Each router's package and command.
ROUTERS = {
    "mini_lb": ("sglang_router", ["sglang_router.launch_router", "--mini-lb"]),
    "sglang_router": ("sglang_router", ["sglang_router.launch_router"]),
    "smg": ("smg", ["smg", "launch"]),  # its successor
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_sglang(pair: SGLangPair, alone: Alone, sglang_workdir: Path, name: str) -> None:
    package, command = ROUTERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"NOT RUN: {package} could not be installed")
    port, metrics = free_ports(2)
    argv = [sys.executable, "-m", *command, "--pd-disaggregation", "--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    argv += ["--prefill", pair.prefill.url, str(pair.bootstrap_port), "--decode", pair.decode.url]
    router_works(pair, alone, Server(name, argv, dict(pair.environment), sglang_workdir / "logs" / f"{name}.log", f"http://{HOST}:{port}"))


def test_llmd(pair: SGLangPair, alone: Alone, sglang_workdir: Path) -> None:
    """llm-d's sidecar, replayed (llmd_sidecar.py). It splits OpenAI's requests only, not /generate."""
    (port,) = free_ports(1)
    argv = [sys.executable, str(Path(__file__).with_name("llmd_sidecar.py")), "--port", str(port), "--decode", pair.decode.url]
    argv += ["--kv-connector", "sglang", "--bootstrap-port", str(pair.bootstrap_port)]
    url = f"http://{HOST}:{port}"
    sidecar = Server("llmd", argv, dict(pair.environment), sglang_workdir / "logs" / "llmd.log", url)
    to = {"x-prefiller-host-port": pair.prefill.url.removeprefix("http://")}
    sidecar.start()
    try:
        wait_ready([sidecar])
        asked: list[dict[str, Any]] = [{"prompt": "whose woods these are"}, {"messages": [{"role": "user", "content": "whose woods"}]}]
        for number, more in enumerate(asked):
            body = {"model": "tiny", "max_tokens": 8, "temperature": 0, **more}
            single = ask(alone.server.url, body, chat=bool(number))
            for stream in (False, True):
                answer = ask(url, {**body, "stream": stream}, chat=bool(number), headers=to)
                assert single.ok and answer.ok and answer.text == single.text, (single, answer, sidecar.log_tail())
    finally:
        sidecar.stop()
