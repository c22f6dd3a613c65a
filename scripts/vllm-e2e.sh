#!/usr/bin/env bash
# The end-to-end tests on a real vLLM pair. Where the packages of a real vLLM
# cannot be downloaded they are not run, loudly; a failing test is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/vllm-env.sh "$1"
if [[ $vllm_not_run ]]; then
  printf '%s\n' "############" "## make e2e: NOT RUN: $vllm_not_run" "############" >&2
  exit 0
fi
# vllm-router goes into our own environment only. Without it test_from_pages does not run.
wanted=scripts/requirements-vllm-router.txt
if [[ $(realpath -s "$(dirname "$vllm_python")") == "$(realpath -s "$1")/bin" ]] && ! scripts/thrice.sh "what $wanted names" "$vllm_python" -m pip install \
  --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes -r $wanted; then
  printf '%s\n' "############" "## e2e/test_from_pages.py: NOT RUN: pip could not install $wanted" "############" >&2
fi
# The tests of device memory run on the CUDA driver double. Where it cannot be built, they are not run and say so.
scripts/gpu-double.sh || { status=$?; ((status == 75)) || exit $status; }
KVCONN_LIBCUDA=$PWD/build/gpu-double/libkvgpu-double.so scripts/pytest-twice.sh vllm "$vllm_python" python/tests/test_vllm_*.py e2e -v "${@:2}"
