#!/usr/bin/env bash
# The modules that the library or its tools link and that are behind their newest release, for
# whoever raises them; no such module is an error. The known holes of modules need a database that not
# every network has: where it answers, govulncheck is asked too. A hole is told and is no error: else a commit that has
# passed would fail from the day on which a hole is published.
# GOVULNDB names another database (https:// or file://).
set -euo pipefail
cd "$(dirname "$0")/.."
govulncheck=v1.9.0 db=${GOVULNDB:-https://vuln.go.dev}
if list=$(timeout 60 go list -m -u -f '{{with .Update}}{{$.Path}} {{$.Version}} -> {{.Version}}{{end}}' all 2>/dev/null); then
  # Only what is compiled into a program counts.
  linked=$(go list -deps -f '{{with .Module}}{{.Path}}{{end}}' ./capi ./cmd/... | sort -u)
  while read -r module versions; do
    [[ -z $module ]] || ! grep -qxF "$module" <<<"$linked" || echo "outdated: $module $versions"
  done <<<"$list"
else
  echo "outdated: the module proxy cannot be reached, so no list"
fi
if ! curl --silent --fail --output /dev/null --max-time 10 "$db/index/modules.json"; then
  echo "outdated: the database of known holes cannot be reached at $db, so govulncheck was not run"
  exit 0
fi
mkdir -p build/govulncheck
if ! (cd build/govulncheck && GOFLAGS=-mod=mod GOBIN=$PWD timeout 300 go install "golang.org/x/vuln/cmd/govulncheck@$govulncheck") >build/govulncheck/log 2>&1; then
  cat build/govulncheck/log >&2
  echo "outdated: govulncheck $govulncheck could not be had, so known holes were not looked for"
  exit 0
fi
timeout 600 build/govulncheck/govulncheck -db "$db" ./capi/... ./cmd/... || echo "outdated: HOLES, or govulncheck failed (above): raise the modules that it names"
