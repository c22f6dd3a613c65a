"""Names the files of the tree that carry another project's notice: this tree holds no text of others.

python3 scripts/check-notices.py [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OURS = "the kvconn authors"
LICENCE = "LICENSE"  # the licence of kvconn itself
NOTICES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"SPDX-(?:License-Identifier|FileCopyrightText|FileContributor)",
        r"\bcopyright\b\W{0,3}(?:\(c\)|©|&copy;|(?:19|20)\d\d|.{0,40}\b(?:authors|contributors|inc|corp|ltd|llc|gmbh)\b)",
        r"(?:\(c\)|©)\s*(?:19|20)\d\d",
        r"all\s+rights\s+reserved",
        r"licen[cs]ed\s+(?:to\s+\S+\s+)?under\s+(?:the\s+|either\s+)?(?:terms|apache|mit|bsd|gnu|gpl|mozilla|\w+\s+licen[cs]e)",
        r"permission\s+is\s+hereby\s+granted",
        r"permission\s+to\s+use,\s+copy,\s+modify",
        r"redistribution\s+and\s+use\s+in\s+source",
        r"gnu\s+(?:lesser\s+|library\s+|affero\s+)?general\s+public\s+licen[cs]e",
        r"you\s+may\s+not\s+use\s+this\s+file\s+except",
        r"(?:copied|adapted|ported|vendored|taken)\s+(?:verbatim\s+)?from\s+(?:the\s+)?(?:https?://|vllm\b|sglang\b|mooncake\b|nixl\b|linux\b|rdma-core\b)",
        r"from\s+\w+,\s+\S+,\s+unchanged",
    )
]


def files(root: Path) -> list[str]:
    """All files that git does not ignore, committed or not. An unpacked archive has all of it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, check=False, capture_output=True
    )
    if listed.returncode:
        made = {"build", "dist", "licenses", "node_modules"}
        below = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
        return sorted(str(p) for p in below if not p.parts[0].startswith(".") and p.parts[0] not in made)
    return sorted({name for name in listed.stdout.decode().split("\0") if name and (root / name).is_file()})


def notices(text: str) -> list[tuple[int, str]]:
    """The lines that only another project's file has. Notices are broken over lines, so two lines are read as one."""
    found = []
    lines = [re.sub(r"^[\s/*#;%\-<!.\"]+", "", line) for line in text.splitlines()]
    for at, line in enumerate(lines):
        both = f"{line} {lines[at + 1]}" if at + 1 < len(lines) else line
        for notice in NOTICES:
            match = notice.search(both)
            if match and match.start() <= len(line) and OURS not in both.lower():
                found.append((at + 1, line.strip()))
                break
    return found


def main(root: Path) -> int:
    names = [name for name in files(root) if name != LICENCE]
    if not names:
        print(f"notices: git names no file in {root}", file=sys.stderr)
        return 1
    bad = 0
    for name in names:
        content = (root / name).read_bytes()
        found = notices(content.decode(errors="replace")) if b"\0" not in content else []
        if found:
            bad += 1
            line, text = found[0]
            print(f"{name}:{line}: another project's notice: {text[:120]}", file=sys.stderr)
    if bad:
        print(f"notices: {bad} files carry another project's notice: kvconn ships no text of others", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()))
