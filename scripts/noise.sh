#!/usr/bin/env bash
# Runs a package's tests as on a machine that others use: beside processes that burn the CPU, and with all of the tests' processes
# stopped for up to 1.8 s and continued, about every three seconds. A test that fails here and nowhere else is judged by time, or
# has found what a slow machine has.
#   scripts/noise.sh PACKAGE [-test.run '^TestX$' -test.count 5 …]      HOGS=4, STALLS=yes, RACE=yes and SEED=1 are the defaults
set -euo pipefail
cd "$(dirname "$0")/.."
package=${1:?} go=${GO:-go} hogs=()
shift
RANDOM=${SEED:=1}
program=$PWD/build/noise/${package//[^a-z0-9]/-}.test
mkdir -p build/noise
race=(-race)
[[ ${RACE:=yes} == yes ]] || race=()
"$go" test -c "${race[@]}" -tags invariants -o "$program" "$package"
cd "$("$go" list -f '{{.Dir}}' "$package")"
for ((i = 0; i < ${HOGS:=4}; i++)); do
  (while :; do :; done) &
  hogs+=($!)
done
setsid "$program" -test.timeout 30m "$@" & # a session of its own, by which its processes are found
session=$!
cleanup() {
  kill "${hogs[@]}" 2>/dev/null || true
  mapfile -t all < <(members)
  ((${#all[@]} == 0)) || kill -KILL "${all[@]}" 2>/dev/null || true
}
members() { # of the session; a name in parentheses may hold blanks
  local stat fields
  for stat in /proc/[0-9]*/stat; do
    read -r fields 2>/dev/null <"$stat" || continue
    read -r _ _ _ of _ <<<"${fields##*) }"
    [[ $of != "$session" ]] || echo "${stat//[^0-9]/}"
  done
}
trap cleanup EXIT
echo "noise: $package beside ${#hogs[@]} processes, stalls: ${STALLS:=yes}, SEED=$SEED" >&2
while [[ $STALLS == yes ]] && kill -0 "$session" 2>/dev/null; do
  sleep "$((RANDOM % 4 + 1)).$((RANDOM % 10))"
  mapfile -t all < <(members)
  ((${#all[@]})) || break
  kill -STOP "${all[@]}" 2>/dev/null || true
  sleep "$((RANDOM % 2)).$((RANDOM % 8 + 1))"
  kill -CONT "${all[@]}" 2>/dev/null || true
done
wait "$session"
