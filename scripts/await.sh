# Sourced by scripts that start machines: `await COMMAND…` runs a command, or a function, and gives its status; whatever
# ends the script ends the command with all that it started. A shell hears a signal only between commands and in `wait`,
# so the command runs in the background, in a process group of its own. What a script starts beside such commands it names in other.
set -m
child= other=
trap end_all EXIT
trap 'exit 130' INT; trap 'exit 143' TERM; trap 'exit 129' HUP

end_all() {
  local each
  for each in $child $other; do
    kill -- "-$each" 2>/dev/null || true
    wait "$each" 2>/dev/null || true
  done
}

await() {
  local rc=0
  "$@" </dev/null &
  child=$!
  wait "$child" || rc=$?
  child=
  return $rc
}

# The machine, which ends also when this script is killed outright.
rxe_vm() { await setpriv --pdeathsig TERM scripts/rxe-vm "$@"; }

# Downloads what the machine needs, once. Where that cannot be had it says NOT RUN, loudly, and the script ends well.
rxe_prepare() { # NAME LOG
  local rc=0
  rxe_vm --prepare 2>"$2" || rc=$?
  if ((rc == 69)); then
    printf '%s\n' "############" "## $1: NOT RUN: $(tail -1 "$2")" "############" >&2
    exit 0
  fi
  ((rc == 0)) || { cat "$2" >&2; echo "$1: the machine cannot be prepared (status $rc)" >&2; exit 1; }
}
