#!/usr/bin/env bash
# The tests of rdma/ on real queue pairs: built here, run in a machine that has them (scripts/rxe-vm).
#   scripts/rdma-test.sh [STAGE…]       all stages when none is named
# Where the machine's packages cannot be downloaded they are not run, loudly, and the status is 0.
#
# A stage NAME is build_NAME, which runs here (may be left out), and run_NAME, which runs in the guest, as root, in the
# root of the tree, with its output in $out/NAME.log; not 0 is a failure. In a stage of two guests run_NAME runs in both,
# with RXE_HOST 0 and 1. Only $out is written through to the host. All stages of one guest share one guest.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/rdma-test
one_guest=(go)
two_guests=()
bound=600 # seconds, for all stages of a machine, its start included

# ---- the stages ----

build_go() { # the test binary of each package below rdma/ that has tests
  local package dir
  ${GO:-go} list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}' ./rdma/... >$out/packages
  sed -i '/^$/d' $out/packages
  [[ -s $out/packages ]]
  while read -r package dir; do
    ${GO:-go} test -race -tags invariants -c -o "$out/bin/${package//\//_}.test" "$package"
  done <$out/packages
}
run_go() {
  local package dir failed=0 binary
  while read -r package dir; do
    binary=$PWD/$out/bin/${package//\//_}.test
    echo "== $package"
    (cd "$dir" && timeout -k 5 400 "$binary" -test.v -test.timeout 380s -test.fullpath) || failed=1
  done <$out/packages
  return $failed
}

# ---- in the guest ----

if [[ ${1:-} == --guest ]]; then
  shift
  failed=0
  for stage; do
    start=$EPOCHREALTIME log=$out/$stage${RXE_TWO_HOSTS:+.$RXE_HOST}.log
    set +e # where bash looks at a status itself, -e does not hold inside
    (set -e; "run_$stage") >"$log" 2>&1
    rc=$?
    set -e
    took=$(((${EPOCHREALTIME/./} - ${start/./}) / 100000))
    took=$((took / 10)).$((took % 10))
    if ((rc)); then
      failed=1
      cat "$log"
      grep -E '^ *--- FAIL|^panic: |DATA RACE' "$log" || true # once more, below all the rest
      echo "FAIL  $stage (status $rc, $took s)"
    else
      grep -E '^ *--- |^ok |^== ' "$log" || true
      echo "ok    $stage ($took s)"
    fi
  done
  exit $failed
fi

# ---- on the host ----

for stage; do
  [[ " ${one_guest[*]} ${two_guests[*]} " == *" $stage "* ]] || { echo "rdma-test: no stage $stage; there are: ${one_guest[*]} ${two_guests[*]}" >&2; exit 2; }
done
chosen() { # of a list, what the command line names
  local s
  for s in "${@:2}"; do [[ ! $1 || " $1 " == *" $s "* ]] && echo "$s"; done
  return 0
}
mapfile -t one < <(chosen "$*" "${one_guest[@]}")
mapfile -t two < <(chosen "$*" "${two_guests[@]}")

. scripts/await.sh
rm -rf $out && mkdir -p $out/bin
rxe_prepare "make rdma-test" $out/prepare.log
for stage in "${one[@]}" "${two[@]}"; do
  [[ $(type -t "build_$stage") != function ]] || await "build_$stage"
done
status=0
((${#one[@]} == 0)) || rxe_vm --share $out --timeout $bound -- scripts/rdma-test.sh --guest "${one[@]}" || status=$?
for stage in "${two[@]}"; do
  export RXE_TWO_HOSTS=1
  rxe_vm --two-hosts --share $out --timeout $bound "scripts/rdma-test.sh --guest $stage" "scripts/rdma-test.sh --guest $stage" || status=$?
done
echo "rdma-test: $([[ $status == 0 ]] && echo ok || echo "FAILED (status $status)"); logs in $out"
exit $status
