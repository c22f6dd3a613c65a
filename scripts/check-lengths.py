"""Names the files of Go and Python above 400 lines: a file holds one idea.

python3 scripts/check-lengths.py [ROOT]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

MOST = 400
KINDS = {".go", ".py"}
# Longer by right, each with the reason.
LONGER = {
    "rdma/signal_gen.go": "msgp writes it",
    "wire/wire_gen.go": "msgp writes it",
}
files = runpy.run_path(str(Path(__file__).with_name("check-notices.py")))["files"]


def problems(lengths: dict[str, int], longer: dict[str, str]) -> list[str]:
    found = [
        f"{name} has {lines} lines, more than {MOST}: split it by its ideas"
        for name, lines in lengths.items()
        if lines > MOST and name not in longer
    ]
    for name, why in longer.items():
        if lengths.get(name, 0) <= MOST:
            found.append(f"{name} is listed as longer by right ({why}), but has {lengths.get(name, 0)} lines: take it off the list")
    return found


def main(root: Path) -> int:
    names = [name for name in files(root) if Path(name).suffix in KINDS]
    if not names:
        print(f"lengths: there is no file of Go or Python in {root}", file=sys.stderr)
        return 1
    found = problems({name: len((root / name).read_bytes().splitlines()) for name in names}, LONGER)
    for problem in found:
        print(f"lengths: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent).resolve()))
