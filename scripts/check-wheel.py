"""Checks a built wheel: its tag, its glibc, its size, and what is in it."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

MAX_MB = 15
NEWEST_GLIBC = (2, 34)  # Debian 12, Ubuntu 22.04, RHEL 9


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
    names = zipfile.ZipFile(path).namelist()
    for want in ("kvconn/libkvconn.so", "kvconn/py.typed", "kvconn/include/kvconn.h", "kvconn/vllm/__init__.py"):
        if want not in names:
            problems.append(f"{want} is not in the wheel")
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
