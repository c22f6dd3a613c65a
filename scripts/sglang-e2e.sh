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
# Of the Python tests those that need SGLang's packages; `make test` has the others.
"$sglang_python" -m pytest python/tests/test_sglang_{caches,conn,kinds,plugin,route,stand_ins,start,turns}.py e2e/test_sglang*.py -p no:cacheprovider -v "${@:2}"
