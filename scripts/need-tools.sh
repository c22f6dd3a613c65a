#!/usr/bin/env bash
# Checks what a build needs. A missing compiler is installed where that is
# allowed (root, or KVCONN_INSTALL=1 with sudo, on a system with apt-get);
# otherwise the one command that does it is named.
set -euo pipefail
go=${1:-go} python=${2:-python3}

missing=()
command -v cc >/dev/null && command -v readelf >/dev/null || missing+=(build-essential)
command -v "$python" >/dev/null || missing+=(python3)
command -v "$python" >/dev/null && ! "$python" -c 'import venv, ensurepip' 2>/dev/null && missing+=(python3-venv)
if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]} …"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
  else
    echo "missing: ${missing[*]}. Install them: sudo apt-get install -y ${missing[*]}" >&2
    exit 1
  fi
fi

want=$(sed -n 's/^go //p' go.mod)
have=$("$go" env GOVERSION 2>/dev/null | sed 's/^go//') || true
if [[ -z $have ]]; then
  echo "Go is missing. kvconn needs Go ${want} or newer: https://go.dev/doc/install" >&2
  exit 1
fi
if [[ $(printf '%s\n%s\n' "$want" "$have" | sort -V | head -1) != "$want" && $("$go" env GOTOOLCHAIN) == local ]]; then
  echo "Go $have is too old, kvconn needs $want or newer: https://go.dev/doc/install, or GOTOOLCHAIN=auto" >&2
  exit 1
fi
