"""Python repeats parts of kvconn.h: structs field by field, functions, codes and limits must be the header's."""

from __future__ import annotations

import ctypes as c
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvconn
from kvconn import _lib, _pack, _structs

# In the wheel the header lies beside the package, in the sources beside python/.
_PLACES = (Path(kvconn.__file__).parent / "include" / "kvconn.h", Path(__file__).resolve().parents[2] / "include" / "kvconn.h")
HEADER = next(path for path in _PLACES if path.exists())
TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
DEFINED = {name: int(value) for name, value in re.findall(r"#define (KVCONN_\w+) (\d+) *$", TEXT, re.MULTILINE)}
ENUMS = {name: int(value) for name, value in re.findall(r"(KVCONN_\w+) = (\d+)", TEXT)}
TYPES = {
    "uint8_t": c.c_uint8,
    "uint32_t": c.c_uint32,
    "uint64_t": c.c_uint64,
    "int32_t": c.c_int32,
    "char": c.c_char,
    "size_t": c.c_size_t,
    "kvconn_agent": c.c_uint64,
}
Layout = list[tuple[str, int, int]]


def kind(words: str) -> Any:
    """The ctypes type of a C declaration without its name."""
    return c.c_void_p if "*" in words else TYPES[words.split()[-1]]


def in_header(name: str) -> list[tuple[str, Any]]:
    """The fields of a struct, as the header declares them."""
    (body,) = re.findall(rf"typedef struct {name} \{{(.*?)\}} {name};", TEXT, re.DOTALL)
    fields = []
    for words, field, length in re.findall(r"([\w\s*]+?[\s*])(\w+)(?:\[([^\]]+)\])?;", body):
        count = eval(length, {}, DEFINED) if length else 0
        fields.append((field, kind(words) * count if count else kind(words)))
    return fields


def layout(struct: type[c.Structure]) -> Layout:
    return [(name, getattr(struct, name).offset, getattr(struct, name).size) for name, *_ in struct._fields_]


@pytest.mark.parametrize("struct", _structs.STRUCTS, ids=lambda struct: struct.__doc__)
def test_struct_is_the_headers(struct: type[c.Structure]) -> None:
    theirs = type("Theirs", (c.Structure,), {"_fields_": in_header(struct.__doc__)})
    assert layout(struct) == layout(theirs)
    assert c.sizeof(struct) == c.sizeof(theirs)


def test_every_struct_of_the_header_is_known() -> None:
    assert sorted(re.findall(r"typedef struct (\w+)", TEXT)) == sorted(struct.__doc__ for struct in _structs.STRUCTS)


def test_structs_are_the_compilers(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("NOT RUN: there is no C compiler here; the structs were held against the header's text only")
    rows = []
    for struct in _structs.STRUCTS:
        name = struct.__doc__
        rows.append(f'printf("{name} - 0 %zu\\n", sizeof({name}));')
        for field, _ in in_header(name):
            rows.append(f'printf("{name} {field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    source = tmp_path / "layout.c"
    source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n' + "\n".join(rows) + "\nreturn 0;\n}\n")
    subprocess.run([compiler, "-o", str(tmp_path / "layout"), str(source)], check=True)
    said = subprocess.run([str(tmp_path / "layout")], check=True, capture_output=True, text=True).stdout.splitlines()
    ours = []
    for struct in _structs.STRUCTS:
        ours += [f"{struct.__doc__} {name} {offset} {size}" for name, offset, size in [("-", 0, c.sizeof(struct)), *layout(struct)]]
    assert said == ours


def test_functions_are_the_headers() -> None:
    lib = _lib.load()
    ours = {f.__name__: f for f in vars(lib).values() if hasattr(f, "argtypes")}
    declared = {}
    for result, name, params in re.findall(r"^([\w ]+[\w*] ?\*?)(kvconn_\w+)\((.*?)\);", TEXT, re.MULTILINE | re.DOTALL):
        kinds = [kind(re.sub(r"\w+$", "", param.strip())) for param in params.split(",") if param.strip() != "void"]
        declared[name] = [kind(result), *kinds]
    assert sorted(declared) == sorted(ours)

    def shape(ctype: Any) -> tuple[bool, int]:
        pointer = ctype in (c.c_void_p, c.c_char_p) or issubclass(ctype, c._Pointer)
        return pointer, c.sizeof(ctype)

    for name, kinds in declared.items():
        assert [shape(each) for each in kinds] == [shape(each) for each in (ours[name].restype, *ours[name].argtypes)], name


def test_codes_and_limits_are_the_headers() -> None:
    assert DEFINED == {"KVCONN_ABI_VERSION": _lib.ABI_VERSION, "KVCONN_TRANSFER_ID_MAX": _structs.TRANSFER_ID_MAX}
    sides = {name.removeprefix("KVCONN_SIDE_").lower(): value for name, value in ENUMS.items() if "_SIDE_" in name}
    assert {value: name for name, value in sides.items()} == _pack._KINDS
    codes = {re.sub("KVCONN_(ERR_)?", "", name): value for name, value in ENUMS.items() if not re.search("_SIDE_|_INDEX_|_MEMORY_", name)}
    assert codes == {status.name: status.value for status in kvconn.Status}


def test_indices_are_the_headers(tmp_path: Path) -> None:
    named = {name.removeprefix("KVCONN_INDEX_"): value for name, value in ENUMS.items() if "_INDEX_" in name}
    assert named == {index.name: index.value for index in kvconn.IndexKind}
    memory = {name.removeprefix("KVCONN_MEMORY_"): value for name, value in ENUMS.items() if "_MEMORY_" in name}
    assert memory == {kind.name: kind.value for kind in kvconn.Memory}
    compiler = shutil.which("cc")
    if compiler is not None:
        source = tmp_path / "ring.c"
        body = 'int main(void) { printf("%u", KVCONN_INDEX_RING(260)); return 0; }'
        source.write_text(f'#include <stdio.h>\n#include "{HEADER}"\n{body}\n')
        subprocess.run([compiler, "-o", str(tmp_path / "ring"), str(source)], check=True)
        assert int(subprocess.run([str(tmp_path / "ring")], check=True, capture_output=True).stdout) == kvconn.IndexKind.ring(260)
    for entries in (0, 1 << 24):
        with pytest.raises(ValueError, match=f"{entries} entries"):
            kvconn.IndexKind.ring(entries)


def numbers(address: int, count: int) -> list[int]:
    return list((c.c_uint32 * count).from_address(address))


def of_rows(rows: _pack.Rows, struct: type[c.Structure], count: int) -> Any:
    """The structs that C finds; behind them is the number of those that it takes."""
    assert rows.taken_address - rows.address == count * c.sizeof(struct)
    return (struct * count).from_address(rows.address)


def groups(row: Any) -> list[tuple[list[int], int]]:
    blocks = (_structs.Blocks * row.num_groups).from_address(row.groups) if row.groups else ()
    return [(numbers(group.ids, group.count), group.first) for group in blocks]


def test_packed_offers() -> None:
    packed = _pack.Offers([kvconn.Offer("a", [[1, 2], [3]], 5, [0, 7], 2**63), kvconn.Offer("b", [[4]])])
    one, two = of_rows(packed, _structs.OfferRequest, 2)
    assert (one.struct_size, one.transfer_id, one.token, one.prompt) == (c.sizeof(_structs.OfferRequest), b"a", 5, 2**63)
    assert groups(one) == [([1, 2], 0), ([3], 7)]
    assert (two.struct_size, two.transfer_id, two.token, two.prompt) == (c.sizeof(_structs.OfferRequest), b"b", 0, 0)
    assert groups(two) == [([4], 0)]


def test_packed_partial_offers() -> None:
    packed = _pack.PartialOffers([kvconn.PartialOffer("a", [[1], [2]], [3, 4], [5, 6], 7, [8, 9]), kvconn.PartialOffer("b", [[1]], [2])])
    one, two = of_rows(packed, _structs.PartialOffer, 2)
    assert (one.struct_size, one.transfer_id, one.prompt) == (c.sizeof(_structs.PartialOffer), b"a", 7)
    assert (groups(one), numbers(one.ready, 2), numbers(one.computing, 2)) == ([([1], 5), ([2], 6)], [3, 4], [8, 9])
    assert (two.transfer_id, groups(two), numbers(two.ready, 1), two.computing) == (b"b", [([1], 0)], [2], None)


def test_packed_loads_and_claims() -> None:
    packed = _pack.Loads([kvconn.Load("a", "http://p:1", "p", [[1], [2]], [3, 4], 5, [6, 7], 8), kvconn.Load("b", "http://q:2", "q", [])])
    one, two = of_rows(packed, _structs.LoadRequest, 2)
    assert (one.struct_size, one.transfer_id, one.bootstrap_addr, one.engine_id) == (c.sizeof(one), b"a", b"http://p:1", b"p")
    assert (one.token, one.prompt, groups(one), numbers(one.tokens, 2)) == (5, 8, [([1], 3), ([2], 4)], [6, 7])
    assert (two.transfer_id, two.engine_id, two.num_groups, two.groups, two.tokens) == (b"b", b"q", 0, None, None)
    claims = _pack.Claims([kvconn.Claim("c", "http://p:1", "p", 9)])
    (claim,) = of_rows(claims, _structs.LoadRequest, 1)
    assert (claim.struct_size, claim.transfer_id, claim.bootstrap_addr, claim.engine_id) == (c.sizeof(claim), b"c", b"http://p:1", b"p")
    assert (claim.num_groups, claim.groups, claim.token, claim.tokens, claim.prompt) == (0, None, 9, None, 0)


def test_unpacked_completions() -> None:
    room = _pack.CompletionBuffer(2)
    rows = (_structs.Completion * 2).from_address(room.address)
    rows[0] = _structs.Completion(2**60, 23, 2, 10, 1_500_000_000, 250_000_000, 3, 4, b"tcp", b"a", b"why")
    rows[1] = _structs.Completion(1, 0, 1, 0, 0, 0, 0, 0, b"", b"x" * 128, b"")
    c.c_size_t.from_address(room.count_address).value = 2
    one, two = room.completions()
    assert one == kvconn.Completion("a", "offer", 23, "why", 10, 3, 4, 1.5, 0.25, "tcp", 2**60)
    assert two == kvconn.Completion("x" * 128, "load", 0, "", 0, 0, 0, 0.0, 0.0, "", 1)
