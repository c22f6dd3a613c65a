"""check-wheel.py, on the wheel in dist/, misses the licence of each module that the library links."""

from __future__ import annotations

import io
import runpy
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECK = runpy.run_path(str(HERE / "check-wheel.py"))
LIBRARY = "kvconn/libkvconn.so"


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """The wheel's licences, and the part of its library that names the modules."""
    (wheel,) = (HERE.parent / "dist").glob("kvconn-*.whl")
    with zipfile.ZipFile(wheel) as whole:
        found = {name: whole.read(name) for name in whole.namelist() if "/licenses/" in name}
        library = whole.read(LIBRARY)
    begin = library.index(CHECK["MODULES_BEGIN"])
    end = library.index(CHECK["MODULES_END"], begin) + len(CHECK["MODULES_END"])
    return {**found, LIBRARY: library[begin:end]}


def problems(files: dict[str, bytes]) -> list[str]:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
    return CHECK["licence_problems"](zipfile.ZipFile(packed))


def test_each_licence_is_missed(files: dict[str, bytes]) -> None:
    assert problems(files) == []
    for module in [*CHECK["linked_modules"](files[LIBRARY]), "go"]:
        for change in ("gone", "empty"):
            left = dict(files)
            for name in files:
                if f"/licenses/licenses/{module}/" in name and name.rsplit("/", 1)[1].upper().startswith("LICEN"):
                    del left[name]
                    if change == "empty":
                        left[name] = b""
            assert problems(left) == [f"the licence of {module}, which the library links, is not in the wheel"]


def test_other_changes_are_seen(files: dict[str, bytes]) -> None:
    (own,) = (name for name in files if name.endswith(".dist-info/licenses/LICENSE"))
    assert problems({name: content for name, content in files.items() if name != own}) == ["kvconn's own licence is not in the wheel"]
    added = own.replace("/LICENSE", "/licenses/example.org/other/LICENSE")
    assert "example.org/other" in problems({**files, added: b"text"})[0]
    assert "these modules only" in problems({**files, LIBRARY: CHECK["MODULES_BEGIN"] + CHECK["MODULES_END"]})[0]
