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
ours=0
[[ $(realpath -s "$(dirname "$vllm_python")") != "$(realpath -s "$1")/bin" ]] || ours=1
# vllm-router and smg go into our own environment only. Without them test_from_pages and test_kinds' test_smg do not run.
for wanted in scripts/requirements-{vllm-router,smg}.txt; do
  if ((ours)) && ! scripts/thrice.sh "what $wanted names" "$vllm_python" -m pip install \
    --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes -r "$wanted"; then
    printf '%s\n' "############" "## what needs $wanted: NOT RUN: pip could not install it" "############" >&2
  fi
done
# Dynamo brings plugins for pytest and for vLLM, so it has a directory of its own, beside that environment.
dynamo=.venv-dynamo wanted=scripts/requirements-dynamo.txt
if ((ours)) && ! cmp --silent $wanted $dynamo/requirements.txt; then
  rm -rf $dynamo
  if scripts/thrice.sh "what $wanted names" "$vllm_python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --require-hashes --target $dynamo -r $wanted; then
    cp $wanted $dynamo/requirements.txt
  else
    rm -rf $dynamo
    printf '%s\n' "############" "## what needs $wanted: NOT RUN: pip could not install it" "############" >&2
  fi
fi
# The tests of device memory run on the CUDA driver double. Where it cannot be built, they are not run and say so.
scripts/gpu-double.sh || { status=$?; ((status == 75)) || exit $status; }
KVCONN_LIBCUDA=$PWD/build/gpu-double/libkvgpu-double.so scripts/pytest-twice.sh vllm "$vllm_python" python/tests/test_vllm_*.py e2e -v "${@:2}"
