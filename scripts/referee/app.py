"""Two engines as FastAPI serves them, a prefill and a decode server, each on its own socket.

    python app.py PREFILL_FD DECODE_FD

They read a request as vLLM and SGLang do: the same paths, types of body and fields. Each prints what it has read
as a line of JSON, before it answers. They end with their standard input. This file runs with FastAPI of 2021 too.
"""

import asyncio
import dataclasses
import json
import os
import socket
import sys
import threading
import zlib
from typing import Any, Optional, Union

import fastapi
import uvicorn
from fastapi import Body, Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

# The router's own members, and a string that SGLang's engines keep beside them.
NAMES = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key")
PREFILL, DECODE = "prefill", "decode"
NIXL = {"remote_host": "prefill.test", "remote_port": 7, "remote_engine_id": "nixl-engine", "remote_block_ids": [1]}

sockets = {role: socket.socket(fileno=int(fd)) for role, fd in zip((PREFILL, DECODE), sys.argv[1:])}
ports = {s.getsockname()[1]: role for role, s in sockets.items()}
app = FastAPI()


async def json_only(request: Request):
    """As validate_json_request of both engines."""
    kind = request.headers.get("content-type", "").lower()
    if kind.split(";", maxsplit=1)[0] != "application/json":
        raise HTTPException(415, "only application/json")


class Completion(BaseModel):
    """What vLLM and SGLang read of a completion."""

    prompt: Any = None
    messages: Any = None
    stream: Optional[bool] = None
    kv_transfer_params: Optional[dict[str, Any]] = None
    vllm_xargs: Optional[dict[str, Union[str, int, float, list[Union[str, int, float]]]]] = None
    bootstrap_host: Optional[Union[list[str], str]] = None
    bootstrap_port: Optional[Union[list[Optional[int]], int]] = None
    bootstrap_room: Optional[Union[list[int], int]] = None

    class Config:
        extra = "allow"


class Tokens(BaseModel):
    """vLLM's /inference/v1/generate."""

    token_ids: Any = None
    sampling_params: dict[str, Any] = {}
    kv_transfer_params: Optional[dict[str, Any]] = None


class Vertex(BaseModel):
    """SGLang's /vertex_generate."""

    instances: list[dict[str, Any]] = []
    parameters: Optional[dict[str, Any]] = None


# SGLang's GenerateReqInput is a dataclass, which FastAPI takes for a body since 0.67.
WITH_DATACLASSES = tuple(int(n) for n in fastapi.__version__.split(".")[:2]) >= (0, 67)


class Generate(*(() if WITH_DATACLASSES else (BaseModel,))):
    text: Optional[Union[list[str], str]] = None
    sampling_params: Optional[Union[list[dict[str, Any]], dict[str, Any]]] = None
    stream: bool = False
    bootstrap_host: Optional[Union[list[Optional[str]], str]] = None
    bootstrap_port: Optional[Union[list[Optional[int]], int]] = None
    bootstrap_room: Optional[Union[list[Optional[int]], int]] = None
    bootstrap_pair_key: Optional[Union[list[Optional[str]], str]] = None


if WITH_DATACLASSES:
    Generate = dataclasses.dataclass(Generate)


def deep(value: Any) -> dict[str, Any]:
    """The router's members at any depth."""
    found, todo = {}, [value]
    while todo:
        v = todo.pop()
        if isinstance(v, dict):
            found.update({n: v[n] for n in NAMES if v.get(n) is not None})
            todo.extend(v.values())
        elif isinstance(v, list):
            todo.extend(v)
    return found


def fields(body: Any) -> dict[str, Any]:
    return {n: getattr(body, n) for n in NAMES if getattr(body, n, None) is not None}


def extra(args: Any, body: Any) -> dict[str, Any]:
    """vLLM puts its own field over what extra arguments say."""
    return {**deep(args), **fields(body)}


def role(request: Request) -> str:
    return ports[request.scope["server"][1]]


def tell(request: Request, read: dict[str, Any], *, completion: bool) -> dict[str, Any]:
    """Prints what an engine has read, and gives its answer."""
    for name, value in request.headers.items():
        if name.startswith("x-override-"):  # SGLang reads these on every path that generates
            read[name] = value
    line = {
        "role": role(request),
        "case": request.headers.get("x-request-id"),
        "path": request.url.path,
        "rank": request.headers.get("x-data-parallel-rank"),
        "completion": completion,
        "read": read,
    }
    print(json.dumps(line, default=repr), flush=True)
    answer: dict[str, Any] = {"choices": [{"text": "x", "finish_reason": "stop"}]}
    if line["role"] == PREFILL:
        answer["kv_transfer_params"] = NIXL
    return answer


@app.get("/health")
@app.get("/model_info")
def health():
    return {}


@app.get("/server_info")
def server_info(request: Request):
    return {"disaggregation_mode": role(request), "disaggregation_bootstrap_port": request.scope["server"][1], "dp_size": 1}


@app.get("/query")
def query():
    return {"0": {"engine_id": "engine-of-the-router", "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}


@app.post("/mark/{n}")
def mark(n: str, request: Request):
    print(json.dumps({"mark": n, "role": role(request)}), flush=True)


@app.post("/v1/completions", dependencies=[Depends(json_only)])
@app.post("/v1/chat/completions", dependencies=[Depends(json_only)])
async def completions(body: Completion, request: Request):
    return tell(request, extra(body.vllm_xargs, body), completion=True)


@app.post("/generate")
@app.put("/generate")
async def generate(body: Generate, request: Request):
    await request.json()
    return tell(request, fields(body), completion=True)


@app.post("/v1/responses", dependencies=[Depends(json_only)])
@app.post("/v1/messages")
async def responses(body: Completion, request: Request):
    return tell(request, extra(body.vllm_xargs, body), completion=False)


@app.post("/inference/v1/generate")
async def tokens(body: Tokens, request: Request):
    return tell(request, extra(body.sampling_params.get("extra_args"), body), completion=False)


@app.post("/vertex_generate")
async def vertex(body: Vertex, request: Request):
    return tell(request, deep([body.parameters, body.instances]), completion=False)


EMBEDDED = Body(..., embed=True)


@app.post("/embedded")
async def embedded(request: Request, body: Completion = EMBEDDED):
    return tell(request, extra(body.vllm_xargs, body), completion=False)


@app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
async def anything(path: str, request: Request):
    """Any engine's own handler: it takes each body for JSON, whatever its type, and looks into all of it."""
    try:
        body = await request.json()
    except (ValueError, RecursionError):  # not JSON, not text, or a number that is too long
        body = None
    return tell(request, deep(body), completion=False)


UNPACK = {
    b"gzip": lambda packed: zlib.decompress(packed, 31),
    b"deflate": zlib.decompress,
    b"identity": lambda packed: packed,
}


class Unpacking:
    """Unpacks bodies before anything looks at them: by X-Body-Compressed, as SGLang's middleware, which knows zstd, and by
    Content-Encoding, as others do."""

    def __init__(self, inner):
        self.inner = inner

    async def __call__(self, scope, receive, send):
        ways = [value for name, value in scope.get("headers", ()) if name in (b"x-body-compressed", b"content-encoding")]
        if scope["type"] != "http" or not ways:
            return await self.inner(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            for way in reversed([one.strip() for one in b",".join(ways).split(b",")]):
                body = UNPACK[way](body)
        except (KeyError, zlib.error):
            return await Response("cannot unpack", status_code=400)(scope, receive, send)
        told = (b"content-length", b"x-body-compressed", b"content-encoding")
        headers = [(name, value) for name, value in scope["headers"] if name not in told]
        unpacked = {"type": "http.request", "body": body, "more_body": False}

        async def whole():
            return unpacked

        return await self.inner({**scope, "headers": headers}, whole, send)


def end_with_parent():
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    config = uvicorn.Config(Unpacking(app), log_level="critical", access_log=False, lifespan="off")
    asyncio.run(uvicorn.Server(config).serve(sockets=list(sockets.values())))
