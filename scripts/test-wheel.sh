#!/usr/bin/env bash
# Installs the wheel, and nothing of this tree, into a clean environment of the
# given Python, by the commands of docs/quickstart-python.md as they stand, and runs
# the Python tests there; then imports it with the oldest other Python that is at hand.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:?} page=build/test-page clean=build/test-page/.venv-kv top=$PWD
wheel=$(ls dist/kvconn-*.whl)
.venv/bin/python scripts/check-wheel.py "$wheel"
.venv/bin/python -m pytest -q -p no:cacheprovider scripts/test_check_wheel.py
run_page() { (cd $page && "$python" "$top/scripts/run-page.py" "$top/docs/quickstart-python.md" "$@"); }
# The page begins in this tree, which the tests then do not see.
rm -rf $page build/test-wheel && mkdir $page && ln -s "$top"/* "$top/.venv" $page && ln -s test-page/.venv-kv build/test-wheel # by which others know it
PATH=$(dirname "$(command -v "$python")"):$PATH scripts/thrice.sh 'what docs/quickstart-python.md installs' bash -c "$(declare -f run_page); page=$page python=$python top=$top run_page Install"
find $page -maxdepth 1 -type l -delete
scripts/thrice.sh 'what scripts/requirements-test.txt names' $clean/bin/pip install --quiet --disable-pip-version-check --require-hashes -r scripts/requirements-test.txt
rm -rf $clean/tests && cp -r python/tests $clean/tests
double=$PWD/build/gpu-double/libkvgpu-double.so # without it the tests of device memory are not run, and say so
(cd $clean && env -u PYTHONPATH KVCONN_LIBCUDA="$double" PATH="$PWD/bin:$PATH" "$top/scripts/pytest-twice.sh" wheel bin/python tests "${PYTEST_ARGS[@]:--q}")
run_page Run --within 60 --says 'every byte is there' --says "(?s)code=0.*code=0"
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
