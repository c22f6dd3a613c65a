#!/usr/bin/env python3
"""Holds the pages against each other and against the tree, without the network.

    scripts/check-docs.py [--copy DIR]

A link must lead to a file and an anchor that are there. A path, a make target, a name of the C interface or of a metric, and "`name` in
`file`" must be there as well. No word stands twice in ARCHITECTURE.md's glossary. With --copy the pages, and the files that they link to,
are copied to DIR as they lie in the repository, for mkdocs.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Pages that tell of the past, where a name may be gone.
HISTORY = {"CHANGELOG.md", "BENCHMARKS.md"}
BUILT = ("build/", "dist/", "kv/", ".venv")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
SOURCES = ("include/*.h", "capi/*.[chg]*", "node/*.go", "proxy/*.go", "python/kvconn/**/*.py")


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def without_blocks(text: str) -> str:
    """The text without its blocks of code, whose lines stay as empty ones."""
    return re.sub(r"^```.*?^```$", lambda m: "\n" * m.group().count("\n"), text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings."""
    out: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", without_blocks(page.read_text(encoding="utf-8")), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        out.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text)))
    return out


def links(page: Path, text: str) -> Iterator[tuple[str, Path, str]]:
    for target in LINK.findall(CODE.sub("", text)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield target, (page.parent / path).resolve() if path else page, anchor


def check_links(page: Path, text: str) -> Iterator[str]:
    for target, path, anchor in links(page, text):
        if not path.is_file() or not path.is_relative_to(ROOT):
            yield f"the link {target} leads to no file"
        elif anchor and anchor not in anchors(path):
            yield f"the link {target} leads to no heading of {path.relative_to(ROOT)}"


def exists(path: str) -> bool:
    return any(next(ROOT.glob(start + path.rstrip("/")), None) for start in ("", "python/"))


def check_paths(text: str) -> Iterator[str]:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} | {"kvconn"}
    for word in (code.split()[0] for code in CODE.findall(text) if code.strip()):
        if re.fullmatch(r"[\w-]+/[\w./*-]*", word) and word.split("/")[0] in rooms and not word.startswith(BUILT) and not exists(word):
            yield f"there is no {word}"
    for line in text.splitlines():
        cells = line.split("|")
        here = [code.rstrip("/") for code in CODE.findall(cells[1]) if code.endswith("/")] if len(cells) > 3 else []
        for name in CODE.findall("|".join(cells[2:])) if here else []:
            if re.fullmatch(r"[\w-]+\.(go|py|c|h|sh)", name) and not any(next(ROOT.glob(f"{room}/**/{name}"), None) for room in here):
                yield f"there is no {name} in {' or '.join(here)}"
    for name, path in re.findall(r"`(\w+)` in `([\w/.-]+)`", text):
        if (ROOT / path).is_file() and not re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")):
            yield f"there is no {name} in {path}"


def check_names(text: str, sources: str, targets: set[str]) -> Iterator[str]:
    for name in set(re.findall(r"(?<![\w/.])kvconn_[a-z_]*[a-z]\b", text)):
        if not re.search(rf"\b{name.removesuffix('_total')}(_total)?\b", sources):
            yield f"no source has the name {name}"
    for words in re.findall(r"^make ((?:[a-z][a-z0-9-]* ?)+)", "\n".join(CODE.findall(text)), re.M):
        yield from (f"there is no target make {word}" for word in words.split() if word not in targets)


def check_glossary() -> Iterator[str]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text[text.index("## Words") : text.index("## The map")]
    words = [word for row in re.findall(r"^\| ([a-z][^|]*) \|", table, re.M)[1:] for word in row.split(", ")]
    for word in sorted({word for word in words if words.count(word) > 1}):
        yield f"ARCHITECTURE.md: the glossary has {word!r} twice"


def check_reach() -> Iterator[str]:
    """Every page is found from README.md, and has its place in the site."""
    seen, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        new = {
            path for _, path, _ in links(page, without_blocks(page.read_text(encoding="utf-8"))) if path.suffix == ".md" and path.is_file()
        }
        todo += new - seen
        seen |= new
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in pages():
        if page not in seen:
            yield f"no way leads from README.md to {page.relative_to(ROOT)}"
        if f" {page.relative_to(ROOT)}\n" not in site:
            yield f"mkdocs.yml has no place for {page.relative_to(ROOT)}"


def copy(to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    files = set(pages())
    for page in pages():
        files |= {path for _, path, _ in links(page, without_blocks(page.read_text(encoding="utf-8")))}
    for file in files:
        place = to / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, place)


def main() -> int:
    sources = "\n".join(path.read_text(encoding="utf-8") for glob in SOURCES for path in sorted(ROOT.glob(glob)))
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    wrong = [*check_glossary(), *check_reach()]
    for page in pages():
        name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
        prose = without_blocks(text)
        found = [*check_links(page, prose)]
        if name not in HISTORY:
            found += [*check_paths(prose), *check_names(text, sources, targets)]
        wrong += [f"{name}: {what}" for what in dict.fromkeys(found)]
    for what in wrong:
        print(what, file=sys.stderr)
    if not wrong and sys.argv[1:2] == ["--copy"]:
        copy(Path(sys.argv[2]).absolute())
    print(f"docs: {len(wrong)} mistakes" if wrong else f"docs: {len(pages())} pages, ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
