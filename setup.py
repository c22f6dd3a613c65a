"""Builds the wheel: compiles libkvconn.so with Go and puts it into the package, with the licences of all that it links.

One wheel serves every CPython from 3.9 on: the package is pure Python over
ctypes, only the library depends on the platform.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
LIBRARY = ROOT / "build" / "libkvconn.so"


def glibc_needed(library: Path) -> tuple[int, int]:
    """The newest glibc version that the library asks for."""
    symbols = subprocess.run(["readelf", "-W", "--version-info", str(library)], check=True, capture_output=True, text=True).stdout
    return max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))


class BuildWithLibrary(build_py):
    """build_py that also builds the library."""

    def run(self) -> None:
        super().run()
        subprocess.run(["make", "lib"], cwd=ROOT, check=True)
        package = Path(self.build_lib) / "kvconn"
        shutil.copy2(LIBRARY, package / LIBRARY.name)
        (package / "include").mkdir(exist_ok=True)
        shutil.copy2(ROOT / "include" / "kvconn.h", package / "include" / "kvconn.h")


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        machine = platform.split("_", 1)[1]
        major, minor = glibc_needed(LIBRARY)
        return "py3", "none", f"manylinux_{major}_{minor}_{machine}"


class BinaryDistribution(Distribution):
    """A distribution that is not the same on every platform."""

    def has_ext_modules(self) -> bool:
        return True


# Before the metadata, which names each of them.
subprocess.run(["make", "licenses"], cwd=ROOT, check=True, stdout=sys.stderr)
setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel}, distclass=BinaryDistribution)
