#!/usr/bin/env bash
# The connector's time on the steps of a real pair with a hundred transfers in flight: scripts/bench-step-pair.sh [--held] [--requests N]
set -euo pipefail
cd "$(dirname "$0")/.."
make wheel
. scripts/vllm-env.sh "${VENV_VLLM:-.venv-vllm}"
[[ -z $vllm_not_run ]] || { echo "scripts/bench-step-pair.sh: NOT RUN: $vllm_not_run" >&2; exit 75; }
exec "$vllm_python" e2e/bench_step.py "$@"
