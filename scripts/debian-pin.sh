#!/usr/bin/env bash
# Prints packages as apt-get takes them, one a line: NAME=VERSION with the version of scripts/debian-versions.txt if apt's lists have
# it, and NAME if they have another; a line on stderr says then what was wanted and what is taken. A package that the file does not name
# is an error.
#   scripts/debian-pin.sh [OPTION OF APT…] -- PACKAGE…
set -uo pipefail
options=() versions=$(dirname "$0")/debian-versions.txt
while [[ ${1:?there is no -- before the packages} != -- ]]; do options+=("$1"); shift; done
shift
for name; do
  version=$(awk -v name="$name" '$1 == name {print $2}' "$versions")
  [[ $version ]] || { echo "debian-pin: $versions has no version of $name" >&2; exit 1; }
  mapfile -t has < <(apt-cache "${options[@]}" madison "$name" 2>/dev/null | awk -F ' *[|] *' '{print $2}')
  if [[ " ${has[*]} " == *" $version "* ]]; then
    echo "$name=$version"
  else
    echo "debian-pin: apt's lists have no $name $version, which $versions names; taken: ${has[0]:-what the archive has}" >&2
    echo "$name"
  fi
done
