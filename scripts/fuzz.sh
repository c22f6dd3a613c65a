#!/usr/bin/env bash
# fuzz.sh [TIME [PATTERN]]: every fuzz test for TIME (30s, 1m, 2h), one after
# the other, or those whose "package target" matches PATTERN. A failure does not
# end the round: the table at the end names it and the file of its input.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-1m} only=${2:-.}
go=${GO:-go}
[[ $time =~ ^([0-9]+)([smh])$ ]] || { echo "fuzz: TIME \"$time\": give a number with s, m or h, as 1m" >&2; exit 2; }
declare -A unit=([s]=1 [m]=60 [h]=3600)
# Beside the fuzzing itself: an instrumented build, and an input made smaller.
hard=$((BASH_REMATCH[1] * ${unit[${BASH_REMATCH[2]}]} + 400))

out=$(mktemp -d)
job=
stop() { [[ -z $job ]] || kill "$job" 2>/dev/null || true; rm -rf "$out"; }
trap stop EXIT
trap 'exit 130' INT TERM

grep -rlE --include='*_test.go' --exclude-dir='.venv*' '^func Fuzz' . | xargs -n1 dirname | sort -u >"$out/packages"
failed=0
while read -r pkg; do
  if ! "$go" test -tags invariants -list '^Fuzz' "$pkg" >"$out/list" 2>&1 </dev/null; then
    cat "$out/list" >&2
    failed=$((failed + 1))
    continue
  fi
  sed -n "s|^\(Fuzz.*\)|$pkg \1|p" "$out/list"
done <"$out/packages" | { grep -E "$only" || true; } >"$out/targets"
[[ -s $out/targets ]] || { echo "fuzz: no fuzz test matches \"$only\"" >&2; exit 2; }
echo "fuzz: $(wc -l <"$out/targets") targets, $time each"

row="%-12s %-18s %12s %10s  %s\n"
# shellcheck disable=SC2059
printf "$row" package target executions new result | tee "$out/table"
while read -r pkg name; do
  timeout -k 10 "$hard" "$go" test -tags invariants -run '^$' -fuzz "^$name\$" -fuzztime "$time" -fuzzminimizetime 10s \
    -parallel 2 "$pkg" >"$out/log" 2>&1 </dev/null &
  job=$! rc=0
  wait "$job" || rc=$?
  job=
  # The last word on progress: "fuzz: elapsed: 3s, execs: 10 (3/sec), new interesting: 2 (total: 9)".
  execs=$(sed -n 's/.*execs: \([0-9]*\).*/\1/p' "$out/log" | tail -1)
  new=$(sed -n 's/.*new interesting: \([0-9]*\).*/\1/p' "$out/log" | tail -1)
  result=ok
  if ((rc)); then
    failed=$((failed + 1)) result=FAILED
    ((rc != 124 && rc != 137)) || result="FAILED: it hung for ${hard}s"
    input=$(sed -n 's|.*Failing input written to \(.*\)|\1|p' "$out/log" | tail -1)
    [[ -n $input ]] || input=$(sed -n 's|^ *--- FAIL: .*/\([^ ]*\) (.*|testdata/fuzz/'"$name"'/\1|p' "$out/log" | tail -1)
    [[ -z $input ]] || result+=": $pkg/$input"
  elif [[ -z $execs || $execs == 0 ]]; then
    failed=$((failed + 1)) result="FAILED: nothing was executed"
  fi
  # shellcheck disable=SC2059
  printf "$row" "${pkg#./}" "$name" "${execs:-0}" "${new:-0}" "$result" | tee -a "$out/table"
  [[ $result == ok ]] || sed 's/^/    /' "$out/log" >&2
done <"$out/targets"
((failed == 0)) || { printf '\n'; grep -E 'result$|FAILED' "$out/table"; echo "fuzz: $failed packages or targets failed" >&2; exit 1; }
echo "fuzz: ok"
