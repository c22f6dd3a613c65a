"""Names the fault points that a built product has in it: it is built without the tag "faults", so that it has none.

python3 scripts/check-faults.py PROGRAM...
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "KVCONN_FAULT"  # it says which place is to be broken
KNOWN = b"moment_timeout_s"  # of each product: its texts can be read
CALL = re.compile(r"\b(?:fault\.(?:On|Pick)(?:\[[^(]*\])?|kvg_fault)\(\s*([^,)]*)")
files = runpy.run_path(str(Path(__file__).with_name("check-notices.py")))["files"]


def points(text: str) -> list[str]:
    """What each call in a source gives as the point's name; in quotes if it is written there."""
    return [name.strip() for name in CALL.findall(text)]


def names(root: Path) -> set[str]:
    found = {VARIABLE}
    for file in files(root):
        if Path(file).suffix not in {".go", ".c"} or file.endswith("_test.go"):
            continue
        for point in points((root / file).read_text(encoding="utf-8")):
            quoted = re.fullmatch(r'"([^"]+)"', point)
            if quoted:
                found.add(quoted[1])
            elif point != "const char *name":  # where C defines it
                raise SystemExit(
                    f"faults: {file}: the fault point {point} is not written as a text: write it so, for this check to know it"
                )
    return found


def problems(program: bytes, points: set[str]) -> list[str]:
    if KNOWN not in program:
        return [f"it has no {KNOWN.decode()}, which each product has: its texts cannot be read, or it is another program"]
    return [f"it has the fault point {name} in it: build it without the tag faults" for name in sorted(points) if name.encode() in program]


def main(programs: list[str]) -> int:
    if not programs:
        print("faults: name the programs", file=sys.stderr)
        return 2
    known = names(ROOT)
    found = [f"{program}: {problem}" for program in programs for problem in problems(Path(program).read_bytes(), known)]
    for problem in found:
        print(f"faults: {problem}", file=sys.stderr)
    if not found:
        print(f"faults: none of {len(known)} names is in {', '.join(programs)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
