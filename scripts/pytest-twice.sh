#!/usr/bin/env bash
# Runs pytest. If at most three tests fail, they run once more, alone, when all others have ended; those that pass then are told as
# FLAKY, and the status is 0. An interruption, an error of pytest's own, a fourth failure and a Python that died under its tests are
# failures at once.
#   scripts/pytest-twice.sh NAME PYTHON PYTEST_ARGUMENTS…       NAME is that of a folder in build/, for what pytest remembers
set -euo pipefail
cache=$(cd "$(dirname "$0")/.." && pwd)/build/pytest-$1 python=$2
shift 2
rm -rf "$cache" && mkdir -p "${cache%/*}"
status=0
"$python" -m pytest --durations=15 "$@" -o cache_dir="$cache" 2>&1 | tee "$cache.log" || status=$?
# A process that runs files has died: of what, no second run would say.
! grep -qE "worker 'gw[0-9]+' crashed|replacing crashed worker|node down" "$cache.log" || exit 1
((status == 1)) || exit $status
failed=$("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$cache/v/cache/lastfailed")
((count = $(wc -l <<<"$failed"), count <= 3)) || exit 1
printf '\n== once more: %s\n' "${failed//$'\n'/ }"
alone=()
[[ " $* " != *" --dist "* ]] || alone=(-n 0)
"$python" -m pytest "$@" "${alone[@]}" -o cache_dir="$cache" --last-failed --last-failed-no-failures none || exit
while read -r test; do echo "FLAKY $test"; done <<<"$failed"
