#!/usr/bin/env bash
# Builds the driver double: build/gpu-double/libkvgpu-double.so (CUDA 13), -12.so (CUDA 12.9) and -old.so (a driver of CUDA 12.2, without
# the calls of later ones); kvgpu-facts, the conformance program; libkvgpu-verbs.so, a libibverbs that registers the double's dma-bufs; and
# libkvgpu-engine.so, a preload by which an engine's memory is the double's. With --test it also runs their own tests, the double's under the
# address and the thread sanitizer.
# Without cuda.h it says NOT RUN and ends with 75.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/gpu-headers.sh
headers=$PWD/build/cuda-headers out=$PWD/build/gpu-double src=rig/testdouble/src facts=rig/conformance/program tests=rig/testdouble/test
mkdir -p "$out/fake"
exec 9>"$out/lock"
flock 9
flags=(-std=gnu11 -g -Wall -Wextra -Werror -Wmissing-prototypes -pthread)
build() { # NAME MAJOR FLAG…: to a name of its own first, since a process may have the old one open
  "${CC:-cc}" "${flags[@]}" -O2 -fPIC -shared -fvisibility=hidden -Wl,-soname,libkvgpu-double.so -isystem "$headers/$2" "${@:3}" "$src"/*.c -o "$out/$1.new"
  mv "$out/$1.new" "$out/$1"
}
if [[ ! -e $out/stamp || -n $(find rig/testdouble "$facts" cuda/internal/driver/copy.ptx scripts/gpu-double.sh "$headers/stamp" ! -name '*.go' -type f -newer "$out/stamp" -print -quit) ]]; then
  build libkvgpu-double-12.so 12
  build libkvgpu-double-old.so 12 -DKVGPU_OLD
  build libkvgpu-double.so 13
  "${CC:-cc}" "${flags[@]}" -O1 -isystem "$headers/13" $facts/*.c -o "$out/kvgpu-facts.new" -ldl
  mv "$out/kvgpu-facts.new" "$out/kvgpu-facts"
  library=("${CC:-cc}" "${flags[@]}" -O2 -fPIC -shared -fvisibility=hidden)
  "${library[@]}" -fvisibility=default -Wl,-soname,libibverbs.so.1,--version-script=$tests/verbs/fake.map $tests/verbs/fake.c -o "$out/fake/libibverbs.so.1"
  "${library[@]}" -Wl,-soname,libkvgpu-verbs.so,--version-script=rig/testdouble/verbs/dmabuf.map rig/testdouble/verbs/dmabuf.c \
    -Wl,--no-as-needed "$out/fake/libibverbs.so.1" -o "$out/libkvgpu-verbs.so" -ldl
  "${library[@]}" rig/testdouble/preload/engine.c -o "$out/libkvgpu-engine.so" -ldl
  "${CC:-cc}" "${flags[@]}" $tests/verbs/main.c -o "$out/test-verbs" -ldl
  touch "$out/stamp"
fi
[[ ${1:-} == --test ]] || exit 0
for sanitizer in address,undefined thread; do
  "${CC:-cc}" "${flags[@]}" -O1 -fsanitize=$sanitizer -fno-sanitize-recover=all -isystem "$headers/13" -I $src $src/*.c $tests/*.c -o "$out/test-${sanitizer%%,*}" -ldl
  KVGPU_LEAKS=exit timeout -k 5 120 "$out/test-${sanitizer%%,*}" || { echo "the double's tests failed under the ${sanitizer%%,*} sanitizer: $out/test-${sanitizer%%,*}" >&2; exit 1; }
done
LD_LIBRARY_PATH=$out/fake "$out/test-verbs" "$out/libkvgpu-verbs.so" "$out/libkvgpu-double.so"
LD_PRELOAD=$out/libkvgpu-engine.so KVGPU_ENGINE_LEAST=1000000 KVCONN_LIBCUDA=$out/libkvgpu-double.so "${PYTHON:-python3}" $tests/engine.py
