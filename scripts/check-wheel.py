"""Checks a built wheel: its tag, its glibc, its size, what is in it, and the licences of all that its library links."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

MAX_MB = 15
NEWEST_GLIBC = (2, 34)  # Debian 12, Ubuntu 22.04, RHEL 9

# Between these marks a Go program names the modules that it was made of (Go's runtime/debug and cmd/go know the marks).
MODULES_BEGIN, MODULES_END = bytes.fromhex("3077af0c9274080241e1c107e6d618e6"), bytes.fromhex("f932433186182072008242104116d8f2")


def linked_modules(library: bytes) -> set[str]:
    begin = library.index(MODULES_BEGIN)
    said = library[begin : library.index(MODULES_END, begin)]
    return {path.decode() for path in re.findall(rb"^dep\t(\S+)\t", said, re.MULTILINE)}


def licence_problems(wheel: zipfile.ZipFile) -> list[str]:
    """Each module that the library links, and Go, must have its licence in the wheel, and nothing else may have one there."""
    modules = linked_modules(wheel.read("kvconn/libkvconn.so")) | {"go"}
    if len(modules) < 10:  # it links a NATS server
        return [f"the library says that it was made of these modules only: {sorted(modules)}"]
    there = [
        re.sub(r"^[^/]+\.dist-info/licenses/", "", i.filename) for i in wheel.infolist() if "/licenses/" in i.filename and i.file_size > 0
    ]
    problems = [] if "LICENSE" in there else ["kvconn's own licence is not in the wheel"]
    folders = {name.removeprefix("licenses/") for name in there if name.startswith("licenses/")}
    is_licence = re.compile(r"(?:un)?(?:licen[cs]e|copying)[^/]*", re.IGNORECASE)
    for module in sorted(modules):
        if not any(name.startswith(module + "/") and is_licence.fullmatch(name.rsplit("/", 1)[1]) for name in folders):
            problems.append(f"the licence of {module}, which the library links, is not in the wheel")
    for name in sorted(folders):
        if not any(name.startswith(module + "/") for module in modules):
            problems.append(f"the wheel has licenses/{name}, of nothing that the library links")
    return problems


def main(path: str) -> int:
    problems = []
    name = Path(path).name
    tag = re.fullmatch(r"kvconn-[^-]+-py3-none-manylinux_(\d+)_(\d+)_\w+\.whl", name)
    if tag is None:
        problems.append(f"the tag of {name} is not py3-none-manylinux…")
    elif (int(tag[1]), int(tag[2])) > NEWEST_GLIBC:
        problems.append(f"{name} needs a glibc newer than {NEWEST_GLIBC}")
    size = Path(path).stat().st_size / 1e6
    if size > MAX_MB:
        problems.append(f"the wheel has {size:.1f} MB, more than {MAX_MB}")
    wheel = zipfile.ZipFile(path)
    names = wheel.namelist()
    for want in ("kvconn/libkvconn.so", "kvconn/py.typed", "kvconn/include/kvconn.h", "kvconn/vllm/__init__.py"):
        if want not in names:
            problems.append(f"{want} is not in the wheel")
    problems += licence_problems(wheel)
    audit = subprocess.run([sys.executable, "-m", "auditwheel", "show", path], capture_output=True, text=True)
    text = " ".join(audit.stdout.split())
    if audit.returncode != 0:
        problems.append(f"auditwheel: {audit.stdout}{audit.stderr}")
    elif tag is not None and "is consistent with the following platform tag" in text:
        found = re.search(r'platform tag: "manylinux_(\d+)_(\d+)', text)
        if found is None or (int(found[1]), int(found[2])) > (int(tag[1]), int(tag[2])):
            problems.append(f"auditwheel finds another platform: {text}")
    for p in problems:
        print(f"wheel: {p}", file=sys.stderr)
    if not problems:
        print(f"wheel: {name}, {size:.1f} MB: ok by auditwheel")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
