#!/usr/bin/env bash
# The end-to-end tests on a real vLLM pair. Without the packages of a real vLLM
# (no network, say) they are not run, loudly; a failing test is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! . scripts/vllm-env.sh "$1"; then exit 1; fi
if [[ ${vllm_not_run:-} ]]; then
  echo "############################################################" >&2
  echo "## make e2e: NOT RUN: $vllm_not_run" >&2
  echo "############################################################" >&2
  exit 0
fi
"$vllm_python" -m pytest e2e -p no:cacheprovider -v "${@:2}"
