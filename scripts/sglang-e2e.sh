#!/usr/bin/env bash
# The tests on a real SGLang pair. Where the packages of a real SGLang cannot be
# downloaded they are not run, loudly; a failing test is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/sglang-env.sh "$1"
if [[ $sglang_not_run ]]; then
  printf '%s\n' "############" "## make e2e-sglang: NOT RUN: $sglang_not_run" "############" >&2
  exit 0
fi
# The tests of device memory run on the CUDA driver double. Where it cannot be built, they are not run and say so.
scripts/gpu-double.sh || { status=$?; ((status == 75)) || exit $status; }
ours=0
[[ $(realpath -s "$(dirname "$sglang_python")") != "$(realpath -s "$1")/bin" ]] || ours=1
export KVCONN_E2E_OURS=$ours # e2e/readme.py
. scripts/two-files.sh "$sglang_python"
files=(e2e/test_sglang{,_common,_role_change,_pages,_device_memory,_readme}.py)
for file in e2e/test_sglang*.py; do
  [[ " ${files[*]} " == *" $file "* ]] || files+=("$file")
done
# Of the Python tests those that need SGLang's packages; `make test` has the others.
KVCONN_LIBCUDA=$PWD/build/gpu-double/libkvgpu-double.so scripts/pytest-twice.sh sglang "$sglang_python" "${files[@]}" \
  python/tests/test_sglang_{caches,conn,device,kinds,names,plugin,route,served,stand_ins,start,switch,turns}.py -v "${two[@]}" "${@:2}"
