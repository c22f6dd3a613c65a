# Sourced: finds or makes the environment with a real vLLM, puts the wheel of
# dist/ into it, and sets vllm_python; vllm_not_run says why there is none.
# shellcheck shell=bash
vllm_not_run='' vllm_status=0
vllm_python=$("${PYTHON:-python3}" e2e/setup_vllm.py "${1:?}" --wheel dist/kvconn-*.whl) || vllm_status=$?
case $vllm_status in
  0) PATH=$(dirname "$vllm_python"):$PATH && export PATH ;;
  75) vllm_not_run="the packages of a real vLLM could not be downloaded" ;;
  *) return 1 ;;
esac
