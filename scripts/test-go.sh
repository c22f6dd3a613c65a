#!/usr/bin/env bash
# Runs Go's tests by gotestsum, which prints a line for each package, and each failed test's output at the end. Up to three tests that
# fail run once more, alone, when all others have ended. After a data race, a panic or the time-out of a package nothing runs again.
#   scripts/test-go.sh GO FLAGS… -- PACKAGES…
# Where KVCONN_CHECK names a folder, all events are in its go.json, for scripts/digest.py.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${1:?} flags=()
shift
while [[ ${1:?} != -- ]]; do flags+=("$1"); shift; done
shift
report=()
[[ -z ${KVCONN_CHECK:-} ]] || report=(--jsonfile "$KVCONN_CHECK/go.json")
exec "$go" tool gotestsum --format pkgname --format-hide-empty-pkg --format-icons text --hide-summary skipped --rerun-fails=1 --rerun-fails-max-failures=3 \
  --rerun-fails-run-root-test --rerun-fails-abort-on-data-race --packages "$*" "${report[@]}" -- "${flags[@]}"
