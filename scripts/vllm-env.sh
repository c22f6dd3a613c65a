# Sourced: finds or makes the environment with a real vLLM, puts the wheel of
# dist/ into it, and sets vllm_python; vllm_not_run says why there is none.
vllm_venv=${1:?}
status=0
"${PYTHON:-python3}" e2e/setup_vllm.py "$vllm_venv" || status=$?
case $status in
  0) ;;
  75) vllm_not_run="the packages of a real vLLM could not be downloaded" ;;
  *) return 1 ;;
esac
if [[ ! ${vllm_not_run:-} ]]; then
  vllm_python=$vllm_venv/bin/python
  # A vLLM of the active environment is used as it is.
  [[ -x $vllm_python ]] || vllm_python=$(command -v python3)
  "$vllm_python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps dist/kvconn-*.whl
  "$vllm_python" -c 'import pytest' 2>/dev/null || "$vllm_python" -m pip install --quiet --disable-pip-version-check pytest
  PATH=$(cd "$(dirname "$vllm_python")" && pwd):$PATH
  export PATH
fi
