#!/usr/bin/env bash
# Installs the wheel, and nothing of this tree, into a clean environment of the
# given Python and runs the Python tests there; then imports it with the oldest
# other Python that is at hand.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?} clean=build/test-wheel top=$PWD
wheel=$(ls dist/kvconn-*.whl)
.venv/bin/python scripts/check-wheel.py "$wheel"
.venv/bin/python -m pytest -q -p no:cacheprovider scripts/test_check_wheel.py
rm -rf $clean && "$python" -m venv $clean
scripts/thrice.sh 'what scripts/requirements-test.txt names' $clean/bin/pip install --quiet --disable-pip-version-check --require-hashes -r scripts/requirements-test.txt
$clean/bin/pip install --quiet --disable-pip-version-check --no-index "$wheel" # it needs no other package
rm -rf $clean/tests && cp -r python/tests $clean/tests
double=$PWD/build/gpu-double/libkvgpu-double.so # without it the tests of device memory are not run, and say so
(cd $clean && env -u PYTHONPATH KVCONN_LIBCUDA="$double" PATH="$PWD/bin:$PATH" "$top/scripts/pytest-twice.sh" wheel bin/python tests "${PYTEST_ARGS[@]:--q}")
# docs/quickstart-python.md, as it stands, but for the environment that it makes.
rm -rf build/test-page && mkdir build/test-page && ln -s ../test-wheel build/test-page/kv
(cd build/test-page && "$python" "$top/scripts/run-page.py" "$top/docs/quickstart-python.md" Run --within 60 --says 'every byte is there' --says "(?s)code=0.*code=0")
# One wheel serves every CPython: the oldest and the newest that are at hand.
versions=${PYENV_ROOT:-$HOME/.pyenv}/versions
tried=0
for other in python3.9 "$versions"/3.9.*/bin/python python3.10 python3.13 "$versions"/3.13.*/bin/python python3.14; do
  if command -v "$other" >/dev/null && "$other" -c 'import venv, ensurepip' 2>/dev/null; then
    rm -rf build/test-other && "$other" -m venv build/test-other
    build/test-other/bin/pip install --quiet --disable-pip-version-check --no-index "$wheel"
    (cd build/test-other && bin/python -c 'import kvconn; a = kvconn.Agent({"engine_id": "other", "role": "decode"}); a.close()' && bin/kvconn demo >/dev/null)
    echo "the same wheel works on $("$other" -V)"
    tried=$((tried + 1))
  fi
done
[[ $tried -gt 0 ]] || echo "the wheel was tried on $("$python" -V) only: no other Python is at hand"
