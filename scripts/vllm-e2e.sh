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
not_run() { printf '%s\n' "############" "## $1: NOT RUN: $2" "############" >&2; }
ours=0
[[ $(realpath -s "$(dirname "$vllm_python")") != "$(realpath -s "$1")/bin" ]] || ours=1
export KVCONN_E2E_OURS=$ours # e2e/readme.py
pip=("$vllm_python" -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 15)
pip+=(--no-deps --only-binary=:all: --require-hashes)
# vllm-router and smg go into our own environment only. Without them test_from_pages and test_kinds' test_smg do not run.
for wanted in scripts/requirements-{vllm-router,smg}.txt; do
  if ((ours)) && ! scripts/thrice.sh "what $wanted names" "${pip[@]}" -r "$wanted"; then
    not_run "what needs $wanted" "pip could not install it"
  fi
done
# Dynamo and smg's servicer bring plugins for pytest, vLLM and SGLang, so each has a directory of its own, beside that environment. It is
# made again when what it was made for is another: the files' digests, the Python, torch.
if ((ours)); then
  KVCONN_E2E_DYNAMO=$(realpath -s "${1%/}-dynamo") KVCONN_E2E_SMG_SERVICER=$(realpath -s "${1%/}-smg-servicer")
  export KVCONN_E2E_DYNAMO KVCONN_E2E_SMG_SERVICER
  for name in dynamo smg-servicer; do
    beside=${1%/}-$name wanted=scripts/requirements-$name.txt
    stamp=$(cat "$wanted" && "$vllm_python" -c 'import sys, torch; print(sys.version, torch.__version__)')
    [[ $stamp != "$(cat "$beside/kvconn-stamp" 2>/dev/null)" ]] || continue
    rm -rf "$beside"
    if scripts/thrice.sh "what $wanted names" "${pip[@]}" --target "$beside" -r "$wanted"; then
      printf '%s\n' "$stamp" >"$beside/kvconn-stamp"
    else
      rm -rf "$beside"
      not_run "what needs $wanted" "pip could not install it"
    fi
  done
else
  # The digest lists these lines. A test that is skipped is not in it.
  other="this environment is $(dirname "$(dirname "$vllm_python")"), and not $1, into which the check installs it"
  not_run e2e/test_from_pages.py "$other"
  not_run e2e/test_readme.py "$other"
  not_run "test_install of e2e/test_quickstart.py" "$other"
  "$vllm_python" -c 'import importlib.util as u; exit(u.find_spec("smg") is None)' || not_run "test_smg of e2e/test_kinds.py" "$other"
  prefix=$("$vllm_python" -c 'import sys; print(sys.prefix)')
  [[ -d ${KVCONN_E2E_DYNAMO:-$prefix-dynamo}/dynamo ]] || not_run e2e/test_dynamo.py "$other"
  [[ -d ${KVCONN_E2E_SMG_SERVICER:-$prefix-smg-servicer}/smg_grpc_servicer ]] || not_run e2e/test_smg_servicer.py "$other"
fi
if ((ours)) && [[ $(realpath "$1") != "$(realpath .venv-vllm)" ]]; then
  other="this environment is $1, and the pages' commands name .venv-vllm"
  not_run e2e/test_from_pages.py "$other"
  not_run e2e/test_readme.py "$other"
  not_run "test_install of e2e/test_quickstart.py" "$other"
fi
. scripts/two-files.sh "$vllm_python"
files=(e2e/test_{from_pages,pair,device_memory,ranks,kinds,launch,readme,pair_ends,served,states}.py)
for file in e2e/test_*.py; do
  [[ " ${files[*]} " == *" $file "* || $file == e2e/test_sglang* ]] || files+=("$file")
done
# The tests of device memory run on the CUDA driver double. Where it cannot be built, they are not run and say so.
scripts/gpu-double.sh || { status=$?; ((status == 75)) || exit $status; }
KVCONN_LIBCUDA=$PWD/build/gpu-double/libkvgpu-double.so scripts/pytest-twice.sh vllm "$vllm_python" \
  "${files[@]}" python/tests/test_vllm_*.py -v "${two[@]}" "${@:2}"
