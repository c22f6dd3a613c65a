#!/usr/bin/env bash
# Holds rdma/internal/verbs/abi.h against libibverbs' own headers: the installed ones, or those of Debian's package, which is
# unpacked into build/ and not installed. Without headers it says NOT RUN and ends with 75: nothing was compared.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/build/verbs-abi
headers=${KVCONN_VERBS_HEADERS:-/usr/include}
if [[ ! -e $headers/infiniband/verbs.h ]]; then
  headers=$out/unpacked/usr/include
  rm -rf "$out" && mkdir -p "$out"
  pin=$PWD/scripts/debian-pin.sh
  download() { apt-get download -qq -o Acquire::Retries=3 "$("$pin" -- libibverbs-dev)"; }
  fetch() { cd "$out" && { download || { apt-get update -qq -o Acquire::Retries=3 && download; }; } && dpkg -x libibverbs-dev_*.deb unpacked; }
  if ! (fetch) 2>"$out/log" || [[ ! -e $headers/infiniband/verbs.h ]]; then
    cat "$out/log" >&2
    printf '%s\n' "############" "## verbs-abi: NOT RUN. There is no infiniband/verbs.h, and apt-get could not download libibverbs-dev (as root: apt-get update)." \
      "## Install it, or name a folder that has infiniband/verbs.h in KVCONN_VERBS_HEADERS." "############" >&2
    exit 75
  fi
  { grep '^debian-pin: ' "$out/log" || :; } | sort -u >&2 # another version than scripts/debian-versions.txt names
fi
KVCONN_VERBS_HEADERS=$headers "${GO:-go}" test -count=1 -run '^TestABI$' ./rdma/internal/verbs
echo "verbs-abi: ok, against $headers"
