#!/usr/bin/env bash
# The demo: environment, wheel, tiny model, two vLLM servers and the router.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/vllm-env.sh "$1"
[[ -z $vllm_not_run ]] || { echo "make demo: NOT RUN: $vllm_not_run" >&2; exit 75; }
exec "$vllm_python" e2e/demo.py "${@:2}"
