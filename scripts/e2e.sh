#!/usr/bin/env bash
# rdma-test, then the real vLLM and SGLang pairs. Their environments, where there are none yet, are made meanwhile: an
# emulated machine does not need the network.
#   scripts/e2e.sh VENV_VLLM VENV_SGLANG
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/environments.log
setsid bash -c '. scripts/vllm-env.sh "$1"; . scripts/sglang-env.sh "$2"' - "$1" "$2" >$log 2>&1 &
making=$!
trap 'kill -- -$making 2>/dev/null || true' EXIT
scripts/rdma-test.sh
# A quarter of an hour at most. The next two steps make what is missing then, and tell what went wrong.
timeout --foreground 900 tail --pid=$making -f /dev/null || kill -- -$making 2>/dev/null || true
wait $making || tail -n 5 $log >&2
trap - EXIT
scripts/vllm-e2e.sh "$1"
# Five minutes of starts of SGLang's ranks are left to `make e2e-sglang`.
scripts/sglang-e2e.sh "$2" --deselect=e2e/test_sglang_ranks.py --deselect=e2e/test_sglang_stages.py --deselect=e2e/test_sglang_attention.py
