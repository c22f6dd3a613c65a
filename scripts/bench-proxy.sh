#!/usr/bin/env bash
# What the router costs a request, beside vLLM's example proxy in the same run; then its memory over 100,000 requests.
#   scripts/bench-proxy.sh [PYTHON]     PYTHON has fastapi, uvicorn and httpx; default: that of .venv-vllm
# More options for kvconn bench-proxy in BENCH='--rounds 9'.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv-vllm/bin/python}
beside=()
if "$python" -c 'import fastapi, httpx, uvicorn' 2>/dev/null; then
  # uvicorn as vLLM's users have it, on uvloop and httptools where these are installed.
  beside=(--beside "$python scripts/third_party/mooncake_connector_proxy.py")
else
  echo "bench-proxy: vLLM's example proxy: NOT RUN: $python does not import fastapi, httpx and uvicorn" >&2
fi
kvconn=$(mktemp)
trap 'rm -f "$kvconn"' EXIT
go build -trimpath -buildvcs=false -ldflags '-s -w' -o "$kvconn" ./cmd/kvconn
# shellcheck disable=SC2086
"$kvconn" bench-proxy "${beside[@]}" ${BENCH:-}
"$kvconn" bench-proxy --requests 100000
[[ ${#beside[@]} -gt 0 ]] || exit 75
