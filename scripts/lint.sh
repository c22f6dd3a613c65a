#!/usr/bin/env bash
# gofmt, vet, staticcheck, ruff; generated code is up to date; no file is another project's or
# too long; docs name what there is; rdma's declarations are those of the package.
#   scripts/lint.sh VENV           all of it
#   scripts/lint.sh VENV --quick   what most changes break: the style, the pages, and the tests that hold pages and lists against the code
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?}
# Tests that fail when something was added and a page, list or table was not told.
LISTS='Page$|^TestList($|Is|Of)|DefectsList$|^TestFileDependencies|^TestFilesSayTheirIdea$|^TestImports|^TestNames$|^TestDecides|^TestProduct|^TestThreatModel$'

style() {
  mapfile -t files < <(find . -name '*.go' -type f -not -path './.venv*' -not -path './build/*' -not -path './licenses/*')
  ((${#files[@]})) || { echo "no Go file was found" >&2; exit 1; }
  bad=$("$(go env GOROOT)/bin/gofmt" -l "${files[@]}" </dev/null)
  [[ -z $bad ]] || { echo "gofmt would change: $bad" >&2; exit 1; }
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check . || { echo "run: ruff format ." >&2; exit 1; }
  go vet ./...
  go tool staticcheck ./...
}
pages() { for check in notices docs; do "$venv/bin/python" "scripts/check-$check.py"; done; }

style
if [[ ${2:-} == --quick ]]; then
  pages
  go test ./... -run "$LISTS" -timeout 300s | { grep -v 'no tests to run\|no test files' || :; }
  echo "quick: ok"
  exit
fi
before=$(sha256sum wire/wire_gen.go)
go generate ./wire
[[ $before == "$(sha256sum wire/wire_gen.go)" ]] || { echo "wire/wire_gen.go was not up to date: commit it" >&2; exit 1; }
"$venv/bin/python" -m pytest -q -p no:cacheprovider scripts/test_notices.py scripts/test_check_docs.py scripts/test_check_faults.py scripts/test_debian_pin.py scripts/test_digest.py scripts/test_e2e.py scripts/test_environment.py scripts/test_machines.py scripts/test_run_page.py
pages
scripts/verbs-abi.sh || { status=$?; ((status == 75)) || exit $status; } # 75: the headers cannot be had, and it says so
scripts/outdated.sh
echo "lint: ok"
