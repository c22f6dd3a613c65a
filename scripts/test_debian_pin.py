"""Tests of the versions of Debian's packages: what apt-get is asked for, and what is said of another version. apt is a double."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent
NAMED = dict(line.split() for line in (SCRIPTS / "debian-versions.txt").read_text().splitlines() if not line.startswith("#"))
HANG_S = 60.0
APT_CACHE = """while [[ $1 == -* ]]; do [[ $1 != -o ]] || shift; shift; done
case $1 in
madison) while read -r version; do echo "$2 | $version | http://archive main"; done <{has}/$2;;
pkgnames) ls {has};;
esac"""
KERNEL = next(name for name in NAMED if name.startswith("linux-image-"))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of doubles: has/NAME holds the versions of a package that apt's lists have; asked holds each call of apt-get."""
    for folder in ("bin", "has"):
        (tmp_path / folder).mkdir()
    put(tmp_path, "apt-cache", APT_CACHE.format(has=tmp_path / "has"))
    put(tmp_path, "apt-get", f'echo "$*" >>{tmp_path}/asked\n[[ "$*" != *" install "*=* ]]')
    put(tmp_path, "dpkg-query", "echo ii")
    put(tmp_path, "uname", "echo x86_64")
    for name, version in NAMED.items():
        (tmp_path / "has" / name).write_text(f"{version}\n")
    return tmp_path


def put(machine: Path, name: str, text: str) -> None:
    (machine / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
    (machine / "bin" / name).chmod(0o755)


def run(machine: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{machine}/bin:{os.environ['PATH']}", "RXE_VM_CACHE": str(machine / "cache")}
    return subprocess.run(command, env=environment, cwd=machine, timeout=HANG_S, check=False, capture_output=True, text=True)


def test_the_version_that_is_named(machine: Path) -> None:
    (machine / "has" / "kmod").write_text(f"99-1\n{NAMED['kmod']}\n")
    ran = run(machine, SCRIPTS / "debian-pin.sh", "--", "kmod", "cpio")
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, [f"kmod={NAMED['kmod']}", f"cpio={NAMED['cpio']}"], "")


def test_archive_that_has_another_version(machine: Path) -> None:
    (machine / "has" / "kmod").write_text("99-1\n")
    ran = run(machine, SCRIPTS / "debian-pin.sh", "--", "kmod", "cpio")
    assert (ran.returncode, ran.stdout.split()) == (0, ["kmod", f"cpio={NAMED['cpio']}"])
    assert f"no kmod {NAMED['kmod']}" in ran.stderr
    assert "taken: 99-1" in ran.stderr


def test_package_that_is_not_named(machine: Path) -> None:
    ran = run(machine, SCRIPTS / "debian-pin.sh", "--", "sl")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "has no version of sl" in ran.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="rxe-vm installs packages for root only")
def test_versions_that_cannot_be_installed_together(machine: Path) -> None:
    """The double refuses every version. The packages are tried without, and a line says so."""
    put(machine, "dpkg-query", "exit 1")
    ran = run(machine, SCRIPTS / "rxe-vm", "--prepare")
    installs = [line for line in (machine / "asked").read_text().splitlines() if " install " in line]
    assert len(installs) == 2
    assert f"qemu-system-x86={NAMED['qemu-system-x86']}" in installs[0]
    assert " qemu-system-x86 " in installs[1]
    assert "now without the versions" in ran.stderr


@pytest.mark.parametrize("known", [True, False])
def test_kernel(machine: Path, known: bool) -> None:
    """The kernel that is named is taken although there is a newer one; where there is none of that name, the newest is."""
    newest = "linux-image-99.1.1+deb12-amd64"
    (machine / "has" / newest).write_text("99.1.1-1\n")
    if not known:
        (machine / "has" / KERNEL).unlink()
    ran = run(machine, SCRIPTS / "rxe-vm", "--prepare")
    downloads = [line.split()[-1] for line in (machine / "asked").read_text().splitlines() if " download " in line]
    assert set(downloads) == {f"{KERNEL}={NAMED[KERNEL]}" if known else newest}
    assert (f"no {KERNEL}; taken: {newest}" in ran.stderr) is not known


# What each script does after its download, done by a double: dpkg unpacks the file that the script looks for, go tests nothing.
UNPACKED = {"verbs-abi.sh": "usr/include/infiniband/verbs.h", "gpu-real-driver.sh": "usr/lib/libcuda.so.999.1"}


@pytest.mark.parametrize(("script", "package"), [("verbs-abi.sh", "libibverbs-dev"), ("gpu-real-driver.sh", "libcuda1")])
@pytest.mark.parametrize("named", [True, False])
def test_download_of_another_version_is_told(machine: Path, script: str, package: str, named: bool) -> None:
    shutil.copytree(SCRIPTS, machine / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    if not named:
        (machine / "has" / package).write_text("99-1\n")
    put(machine, "apt-get", f"case $* in indextargets*) echo http://archive bookworm main;; *download*) touch {package}_1.deb;; esac")
    put(machine, "dpkg", f'mkdir -p "$(dirname "$3/{UNPACKED[script]}")" && touch "$3/{UNPACKED[script]}"')
    put(machine, "go", "exit 0")
    ran = run(machine, "env", "-u", "GO", f"KVCONN_VERBS_HEADERS={machine}", f"scripts/{script}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count(f"no {package} {NAMED[package]}") == (not named)
    assert ("taken: 99-1" in ran.stderr) is not named


def test_every_package_that_is_downloaded_is_named() -> None:
    scripts = {path.name: path.read_text() for path in SCRIPTS.iterdir() if path.is_file() and path.suffix in ("", ".sh")}
    asking = {name for name, text in scripts.items() if re.search(r"apt-?get\b.* (download|install) ", text)}
    assert asking == {"rxe-vm", "verbs-abi.sh", "gpu-real-driver.sh", "need-tools.sh"}  # the last: the machine's own tools
    installed = re.search(r"all=\((.*?)\)", scripts["rxe-vm"], re.DOTALL)
    assert installed
    unpacked = {name for script in ("verbs-abi.sh", "gpu-real-driver.sh") for name in re.findall(r'"\$pin".* -- (\S+)\)"', scripts[script])}
    assert {*installed[1].split(), *unpacked, KERNEL} == set(NAMED)


def test_folder_of_the_caller_does_not_matter(machine: Path) -> None:
    shutil.copytree(SCRIPTS, machine / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    ran = run(machine, "scripts/rxe-vm", "--prepare")
    assert not re.search(r"debian-(versions|pin).*No such file", ran.stderr)
    assert f"download {KERNEL}={NAMED[KERNEL]}" in (machine / "asked").read_text()
