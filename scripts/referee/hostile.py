"""Requests of a client that tries to name a host, an engine or a room: every disguise alone, then several at once."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from disguises import AXES, CODES, EVIL, OTHERS, PLAIN, escaped


class Case:
    """A request: a value for each axis, and a path. A text of its own may take the place of the axis's."""

    def __init__(self, path: str, own: str = "", **chosen: str):
        self.path, self.own = path, own
        self.chosen = {axis: chosen.get(axis, next(iter(values))) for axis, values in AXES.items()}

    def __str__(self) -> str:
        unlike = [f"{axis} {v!r}" for axis, v in self.chosen.items() if v != next(iter(AXES[axis]))]
        return f"{self.path}: {', '.join(unlike)} {self.own}"

    def raw(self, name: str) -> bytes:
        value = {axis: AXES[axis][v] for axis, v in self.chosen.items()}
        frame, body = value["frame"](value["code"](self.own or value["text"]))
        lines = [f"{value['method']} {value['target'](self.path)} HTTP/1.1", "Host: h", f"X-Request-Id: {name}"]
        lines += [f"Content-Type: {kind}" for kind in value["kind"]] + [f"{n}: {v}" for n, v in value["header"]]
        return ("\r\n".join(lines) + "\r\n" + frame + "\r\n").encode("latin-1") + body


def one_by_one(completions: tuple[str, ...]) -> Iterator[Case]:
    """Each value of each axis alone: on a completion path, and on one of the others, all of whose bodies app.py takes for JSON.
    Types that are not JSON's also in each encoding, and with each spelling of a name. What is no text's also with harmless ones: a
    completion in disguise must not reach an engine without the router's parameters. Packed texts say so in their header."""
    for axis, values in AXES.items():
        for value in values:
            for path in (completions[-1], "/invocations"):
                yield Case(path, **{axis: value})
            if axis != "text":
                yield Case(completions[0], text="harmless", **{axis: value})
    for kind in ("text/plain", "application/octet-stream", "multipart/form-data"):
        for code in CODES:
            yield Case("/invocations", kind=kind, code=code)
        for text in ("escaped", "ESCAPED", "NaN", "much space before"):
            for code in ("utf-8", "utf-16-be", "utf-32-le with a mark"):
                yield Case("/invocations", kind=kind, text=text, code=code)
    for way in ("gzip", "deflate"):
        for header in (way, f"X-Body-Compressed: {way}"):
            for path in (completions[-1], "/invocations"):
                for kind in ("application/json", "application/octet-stream", "multipart/form-data"):
                    yield Case(path, code=way, header=header, kind=kind)
    for header in ("X-Body-Compressed that hops", "X-Body-Compressed with _", "identity and gzip"):
        yield Case("/invocations", code="gzip", header=header, kind="application/octet-stream")
    for path in completions + OTHERS:
        yield Case(path)


def composed(chance: random.Random) -> str:
    """An object of members in any order, number and spelling, most of which Python reads."""
    names = [
        *EVIL,
        *PLAIN,
        "parameters",
        "extra_args",
        "x",
        "",
        '\\"',
        "\\\\",
        "\\ud800",
        "\u4e2d",
        "}",
        '{\\"',
        *EVIL,
    ]
    plain = (
        "null",
        "true",
        "1",
        '"x"',
        "[]",
        "{}",
        "1e999",
        "-0.0",
        '"\\\\"',
        '"\\""',
        '["x"]',
        '"{"',
        "9" * 30,
        '"\\ud834\\udd1e"',
    )
    space = ("", "", "", " ", "\n", "\t\r\n ")

    def spelt(name: str) -> str:
        if chance.random() < 0.5 or "\\" in name:
            return name
        return "".join(escaped(chance.random() < 0.5)(c) if chance.random() < 0.3 else c for c in name)

    def value(name: str, depth: int) -> str:
        kind = chance.random()
        if kind < 0.01:
            return "NaN"  # not for the router
        if kind < 0.25 and depth < 4:
            return made(depth + 1)
        if kind < 0.35 and depth < 4:
            return "[" + ",".join(value(name, depth + 1) for _ in range(chance.randrange(3))) + "]"
        if kind < 0.8 and name in EVIL | PLAIN:
            return json.dumps((EVIL | PLAIN)[name])
        return chance.choice(plain)

    def made(depth: int) -> str:
        members = (
            f'"{spelt(n)}"{chance.choice(space)}:{chance.choice(space)}{value(n, depth)}'
            for n in chance.choices(names, k=chance.randrange(1, 9))
        )
        return "{" + chance.choice(space) + f"{chance.choice(space)},{chance.choice(space)}".join(members) + chance.choice(space) + "}"

    return made(0)


# How often an axis has a value of its own, where several have: a wrong path or method soon ends all else.
OFTEN = {"text": 2, "code": 3, "kind": 4, "target": 1, "method": 1, "header": 3, "frame": 3}


def by_chance(seed: int, completions: tuple[str, ...]) -> Iterator[Case]:
    """Up to three axes at once, on a text that was composed or is one of TEXTS, without end."""
    chance = random.Random(seed)
    while True:
        axes = {*chance.choices(list(OFTEN), OFTEN.values(), k=chance.randrange(4))}
        own = "" if "text" in axes else composed(chance)
        yield Case(chance.choice(completions * 3 + OTHERS), own, **{axis: chance.choice(list(AXES[axis])) for axis in sorted(axes)})
