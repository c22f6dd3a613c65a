#!/usr/bin/env bash
# The demo: environment, wheel, tiny model, two vLLM servers and the router.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/vllm-env.sh "$1"
exec "$vllm_python" e2e/demo.py "${@:2}"
