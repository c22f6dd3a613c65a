#!/usr/bin/env bash
# The connector's tests and real servers on several releases of vLLM, each in an
# environment of its own (6 GB). What came of it goes into docs/versions.md: a run
# in pieces adds to what earlier ones have left in build/vllm-versions.
#   scripts/vllm-versions.sh VENV [VERSION…]     the newest three by default
#   PARTS='connector pair' …                     of connector, pair, kinds, ranks
#   FROM=tree …                                  no wheel: python/ and build/libkvconn.so as they are
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 && shift
known=(0.32.0 0.31.0 0.30.0)
(($#)) || set -- "${known[@]}"
declare -A tests=(
  [connector]='python/tests/test_vllm_*.py'
  [pair]='e2e/test_pair.py e2e/test_pair_ends.py' [kinds]=e2e/test_kinds.py [ranks]=e2e/test_ranks.py
)
PARTS=${PARTS:-connector pair kinds ranks}
export KVCONN_E2E_RANKS=${KVCONN_E2E_RANKS:-1to2 2to1 2to2 mla2to1 dp2}
if [[ ${FROM:-wheel} == tree ]]; then
  export PYTHONPATH=$PWD/python KVCONN_LIBRARY=$PWD/build/libkvconn.so
  wheel=()
else
  wheel=(--wheel dist/kvconn-*.whl)
fi
newest=$(sed -n 's/^VLLM = "\([0-9.]*\)".*/\1/p' e2e/setup_vllm.py)
out=build/vllm-versions
mkdir -p $out
status=0

count() { # of a JUnit file: what passed, failed and was skipped
  [[ -e $1 ]] || { echo 'not run' && return; }
  "${PYTHON:-python3}" - "$1" <<'PYTHON'
import sys, xml.etree.ElementTree as tree
try:
    n = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in tree.parse(sys.argv[1]).getroot().iter("testsuite"):
        for key in n:
            n[key] += int(suite.get(key, 0))
    bad = n["failures"] + n["errors"]
    print(f"{n['tests'] - bad - n['skipped']} passed" + (f", {bad} failed" if bad else "") + (f", {n['skipped']} skipped" if n["skipped"] else ""))
except (OSError, tree.ParseError):
    print("did not run to the end")
PYTHON
}

for version; do
  where=$venv-$version
  [[ $version != "$newest" ]] || where=$venv
  setup=0
  python=$("${PYTHON:-python3}" e2e/setup_vllm.py "$where" --fresh --vllm "$version" "${wheel[@]}") || setup=$?
  if ((setup)); then
    printf '%s\n' "############" "## make e2e-versions: vLLM $version NOT RUN: it could not be set up (status $setup)" "############" >&2
    ((setup == 75)) || status=1
    continue
  fi
  "$python" -c 'import importlib.metadata as m; print(m.version("torch"))' >$out/$version-torch
  for part in $PARTS; do
    result=$out/$version-$part.xml
    echo '<unfinished' >"$result"
    # shellcheck disable=SC2086 # the parts' files are patterns
    PATH=$(dirname "$python"):$PATH timeout -k 10 2400 "$python" -m pytest ${tests[$part]} -p no:cacheprovider -q \
      --junit-xml "$result" >$out/$version-$part.log 2>&1 || {
      status=1
      tail -n 40 $out/$version-$part.log
    }
  done
done

{
  printf '%s\n' '# vLLM releases' '' "These are the results of \`make e2e-versions\` of $(date -u +%F), on $(nproc) cores without a GPU. The column \"connector\" has the connector's tests," \
    "which run beside the release's own scheduler. The columns \"pair\", \"kinds\" (of caches) and \"ranks\" have the tests with real servers (\`e2e/\`)." \
    "The connector finds out what a release lacks by looking at the release's code, and never by the release's number." '' \
    '| vLLM | torch | connector | pair | kinds | ranks |' '|---|---|---|---|---|---|'
  for version in "${known[@]}"; do
    row="| $version | $(cat $out/$version-torch 2>/dev/null || echo) |"
    for part in connector pair kinds ranks; do row+=" $(count $out/$version-$part.xml) |"; done
    echo "$row"
  done
} | tee docs/versions.md
exit $status
