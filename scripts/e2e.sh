#!/usr/bin/env bash
# Faults on agents in processes of their own, rdma-test, then the real vLLM and SGLang pairs. A stage that fails keeps none of the
# others from running. The environments of the pairs, where there are none yet, are made meanwhile: an emulated machine does not
# need the network.
#   scripts/e2e.sh VENV_VLLM VENV_SGLANG
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build
log=build/environments.log failed=0
stage() { scripts/stage.py "$@" || failed=1; }
chaos=(build/kvconn-rig chaos --short)
stage chaos "${chaos[@]}"
double=0
scripts/gpu-double.sh || double=$?
# These three wait for most of their time, so they do it side by side.
beside=()
scripts/stage.py chaos-local "${chaos[@]}" --parts faults --faults 30 --transport local & beside+=($!)
if ((double == 0)); then
  scripts/stage.py chaos-gpu "${chaos[@]}" --parts faults --faults 30 --memory double & beside+=($!)
  scripts/stage.py chaos-gpu-local "${chaos[@]}" --parts faults --faults 30 --memory double --transport local & beside+=($!)
fi
for each in "${beside[@]}"; do wait "$each" || failed=1; done
if ((double == 0)); then
  stage chaos-gpu-slow "${chaos[@]}" --parts slow,stalled --memory double --strict
else
  # 75: cuda.h cannot be had. The check's last lines name each part that was left out, with why.
  ((double == 75)) && why="there is no cuda.h" || { why="the driver double was not built" failed=1; }
  for each in chaos-gpu chaos-gpu-local chaos-gpu-slow; do
    stage "$each" printf '%s\n' "############" "## agents with device memory: NOT RUN, since $why" "############"
  done
fi
setsid bash -c '. scripts/vllm-env.sh "$1"; . scripts/sglang-env.sh "$2"' - "$1" "$2" >$log 2>&1 &
making=$!
trap 'kill -- -$making 2>/dev/null || true' EXIT
stage rdma-test scripts/rdma-test.sh
# A quarter of an hour at most. The next two steps make what is missing then, and tell what went wrong.
timeout --foreground 900 tail --pid=$making -f /dev/null || kill -- -$making 2>/dev/null || true
wait $making || tail -n 5 $log >&2
trap - EXIT
stage vllm scripts/vllm-e2e.sh "$1"
stage sglang scripts/sglang-e2e.sh "$2"
exit $failed
