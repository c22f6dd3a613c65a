#!/usr/bin/env bash
# Time to first token through a real vLLM pair, beside the single engine's: scripts/bench-ttft.sh [--network RATE] [--prompts N]
# What the thresholds (the router's --decode-below, the connector's kv_recompute_threshold) change for short prompts:
#   scripts/bench-ttft.sh --threshold [--prompts N]
# With --network, as 1gbit, between engines whose network has that rate: a loopback of their own (as root, with iproute2).
set -euo pipefail
cd "$(dirname "$0")/.."
rate=
if [[ ${1:-} == --network ]]; then
  rate=$2
  shift 2
fi
program=bench_ttft
if [[ ${1:-} == --threshold ]]; then
  program=bench_threshold
  shift
fi
make wheel
. scripts/vllm-env.sh "${VENV_VLLM:-.venv-vllm}"
[[ -z $vllm_not_run ]] || { echo "scripts/bench-ttft.sh: NOT RUN: $vllm_not_run" >&2; exit 75; }
bench=("$vllm_python" e2e/$program.py "$@")
[[ $rate ]] || exec "${bench[@]}"
exec unshare --net bash -euc 'ip link set lo up; tc qdisc add dev lo root tbf rate "$0" burst 256kb latency 50ms; exec "$@"' "$rate" "${bench[@]}" --transport tcp
