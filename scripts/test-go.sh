#!/usr/bin/env bash
# Runs Go's tests by gotestsum, which prints a line for each package, and each failed test's output at the end. Up to three tests that
# fail run once more, alone, when all others have ended. After a data race, a panic or the time-out of a package nothing runs again.
#   scripts/test-go.sh NAME GO FLAGS… -- PACKAGES… [-args ARGUMENTS…]
# Where KVCONN_CHECK names a folder, all events are in its NAME.json, for scripts/digest.py.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?} go=${2:?} flags=() packages=()
shift 2
while [[ ${1:?} != -- ]]; do flags+=("$1"); shift; done
shift
while (($#)) && [[ $1 != -args ]]; do packages+=("$1"); shift; done
report=()
[[ -z ${KVCONN_CHECK:-} ]] || report=(--jsonfile "$KVCONN_CHECK/$name.json")
exec "$go" tool gotestsum --format pkgname --format-hide-empty-pkg --format-icons text --hide-summary skipped --rerun-fails=1 --rerun-fails-max-failures=3 \
  --rerun-fails-run-root-test --rerun-fails-abort-on-data-race --packages "${packages[*]}" "${report[@]}" -- "${flags[@]}" "$@"
