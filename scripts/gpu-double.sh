#!/usr/bin/env bash
# Builds the driver double: build/gpu-double/libkvgpu-double.so (CUDA 13), -12.so (CUDA 12.9) and -old.so (a driver of CUDA 12.2, without
# the calls of later ones). With --test it also runs the double's own tests under the address and the thread sanitizer.
# Without cuda.h it says NOT RUN and ends with 75.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/gpu-headers.sh
headers=$PWD/build/cuda-headers out=$PWD/build/gpu-double src=cuda/testdouble/src
mkdir -p "$out"
exec 9>"$out/lock"
flock 9
flags=(-std=gnu11 -g -Wall -Wextra -Werror -Wmissing-prototypes -pthread)
build() { # NAME MAJOR FLAG…: to a name of its own first, since a process may have the old one open
  "${CC:-cc}" "${flags[@]}" -O2 -fPIC -shared -fvisibility=hidden -Wl,-soname,libkvgpu-double.so -isystem "$headers/$2" "${@:3}" "$src"/*.c -o "$out/$1.new"
  mv "$out/$1.new" "$out/$1"
}
if [[ ! -e $out/stamp || -n $(find "$src" scripts/gpu-double.sh "$headers/stamp" -newer "$out/stamp" -print -quit) ]]; then
  build libkvgpu-double-12.so 12
  build libkvgpu-double-old.so 12 -DKVGPU_OLD
  build libkvgpu-double.so 13
  touch "$out/stamp"
fi
[[ ${1:-} == --test ]] || exit 0
for sanitizer in address,undefined thread; do
  "${CC:-cc}" "${flags[@]}" -O1 -fsanitize=$sanitizer -fno-sanitize-recover=all -isystem "$headers/13" -I $src $src/*.c cuda/testdouble/test/*.c -o "$out/test-${sanitizer%%,*}" -ldl
  KVGPU_LEAKS=exit timeout -k 5 120 "$out/test-${sanitizer%%,*}" || { echo "the double's tests failed under the ${sanitizer%%,*} sanitizer: $out/test-${sanitizer%%,*}" >&2; exit 1; }
done
