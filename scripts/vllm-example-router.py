"""Finds an example router of vLLM's, which a benchmark and tests compare with, and prints its path.

    scripts/vllm-example-router.py [mooncake | push]

It comes out of vLLM's source distribution, which is downloaded once, by pip's own configuration (index, proxy, certificates),
into .cache/. pip itself would build the package to read its metadata, so its parts are asked directly.

Exit codes: 0 found; 75 it could not be downloaded (the line starts with "not run:"); 1 anything else.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import IO, NoReturn

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"  # of the whole source distribution
EXAMPLES = f"vllm-{VERSION}/examples/disaggregated/"
MEMBERS = {
    "mooncake": EXAMPLES + "mooncake_connector/mooncake_connector_proxy.py",
    "push": EXAMPLES + "disaggregated_serving/disagg_proxy_pushconnector_demo.py",
}
EXIT_DOWNLOAD = 75

cache = Path(__file__).resolve().parent.parent / ".cache" / f"vllm-{VERSION}-{SHA256[:12]}"


def stop(code: int, text: str) -> NoReturn:
    print(text, file=sys.stderr)
    raise SystemExit(code)


def download(into: IO[bytes]) -> str:
    """Writes the source distribution, and returns its SHA-256."""
    from pip._internal.commands import create_command
    from pip._vendor.packaging.specifiers import SpecifierSet

    command = create_command("download")
    digest = hashlib.sha256()
    with command.main_context():
        options, _ = command.parse_args(["--no-deps", "--no-binary=:all:"])
        with command.get_default_session(options) as session:
            finder = command._build_package_finder(options, session, ignore_requires_python=True)
            found = finder.find_best_candidate("vllm", SpecifierSet(f"=={VERSION}")).best_candidate
            if found is None:
                raise LookupError(f"the index has no source distribution of vllm {VERSION}")
            print(f"downloading {found.link.filename} for its example router …", file=sys.stderr)
            with session.get(found.link.url_without_fragment, stream=True, headers={"Accept-Encoding": "identity"}) as response:
                response.raise_for_status()
                for part in response.iter_content(1 << 20):
                    digest.update(part)
                    into.write(part)
    return digest.hexdigest()


def main() -> None:
    names = sys.argv[1:] or ["mooncake"]
    if len(names) != 1 or names[0] not in MEMBERS:
        stop(2, __doc__ or "")
    router = cache / Path(MEMBERS[names[0]]).name
    if not router.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as place:
            archive = Path(place) / "vllm.tar.gz"
            try:
                with archive.open("wb") as file:
                    digest = download(file)
            except Exception as e:  # of pip, of its HTTP client, of the system: none of them is a fault of this tree
                stop(EXIT_DOWNLOAD, f"not run: vLLM's source distribution could not be downloaded: {type(e).__name__}: {e}")
            if digest != SHA256:
                stop(1, f"the source distribution of vllm {VERSION} has SHA-256 {digest}, not {SHA256}")
            with tarfile.open(archive) as tar:
                for each in MEMBERS.values():
                    member = tar.extractfile(each)
                    assert member is not None, each
                    whole = Path(place) / Path(each).name
                    whole.write_bytes(member.read())
                    whole.replace(cache / whole.name)
    print(router)


if __name__ == "__main__":
    main()
