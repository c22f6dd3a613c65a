#!/usr/bin/env bash
# scripts/bench-sglang.py in the environment with a real SGLang and Mooncake's
# transfer engine; what it prints goes to standard output.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/sglang-env.sh "${VENV_SGLANG:-.venv-sglang}" --mooncake
if [[ $sglang_not_run ]]; then
  echo "not run: $sglang_not_run" >&2
  exit 0
fi
"$sglang_python" scripts/bench-sglang.py "$@"
