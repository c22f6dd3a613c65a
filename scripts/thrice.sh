#!/usr/bin/env bash
# Runs a command that downloads, up to three times: an index or a mirror may fail once. When the last try fails, it says what could
# not be had, and ends with the command's status. Waits 5 s, then 15 s between the tries.
#   scripts/thrice.sh WHAT COMMAND…
set -uo pipefail
what=${1:?} status=0
for pause in 5 15 0; do
  "${@:2}" && exit 0
  status=$?
  ((pause == 0)) || { echo "$what: status $status; once more in $pause s" >&2; sleep "$pause"; }
done
echo "$what could not be downloaded in three tries; the status of the last is $status" >&2
exit $status
