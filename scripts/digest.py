#!/usr/bin/env python3
"""The end of a check: `scripts/digest.py FOLDER [SECONDS]`, where FOLDER is what KVCONN_CHECK named for scripts/stage.py.

All of the check took SECONDS, which is less than the sum of its stages where some ran side by side.

Prints at most 60 lines: each failed test with its own lines, each data race's first stack, each failed command, the tests that
failed once and then passed alone (FLAKY), what was not run, what passed though some tries were LATE, and how long each stage took and
kept processors busy. The exit status is 1 if a stage has failed, or if more than three tests were flaky.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MOST_LINES, MOST_FLAKY, WIDTH = 60, 3, 180

# Where a failure begins in a log that no better source explains.
BEGINS = re.compile(
    r"^\s*--- FAIL|^panic: |^fatal error: |WARNING: DATA RACE|^FAIL\s|^(FAILED|ERROR) |^PROBLEM: |: error: |^\*\*\* |"
    r"^make(\[\d+\])?: \*\*\*|^Traceback |^error: |^## .*DIED"
)
# Of a stage that runs Go's tests and commands: a command that failed.
COMMAND_FAILED = re.compile(r"^(\[\d\] )?PROBLEM: |^FAIL  \w+ \(status ")
NOISE = re.compile(r"^\s*(=== |--- (PASS|SKIP)|PASS$|coverage: )")


class Failure(NamedTuple):
    what: str
    lines: list[str]


class Stage(NamedTuple):
    name: str
    status: int
    seconds: int
    busy: int
    command: str


def stages(folder: Path) -> list[Stage]:
    try:
        rows = [row.split("\t", 4) for row in (folder / "stages").read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    return [Stage(name, int(status), int(seconds), int(busy), command) for name, status, seconds, busy, command in rows]


def first_stack(lines: list[str]) -> list[str]:
    """Of a data race: what was done, and the first stack."""
    return [line for line in lines[: lines.index("") if "" in lines else None] if line.strip("= ")]


def go_results(events: Iterable[dict[str, str]]) -> tuple[list[Failure], list[Failure]]:
    """What failed in the end, and what failed first and passed when it ran alone: by `go test -json`'s events."""
    ended: dict[tuple[str, str], list[str]] = {}
    output: dict[tuple[str, str], list[str]] = {}
    races: list[Failure] = []
    for event in events:
        package = event.get("Package") or event.get("ImportPath", "").split(" ")[0]
        key = (package, event.get("Test", ""))
        if event["Action"] in ("output", "build-output"):
            output.setdefault(key, []).append(event["Output"].rstrip("\n"))
        elif event["Action"] in ("pass", "fail"):
            ended.setdefault(key, []).append(event["Action"])
        elif event["Action"] == "build-fail":
            ended.setdefault(key, []).append("fail")
    failed: list[Failure] = []
    flaky: list[Failure] = []
    for (package, test), ends in ended.items():
        if "fail" not in ends or any(
            p == package and t != test and (t.startswith(test + "/") if test else t) and "fail" in e for (p, t), e in ended.items()
        ):
            continue  # its subtest, or the package's test, says it
        lines = [line for line in output.get((package, test), []) if not NOISE.match(line)]
        for i, line in enumerate(lines):
            if "WARNING: DATA RACE" in line:
                races.append(Failure(f"data race in {package} {test}", first_stack(lines[i + 1 :])))
        (failed if ends[-1] == "fail" else flaky).append(Failure(f"{package} {test}".strip(), lines))
    return races + failed, flaky


def pytest_results(text: str) -> tuple[list[Failure], list[Failure]]:
    """The same of a log of scripts/pytest-twice.sh."""
    first, _, second = text.partition("\n== once more: ")
    failures = {name: Failure(name, lines) for name, lines in pytest_failures(first)}
    if not second:
        return list(failures.values()), []
    left = {name for name, _ in pytest_failures(second)}
    return [f for f in failures.values() if f.what in left], [f for f in failures.values() if f.what not in left]


def pytest_failures(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each failed test by its line in pytest's short summary, with the lines `E` of its report."""
    reports: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if head := re.match(r"_{3,} (?:ERROR at \w+ of )?(\S+) _{3,}$", line):
            name = head[1].split(".")[-1]
        elif re.match(r"E   |\S+\.py:\d+: ", line):
            reports.setdefault(name, []).append(" ".join(line.split()) if line.startswith("E ") else line)
    for line in text.splitlines():
        if said := re.match(r"(?:FAILED|ERROR) (\S+?)(?: - (.*))?$", line):
            yield said[1], reports.get(said[1].split("::")[-1]) or [said[2] or ""]


def log_failures(text: str) -> list[Failure]:
    """Of any other log: where its first failures begin, or its end."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if BEGINS.search(line)]
    if not starts:
        return [Failure("its last lines", lines[-12:])]
    found: list[Failure] = []
    last = -8
    for start in starts:
        if start >= last + 8:
            last = start
            found.append(Failure(f"line {start + 1}", lines[start : start + 8]))
    return found


def not_run(folder: Path, stage: Stage) -> list[str]:
    """What a stage says that it did not run, each once."""
    log = folder / (stage.name + ".log")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    said = [line.strip("# ") for line in text.splitlines() if line.startswith("## ") and "NOT RUN" in line]
    outputs = (event.get("Output", "") for run in go_runs(folder, stage) for event in run)
    said += [re.sub(r"^\S+: (NOT RUN: )?", "", output.strip()) for output in outputs if "NOT RUN" in output]
    return [f"NOT RUN {stage.name}: {line}" for line in dict.fromkeys(said)]


def late(folder: Path, stage: Stage) -> list[str]:
    """What rig/timed and its like say of tests that have passed in a later try."""
    said = [
        f"LATE {stage.name}: {event.get('Test', '')}: {event['Output'].partition('LATE: ')[2].strip()}"
        for run in go_runs(folder, stage)
        for event in run
        if "LATE: " in event.get("Output", "")
    ]
    return list(dict.fromkeys(said))


def go_runs(folder: Path, stage: Stage) -> list[list[dict[str, str]]]:
    """What `go test -json` said, for each run, with an empty line after it if there are several; nothing of a stage that ran something
    else."""
    events = folder / (stage.name + ".json")
    if not events.exists():
        return []
    runs = events.read_text(encoding="utf-8").split("\n\n")
    return [[json.loads(line) for line in run.splitlines() if line.startswith("{")] for run in runs]


def results(folder: Path, stage: Stage) -> tuple[list[Failure], list[Failure]]:
    log = folder / (stage.name + ".log")
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    failed: list[Failure] = []
    flaky: list[Failure] = []
    runs = go_runs(folder, stage)
    for run in runs:
        bad, unsteady = go_results(run)
        failed, flaky = failed + bad, flaky + unsteady
    if not runs and "short test summary info" in text:
        failed, flaky = pytest_results(text)
    elif not runs:
        flaky = [Failure(line.removeprefix("FLAKY "), []) for line in text.splitlines() if line.startswith("FLAKY ")]
    if stage.status and not failed:
        failed = log_failures(text)
    elif runs and (commands := [line for line in dict.fromkeys(text.splitlines()) if COMMAND_FAILED.match(line)]):
        failed.append(Failure("commands", commands))
    return failed, flaky


def shown(kind: str, stage: Stage, failures: list[Failure], room: int) -> list[str]:
    """The failures in at most so many lines, with an equal share each."""
    if not failures:
        return []
    fits = failures[: max(1, room // 2)]
    share = max(1, room // len(fits) - 1)
    lines: list[str] = []
    for failure in fits:
        lines.append(f"{kind} {stage.name}: {failure.what}")
        lines += [f"    {line.strip()}" for line in failure.lines if line.strip()][:share]
    if len(fits) < len(failures):
        lines.append(f"{kind} {stage.name}: {len(failures) - len(fits)} more")
    return lines


def digest(folder: Path, took: int = 0) -> tuple[list[str], bool]:
    ran = stages(folder)
    times = [f"{'red' if s.status else 'ok':5}{s.seconds:6} s {s.busy:6} s busy  {s.name}" for s in ran]
    found = [(s, *results(folder, s)) for s in ran]
    flaky = sum(len(f) for _, _, f in found)
    bad = [s for s in ran if s.status]
    lines = [f"RED {s.name}: exit status {s.status}: {s.command}" for s in bad]
    lines += [line for stage in ran for line in not_run(folder, stage)][:8]
    lines += [line for stage in ran for line in late(folder, stage)][:8]
    room = MOST_LINES - len(times) - len(lines) - 3
    parts = sum(bool(f) for _, failed, fl in found for f in (failed, fl)) or 1
    for stage, failed, fl in found:
        lines += shown("FAILED", stage, failed, room // parts)
        lines += shown("FLAKY", stage, fl, room // parts)
    if flaky > MOST_FLAKY:
        lines.append(f"RED: {flaky} tests were flaky, which is more than {MOST_FLAKY}")
    if not ran:
        lines.append("RED: no stage ran")
    good = bool(ran) and not bad and flaky <= MOST_FLAKY
    total = took or sum(s.seconds for s in ran)
    lines = [line[:WIDTH] for line in lines]
    lines = lines[: MOST_LINES - len(times) - 2]
    return [f"== digest: {'green' if good else 'RED'}, {flaky} flaky, {total} s", *times, *lines], good


if __name__ == "__main__":
    report, good = digest(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
    print("\n".join(report))
    sys.exit(not good)
