#!/usr/bin/env bash
# What the router costs a request, beside vLLM's example router in the same run; then its memory over 100,000 requests.
#   scripts/bench-proxy.sh [PYTHON]     PYTHON has fastapi, uvicorn and httpx; default: that of .venv-vllm
# More options for kvconn-rig bench-proxy in BENCH='--rounds 9'.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv-vllm/bin/python}
beside=()
if ! "$python" -c 'import fastapi, httpx, uvicorn' 2>/dev/null; then
  echo "bench-proxy: vLLM's example router: NOT RUN: $python does not import fastapi, httpx and uvicorn" >&2
elif ! example=$("$python" scripts/vllm-example-router.py); then
  echo "bench-proxy: vLLM's example router: NOT RUN: the line above says why" >&2
else
  # uvicorn as vLLM's users have it, on uvloop and httptools where these are installed.
  beside=(--beside "$python $example")
fi
make -s cmd rig # the router and what measures it
# shellcheck disable=SC2086
build/kvconn-rig bench-proxy "${beside[@]}" ${BENCH:-}
build/kvconn-rig bench-proxy --requests 100000
[[ ${#beside[@]} -gt 0 ]] || exit 75
