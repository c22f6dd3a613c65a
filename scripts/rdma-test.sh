#!/usr/bin/env bash
# The tests of rdma/ on real queue pairs: built here, run in a machine that has them (scripts/rxe-vm).
#   scripts/rdma-test.sh [STAGE…]       when none is named all but signals and race, the long forms of parts of go
# Where the machine's packages cannot be downloaded they are not run, loudly, and the status is 0.
#
# A stage NAME is build_NAME, which runs here (may be left out), and run_NAME, which runs in the guest, as root, in the
# root of the tree, with its output in $out/NAME.log; not 0 is a failure. In a stage of two guests run_NAME runs in both,
# with RXE_HOST 0 and 1. Only $out is written through to the host. The stages of a list below share a machine, one after the
# other. The two machines with one guest each run side by side, since the stages wait for a third of their time.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/rdma-test module=github.com/kvconn/kvconn
one_guest=(go yama python signals race)
neighbours=(gpu agents)
unless_named='signals race' # are left out
two_guests=(hosts)
bound=3000 # seconds, for all stages of a machine, its start included: it ends a hang, as the bounds of each step do

# ---- the stages ----

# In the short form; without what is slow, needs no device, and runs in `make test`. The race detector has two cores emulate several
# times as much. So what takes longest runs without it: of the conformance suite it has the part on plans. Stage race has the same with the race detector.
elsewhere='TestPretouch|TestSendQueueRandom|TestABI'
unraced='^(TestSignalFaults|TestProcesses|TestPartialLanes|TestWritesOfManyPieces|TestManyPiecesOnADevice)$|^TestConformance$/_queue_pairs$'
build_plain() {
  build_runner
  [[ -x $out/bin/plain.test ]] || ${GO:-go} test -tags invariants -c -o $out/bin/plain.test ./rdma
}
build_go() { # the test binary of each package below rdma/ that has tests
  local package dir
  build_runner
  ${GO:-go} list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Dir}}{{end}}' ./rdma/... >$out/packages
  sed -i '/^$/d' $out/packages
  [[ -s $out/packages ]]
  while read -r package dir; do
    ${GO:-go} test -race -tags invariants -c -o "$out/bin/${package//\//_}.test" "$package"
  done <$out/packages
  build_plain
}
run_go() {
  local failed=0
  raced "^($elsewhere)\$|$unraced" || failed=1
  plain 860 -test.short -test.skip '^TestSignalFaults$' -test.run "$unraced" || failed=1
  all_signals -test.short || failed=1
  return $failed
}
raced() { # the tests of all packages, without some
  local package dir failed=0
  while read -r package dir; do
    tested 1760 "$package" "$dir" "$PWD/$out/bin/${package//\//_}.test" -test.short -test.skip "$1" || failed=1
  done <$out/packages
  return $failed
}
plain() { # SECONDS FLAG…
  tested "$1" "$module/rdma" rdma "$PWD/$out/bin/plain.test" "${@:2}"
}
build_runner() {
  [[ -x $out/bin/gotestsum ]] || ${GO:-go} build -o $out/bin/gotestsum gotest.tools/gotestsum
  [[ -x $out/bin/test2json ]] || ${GO:-go} build -o $out/bin/test2json cmd/test2json
}
# SECONDS PACKAGE FOLDER BINARY FLAG…: runs a package's tests in its folder. Up to three that fail run once more, when the others of the binary
# have ended, by the runner of scripts/test-go.sh. That takes output that begins with "panic: " for a binary that died under its tests, and so
# for nothing to run again. What `go test -json` would say is in $out/*.events, one file for each call.
tested() {
  local rc=0 events bin=$PWD/$out/bin
  local told='"$@"; rc=$?; ((rc < 2)) || printf "\npanic: the test binary has ended with status %d\n" $rc; exit $rc'
  events=$(mktemp)
  echo "== $2"
  (cd "$3" && timeout -k 5 $((2 * $1 + 40)) "$bin/gotestsum" --format standard-verbose --hide-summary skipped --rerun-fails=1 \
    --rerun-fails-max-failures=3 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race --jsonfile "$events" \
    --raw-command -- "$bin/test2json" -t -p "$2" bash -c "$told" - "$4" -test.v=test2json -test.timeout "$1s" -test.fullpath "${@:5}") || rc=$?
  cp "$events" "$(mktemp "$out/${stage}.XXXXXX.events")"
  rm "$events"
  return $rc
}
build_race() { build_go; }
run_race() { raced "^($elsewhere|TestSignalFaults)\$"; }

# Regions in device memory: of the driver double, whose dma-bufs a libibverbs of the tests' own registers with Soft-RoCE. The
# second binary has defects, of which a test must find each. Where cuda.h cannot be had the stage says NOT RUN.
build_gpu() {
  local rc=0
  scripts/gpu-double.sh || rc=$?
  rm -f $out/gpu.missing
  ((rc != 75)) || { touch $out/gpu.missing; return 0; }
  ((rc == 0)) || return $rc
  build_plain
  ${GO:-go} test -tags faults -c -o $out/bin/gpu-faults.test ./rdma
  ${GO:-go} build -tags invariants -o $out/bin/kvgpu-suite ./rig/conformance/suite
  build_rig
}
run_gpu() {
  local failed=0 doubles=$PWD/build/gpu-double
  [[ ! -e $out/gpu.missing ]] || { echo "--- SKIP: gpu NOT RUN: the driver double needs cuda.h"; return 0; }
  export KVGPU_DOUBLES=$doubles
  gpu_tests '^TestGPU(Refused|Inspect)$' || failed=1 # the kernel's own answer
  export KVCONN_LIBIBVERBS=$doubles/libkvgpu-verbs.so KVCONN_DEFECTS=$PWD/$out/bin/gpu-faults.test
  gpu_tests '^TestGPU/^device_to_device$' || failed=1
  gpu_tests '^TestGPUThatHalts$' || failed=1
  gpu_tests '^TestGPUSuite$/^(host_to_device|device_to_host|mixed|first_device_to_second|two_devices_in_each)$/^(ordered|scattered|odd_sizes|strides|bit_by_bit|several_peers|revoke_during|loss)' || failed=1
  gpu_tests '^TestGPUProcesses$' || failed=1
  kit_suite 'rdma, mapped by handles' '^(ordered|revoke during write)$' || failed=1
  KVCONN_LIBCUDA=$doubles/libkvgpu-double.so chaos --transport rdma --memory double --parts faults --kinds SIGKILL,SIGSTOP --faults 4 || failed=1
  return $failed
}
gpu_tests() { plain 860 -test.run "$1"; }

# The GPU kit's program, which fills and reads the memory by the driver's own copies.
kit_suite() {
  KVCONN_LIBCUDA=$doubles/libkvgpu-double.so timeout -k 5 240 $out/bin/kvgpu-suite -only "$1" -cases "$2" >$out/suite.json || return 1
  grep -q '"verdict": "passed"' $out/suite.json || { echo "--- FAIL: kvgpu-suite was not run"; return 1; }
}

# Each signal, lost, late and doubled, the first of its kind and the second. The race detector would make five minutes of it.
build_signals() { build_plain; }
run_signals() { all_signals; }
all_signals() { # by two processes, since they wait most of the time; stage go runs the short form
  local failed=0 first
  signal_faults 'hello|ports|connect|connected' "$@" >$out/signals.first.log 2>&1 &
  first=$!
  signal_faults 'lost|drain|drained|bye|dismissed' "$@" || failed=1
  wait $first || failed=1
  cat $out/signals.first.log
  return $failed
}
signal_faults() { plain 560 "${@:2}" -test.run "^TestSignalFaults\$/^($1)_"; }

# The test rig, with the invariants on. Not with the race detector: it would have two cores emulate ten times as much.
build_rig() { [[ -x $out/bin/kvconn-rig ]] || ${GO:-go} build -tags invariants -trimpath -buildvcs=false -buildmode=pie -o $out/bin/kvconn-rig ./cmd/kvconn-rig; }
chaos() { timeout -k 5 480 $out/bin/kvconn-rig chaos --short --paths "$RXE_PATHS" --path-command rxe-link "$@"; }

# Whole agents under load: processes killed and stopped, the control plane broken, paths taken off; then what becomes of
# transfers whose paths are lost, with tcp to go on by, and of those that lose all without it. Stage hosts loses one after the other
# without it.
build_agents() { build_rig; }
run_agents() {
  local failed=0
  chaos --transport rdma --parts faults,all-paths --faults 20 || failed=1
  chaos --transport rdma,tcp --parts paths || failed=1
  return $failed
}

# The C library under Python, in two processes.
build_python() { "${MAKE:-make}" --no-print-directory -s lib GO="${GO:-go}"; }
run_python() { PYTHONPATH=python KVCONN_LIBRARY=$PWD/build/libkvconn.so timeout -k 5 360 python3 scripts/rdma-python.py; }

# The transport `local` under a kernel that has Yama, as a user without privileges. Root reads whom it likes in mode 1 and 2.
build_yama() {
  build_runner
  ${GO:-go} test -tags invariants -c -o $out/bin/local.test ./local
}
run_yama() {
  local failed=0 mode scope=/proc/sys/kernel/yama/ptrace_scope binary
  binary=$(mktemp -d)/local.test
  install -m 755 $out/bin/local.test "$binary" && chmod 755 "${binary%/*}"
  for mode in 1 2; do
    echo $mode >$scope
    tested 200 "$module/local" local "$binary" -test.run '^TestYamaOfTheKernel$' || failed=1
  done
  echo 1 >$scope
  (cd /tmp && timeout -k 5 480 setpriv --reuid 65534 --regid 65534 --clear-groups "$binary" -test.v -test.timeout 440s -test.fullpath -test.run '^TestProcesses$/^local$/^(between_processes|sender_killed|receiver_killed)$') || failed=1
  echo 0 >$scope
  return $failed
}

# P in host 0, D in host 1, which are joined by paths that are cut and that swallow what they are given, and by a link of
# their own for the control plane. Then the pair has tcp to go on by, and all paths are cut.
build_hosts() { build_rig; }
run_hosts() {
  local failed=0 transport parts port=7000
  for transport in rdma auto; do
    [[ $transport == rdma ]] && parts=paths || parts=all-paths
    if ((RXE_HOST == 0)); then
      chaos --transport $transport --parts $parts --host "$RXE_CTL_IP" --decode-at "$RXE_PEER_CTL_IP:$port" || failed=1
    else
      timeout -k 5 520 $out/bin/kvconn-rig engine "$RXE_CTL_IP:$port" || failed=1
    fi
    port=$((port + 1))
  done
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
      grep -E '^ *--- FAIL|^panic: |DATA RACE|^PROBLEM: |^kvconn-rig |Error: ' "$log" || true # once more, below all the rest
      echo "FAIL  $stage (status $rc, $took s)" | tee "$log.failed"
    else
      grep -E '^ *--- (FAIL|SKIP)|^--- PASS: .*\([^0]|^ok|^== |measured: |^(OK: |(all-)?paths  |loads that |SIG|(load|offer) .*cancelled)' "$log" || true
      echo "ok    $stage ($took s)"
    fi
  done
  exit $failed
fi

# ---- on the host ----

for stage; do
  all="${one_guest[*]} ${neighbours[*]} ${two_guests[*]}"
  [[ " $all " == *" $stage "* ]] || { echo "rdma-test: no stage $stage; there are: $all" >&2; exit 2; }
done
chosen() { # of a list, what the command line names
  local s
  for s in "${@:2}"; do [[ ! $1 && " $unless_named " != *" $s "* || " $1 " == *" $s "* ]] && echo "$s"; done
  return 0
}
mapfile -t one < <(chosen "$*" "${one_guest[@]}")
mapfile -t more < <(chosen "$*" "${neighbours[@]}")
mapfile -t two < <(chosen "$*" "${two_guests[@]}")

. scripts/await.sh
rm -rf $out && mkdir -p $out/bin
rxe_prepare "make rdma-test" $out/prepare.log
for stage in "${one[@]}" "${more[@]}" "${two[@]}"; do
  [[ $(type -t "build_$stage") != function ]] || await "build_$stage"
done
# A machine may die under the tests (125): its kernel has panicked, with memory that Soft-RoCE had corrupted and with a flags
# register that the emulator had. That is told, with the kernel's last words above, and is no result: its stages have one
# more machine, unless one had failed before. Of two machines with a path between them, rxe-vm ends the other one at once.
machine() { # STAGES ARGUMENT…
  local rc=0 stage
  rxe_vm --share $out --timeout $bound "${@:2}" || rc=$?
  ((rc == 125)) || return $rc
  for stage in $1; do
    ! compgen -G "$out/$stage.*failed" >/dev/null || return $rc
  done
  printf '%s\n' "############" "## rdma-test: THE EMULATED MACHINE OF $1 DIED; once more" "############" >&2
  rxe_vm --share $out --timeout $bound "${@:2}"
}
alone() { (($# == 0)) || machine "$*" -- scripts/rdma-test.sh --guest "$@"; }
# It ends with this script, also when that is killed outright.
beside() {
  local rc=0 me=$BASHPID watch state
  { # a process that has ended and for which nobody waits is a zombie
    while read -r _ _ state _ </proc/$$/stat && [[ $state != Z ]]; do sleep 1; done 2>/dev/null
    kill -- -$me
  } &
  watch=$!
  alone "$@" || rc=$?
  kill $watch 2>/dev/null || true
  return $rc
}
status=0
if ((${#one[@]} && ${#more[@]})); then
  trap 'end_all; [[ ! $other ]] || cat $out/beside.out' EXIT
  beside "${more[@]}" >$out/beside.out 2>&1 &
  other=$!
  alone "${one[@]}" || status=$?
  wait $other || status=$?
  cat $out/beside.out
  other=
else
  alone "${one[@]}" "${more[@]}" || status=$?
fi
for stage in "${two[@]}"; do # one processor each: P and D are beside each other all the same, and no lock's holder is left without a core
  export RXE_TWO_HOSTS=1
  machine "$stage" --cpus 1 --two-hosts "scripts/rdma-test.sh --guest $stage" "scripts/rdma-test.sh --guest $stage" || status=$?
done
cat $out/*.failed 2>/dev/null || true # once more, at the end
[[ -z ${KVCONN_CHECK:-} ]] || ! compgen -G "$out/*.events" >/dev/null || sed -s '$G' $out/*.events >"$KVCONN_CHECK/rdma-test.json" # an empty line after each
echo "rdma-test: $([[ $status == 0 ]] && echo ok || echo "FAILED (status $status)"); logs in $out"
exit $status
