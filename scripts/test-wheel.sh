#!/usr/bin/env bash
# Installs the wheel, and nothing of this tree, into a clean environment of the
# given Python and runs the Python tests there; then imports it with the oldest
# other Python that is at hand.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?} clean=build/test-wheel
wheel=$(ls dist/kvconn-*.whl)
.venv/bin/python scripts/check-wheel.py "$wheel"
rm -rf $clean && "$python" -m venv $clean
$clean/bin/pip install --quiet --disable-pip-version-check "$wheel" pytest==8.4.2 'numpy<3'
rm -rf $clean/tests && cp -r python/tests $clean/tests
(cd $clean && env -u PYTHONPATH PATH="$PWD/bin:$PATH" bin/python -m pytest tests --ignore tests/test_vllm_connector.py -p no:cacheprovider "${PYTEST_ARGS[@]:--q}")
for old in python3.9 python3.10; do
  if command -v $old >/dev/null && $old -c 'import venv' 2>/dev/null; then
    rm -rf build/test-old && $old -m venv build/test-old
    build/test-old/bin/pip install --quiet --disable-pip-version-check "$wheel"
    build/test-old/bin/python -c 'import kvconn; a = kvconn.Agent({"engine_id": "old", "role": "decode"}); a.close(); print("imports and opens")'
    echo "the same wheel works on $($old -V)"
    break
  fi
done
