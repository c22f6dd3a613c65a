#!/usr/bin/env bash
# The connector's tests and the real pair on several releases of vLLM, each in an
# environment of its own (6 GB), and a table of what came of it. A run of all goes
# into docs/versions.md.
#   scripts/vllm-versions.sh VENV [VERSION…]     the newest three by default
#   FROM=tree scripts/vllm-versions.sh …         no wheel: python/ and build/libkvconn.so as they are
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 all=$(($# == 1)) && shift
(($#)) || set -- 0.32.0 0.31.0 0.30.0
if [[ ${FROM:-wheel} == tree ]]; then
  export PYTHONPATH=$PWD/python KVCONN_LIBRARY=$PWD/build/libkvconn.so
  wheel=()
else
  wheel=(--wheel dist/kvconn-*.whl)
fi
newest=$(sed -n 's/^VLLM = "\([0-9.]*\)".*/\1/p' e2e/setup_vllm.py)
out=build/vllm-versions
mkdir -p $out
table=$out/table.md
printf '%s\n' '| vLLM | torch | connector’s tests | real pair | seconds |' '|---|---|---|---|---|' >$table
status=0

count() { # of a JUnit file: what passed, failed and was skipped
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
    echo "| $version | | not run | not run | |" >>$table
    continue
  fi
  torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))')
  start=$SECONDS
  for part in connector pair; do
    tests=e2e
    [[ $part == pair ]] || tests='python/tests/test_vllm_connector.py python/tests/test_vllm_scheduler.py python/tests/test_vllm_stats.py'
    rm -f $out/$version-$part.xml
    PATH=$(dirname "$python"):$PATH timeout -k 10 2400 "$python" -m pytest $tests -p no:cacheprovider -q \
      --junit-xml $out/$version-$part.xml >$out/$version-$part.log 2>&1 || {
      status=1
      tail -n 40 $out/$version-$part.log
    }
  done
  echo "| $version | $torch | $(count $out/$version-connector.xml) | $(count $out/$version-pair.xml) | $((SECONDS - start)) |" >>$table
done
cat $table
if ((all)); then
  {
    printf '%s\n' '# vLLM releases' '' "What \`make e2e-versions\` came to, $(date -u +%F), on $(nproc) cores without a GPU: the tests of the connector beside the" \
      'release, and real servers under `e2e/`. A release lacks what it lacks by looking, never by its number.' ''
    cat $table
  } >docs/versions.md
fi
exit $status
