#!/usr/bin/env bash
# Time to first token through a real vLLM pair, beside the single engine's: scripts/bench-ttft.sh [--prompts N]
set -euo pipefail
cd "$(dirname "$0")/.."
make wheel
. scripts/vllm-env.sh "${VENV_VLLM:-.venv-vllm}"
[[ -z $vllm_not_run ]] || { echo "scripts/bench-ttft.sh: NOT RUN: $vllm_not_run" >&2; exit 75; }
exec "$vllm_python" e2e/bench_ttft.py "$@"
