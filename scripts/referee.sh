#!/usr/bin/env bash
# The router before engines of three FastAPI releases, an old, a middle and a new one, that say what they read of hostile requests:
# scripts/referee. A release that cannot be had, or that this Python is too new or too old for, is NOT RUN, and says so. If none can
# be had although pip reaches its package index, that is an error.
#   scripts/referee.sh PYTHON KVCONN [--seed N...] [--chance N] [--seconds N] [--row FILE]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?} kvconn=${2:?} have=() lacking=()
for release in old middle new; do
  venv=$PWD/build/referee/$release wanted=scripts/requirements-fastapi-$release.txt
  if [[ ! -e $venv/stamp || $wanted -nt $venv/stamp ]]; then
    mkdir -p build/referee && "$python" -m venv --clear "$venv"
    if ! { scripts/thrice.sh "what $wanted names" "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes -r "$wanted" &&
      "$venv/bin/python" -W ignore -c 'import fastapi, uvicorn'; } >"build/referee/$release.log" 2>&1; then
      cat "build/referee/$release.log" >&2
      lacking+=("$release")
      continue
    fi
    touch "$venv/stamp"
  fi
  have+=("$venv/bin/python")
done
for release in "${lacking[@]}"; do
  printf '%s\n' "############" "## the router before the $release FastAPI: NOT RUN: pip could not install scripts/requirements-fastapi-$release.txt for $("$python" -V)" \
    "## Let pip reach a package index (PIP_INDEX_URL), and take a Python from 3.11 to 3.13." "############" >&2
done
# A package that all three need, of pure Python: whoever can fetch it reaches the index.
reachable() {
  timeout 120 "$venv/bin/pip" download --quiet --disable-pip-version-check --no-cache-dir --no-deps --only-binary=:all: --dest build/referee/reached h11==0.16.0 >/dev/null 2>&1
}
if ((${#have[@]} == 0)); then
  if reachable; then
    echo "referee: pip reaches its index, but none of the three releases could be installed, so that nothing was tried; what pip said stands above" >&2
    exit 1
  fi
  exit 0
fi
timeout --kill-after 10 300 "$python" scripts/referee/referee.py "$kvconn" "${have[@]}" "${@:3}" || {
  status=$?
  ((status != 124)) || echo "referee: not done after 300 s" >&2
  exit $status
}
