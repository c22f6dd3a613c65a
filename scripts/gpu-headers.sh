#!/usr/bin/env bash
# Puts cuda.h of two CUDA majors into build/cuda-headers/12 and 13, from PyPI's packages (scripts/requirements-gpu.txt). They are not
# installed. When they cannot be had it says NOT RUN and ends with 75.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/build/cuda-headers
mkdir -p "$out"
exec 9>"$out/lock"
flock 9
[[ -e $out/stamp && ! scripts/requirements-gpu.txt -nt $out/stamp ]] && exit 0
rm -rf "$out/wheels" "$out/12" "$out/13"
fetch() { scripts/thrice.sh 'what scripts/requirements-gpu.txt names' "${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes -r scripts/requirements-gpu.txt -d "$out/wheels"; }
if ! fetch >"$out/log" 2>&1; then
  cat "$out/log" >&2
  printf '%s\n' "############" "## GPU tests: NOT RUN. pip could not download what scripts/requirements-gpu.txt names, so there is no cuda.h." \
    "## Let pip reach a package index (PIP_INDEX_URL), or lay cuda.h of CUDA 12.9 and 13.5 into $out/12 and $out/13 and touch $out/stamp." "############" >&2
  exit 75
fi
"${PYTHON:-python3}" - "$out" <<'PY'
import pathlib, sys, zipfile

out = pathlib.Path(sys.argv[1])
for wheel in (out / "wheels").glob("*.whl"):
    with zipfile.ZipFile(wheel) as z:
        major = "12" if "cu12" in wheel.name else "13"
        (out / major).mkdir(exist_ok=True)
        for name in z.namelist():
            if name.endswith(("/include/cuda.h", "/include/cudaTypedefs.h")):
                (out / major / name.rsplit("/", 1)[1]).write_bytes(z.read(name))
PY
rm -rf "$out/wheels"
[[ -s $out/12/cuda.h && -s $out/13/cuda.h ]] || { echo "the packages of scripts/requirements-gpu.txt have no cuda.h" >&2; exit 1; }
touch "$out/stamp"
