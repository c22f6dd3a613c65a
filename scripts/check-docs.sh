#!/usr/bin/env bash
# The pages as a site, build/_site, every link checked twice (Go passes over names that begin with _): scripts/check-docs.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3} venv=.venv-docs
"$python" scripts/check-docs.py --copy build/_docs
if ! cmp -s docs/requirements.txt "$venv/installed"; then
  "$python" -m venv --clear "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r docs/requirements.txt
  cp docs/requirements.txt "$venv/installed"
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --quiet --strict --clean
echo "docs: build/_site/index.html"
