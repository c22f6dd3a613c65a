# Sourced: finds or makes the environment with a real SGLang, puts the wheel of
# dist/ into it, and sets sglang_python; sglang_not_run says why there is none.
# More arguments go to e2e/setup_sglang.py.
# shellcheck shell=bash
sglang_not_run='' sglang_status=0
sglang_python=$("${PYTHON:-python3}" e2e/setup_sglang.py "${1:?}" --wheel dist/kvconn-*.whl "${@:2}") || sglang_status=$?
case $sglang_status in
  0) PATH=$(dirname "$sglang_python"):$PATH && export PATH ;;
  75) sglang_not_run="the packages of a real SGLang could not be downloaded" ;;
  *) return 1 ;;
esac
