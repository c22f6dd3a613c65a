#!/usr/bin/env bash
# Unpacks the real libcuda of Debian's archive (package libcuda1, component non-free) into build/gpu-driver, and prints its path. It is
# not installed, and apt's own lists are left alone. Where it cannot be had it says NOT RUN and ends with 75. A download that failed is not
# tried again for ten minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/build/gpu-driver
mkdir -p "$out"
exec 9>"$out/lock"
flock 9
found() { find "$out/unpacked" -name 'libcuda.so.[0-9]*.*' -type f 2>/dev/null | head -1; }
lack() {
  [[ ! -s $out/log ]] || tail -5 "$out/log" >&2
  printf '%s\n' "############" "## real libcuda: NOT RUN. $1" "## Lay a libcuda.so.* of any driver below $out/unpacked, or let apt-get reach Debian's archive." "############" >&2
  exit 75
}
if [[ -z $(found) ]]; then
  [[ -z $(find "$out/lacks" -mmin -10 2>/dev/null) ]] || lack "$(<"$out/lacks")"
  [[ $(uname -m) == x86_64 ]] || lack "it is looked for on x86-64 only"
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || lack "there is no apt-get: it comes from Debian's archive"
  read -r site release < <(apt-get indextargets --format '$(SITE) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null | awk '$3 == "main" && $2 !~ /security|updates|backports/ {print $1, $2; exit}') || true
  [[ -n ${release:-} ]] || lack "apt's sources name no release of Debian"
  mkdir -p "$out/lists/partial" "$out/cache/archives/partial"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $release non-free" >"$out/sources.list"
  options=(-q -o Acquire::Retries=3 -o Dir::Etc::SourceList="$out/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$out/lists" -o Dir::Cache="$out/cache" -o APT::Sandbox::User=root)
  pin=$PWD/scripts/debian-pin.sh
  download() { cd "$out" && timeout 120 apt-get "${options[@]}" update && timeout 120 apt-get "${options[@]}" download "$("$pin" "${options[@]}" -- libcuda1)"; }
  (download) >"$out/log" 2>&1 || { echo "apt-get could not download libcuda1 of $release" >"$out/lacks"; lack "$(<"$out/lacks")"; }
  grep '^debian-pin: ' "$out/log" >&2 || : # another version than scripts/debian-versions.txt names
  dpkg -x "$out"/libcuda1_*.deb "$out/unpacked"
  rm -rf "$out"/libcuda1_*.deb "$out/lists" "$out/cache"
  [[ -n $(found) ]] || lack "the package libcuda1 has no libcuda"
fi
found
