"""The steps by which a virtual environment with a real engine is made: setup_vllm.py and setup_sglang.py."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

EXIT_DOWNLOAD = 75
PAUSE_S = 10.0  # before a download is tried again

# Parts of pip's output that show that the network or the index failed, and not the package.
DOWNLOAD_TROUBLE = re.compile(
    r"Retrying \(|Connection (?:to|refused|reset|aborted)|ConnectionError|NewConnectionError|ProxyError|SSLError|"
    r"[Tt]imed out|ReadTimeout|ConnectTimeout|name resolution|Max retries exceeded|IncompleteRead|ProtocolError|"
    r"Could not fetch URL|HTTP error \d|\d{3} (?:Client|Server) Error|THESE PACKAGES DO NOT MATCH THE HASHES|"
    r"from versions: none\)|Network is unreachable"
)

started = time.monotonic()
engine = "vLLM"  # for people; setup_sglang.py sets up another one by the same steps


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

    def run(self, what: str, argv: list[str], tries: int = 1) -> None:
        """Ends this program if the command fails; a command that downloads is tried again."""
        say(what)
        for left in reversed(range(tries)):
            code, text = self._once(what, argv)
            if code == 0:
                return
            print(text, file=sys.stderr)
            if not DOWNLOAD_TROUBLE.search(text):
                stop(1, f"setting up {engine} failed ({what}, exit code {code}); the lines above say why")
            if left:
                say(f"  a download failed ({what}); once more in {PAUSE_S:.0f} s")
                time.sleep(PAUSE_S)
        stop(EXIT_DOWNLOAD, f"not run: a download failed while setting up {engine} ({what}); the lines above say why")

    def _once(self, what: str, argv: list[str]) -> tuple[int, str]:
        """The command's exit code, and the end of what it printed."""
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
        return code, "\n".join(tail)

    def _beat(self, what: str, done: threading.Event) -> None:
        while not done.wait(15):
            say(f"  … {what}: {self.size_gb():.1f} GB so far")

    def pip(self, what: str, *args: str) -> None:
        argv = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        # pip compiles the packages. Where PYTHONDONTWRITEBYTECODE is set, each start of a server would else compile them anew.
        self.run(what, [*argv, "--progress-bar", "off", *args], tries=3)

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
    """Installs the wheel under test, whose version may be that of other contents, and pytest where it is missing. An environment that
    has this very wheel is left as it is: others may be importing it."""
    steps = Steps(Path(python).parent.parent)
    steps.python = Path(python)
    if not installed(python, wheel):
        steps.pip(f"installing {wheel.name}", "--no-deps", "--force-reinstall", str(wheel))
    if subprocess.run([python, "-c", "import pytest"], capture_output=True, check=False).returncode != 0:
        steps.pip("installing pytest", "pytest")


def installed(python: str, wheel: Path) -> bool:
    """By what pip notes of a file that it was given (PEP 610), in this environment's own folder: another's may be on its path."""
    code = (
        "import importlib.metadata as m, json, sys, sysconfig\n"
        "own = m.distributions(name=sys.argv[1], path=[sysconfig.get_path('purelib')])\n"
        "text = next((each.read_text('direct_url.json') for each in own), None)\n"
        "print(json.loads(text or '{}').get('archive_info', {}).get('hashes', {}).get('sha256'))\n"
    )
    said = subprocess.run([python, "-I", "-c", code, wheel.name.partition("-")[0]], capture_output=True, text=True, check=False)
    return said.stdout.strip() == hashlib.sha256(wheel.read_bytes()).hexdigest()
