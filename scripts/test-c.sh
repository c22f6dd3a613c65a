#!/usr/bin/env bash
# The C contract: the header alone compiles as C and C++, the example moves
# blocks between two processes, the library exports kvconn_* and nothing else,
# needs libc only and has no fault point; calls in a forked child and with bad arguments fail with
# a code, and no panic reaches the host; what is installed has its licences with it.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/test-c
rm -rf $out && mkdir -p $out
lib=build/libkvconn.so
warn=(-Wall -Wextra -Werror -pedantic)

cp $lib $out/libkvconn.so.0 && ln -s libkvconn.so.0 $out/libkvconn.so
link=(-I include -L $out -lkvconn "-Wl,-rpath,$PWD/$out")
passed=0 failed=0
case_() { # name, command …
  local name=$1; shift
  if "$@" >"$out/log" 2>&1; then passed=$((passed + 1)); echo "ok    $name"; else failed=$((failed + 1)); echo "FAIL  $name"; sed 's/^/      /' "$out/log"; fi
}
exports() {
  nm -D --defined-only $lib | awk '$2 ~ /[TDBRW]/ {print $3}' | sed 's/@.*//' | sort >"$out/have"
  grep -oE '\bkvconn_[a-z_]+\(' include/kvconn.h | tr -d '(' | sort -u >"$out/want"
  diff "$out/want" "$out/have"
}
needs() { [[ $(readelf -d $lib | grep -c NEEDED) == 1 ]] && readelf -d $lib | grep -q 'NEEDED.*libc.so.6'; }
soname() { readelf -d $lib | grep -q 'SONAME.*libkvconn.so.0'; }
panics() {
  ${GO:-go} build -trimpath -buildvcs=false -tags panictest -buildmode=c-shared -o $out/panic/libkvconn.so.0 \
    -ldflags '-s -w -extldflags "-Wl,--version-script='"$PWD"'/capi/exports.map -Wl,-soname,libkvconn.so.0"' ./capi
  LD_LIBRARY_PATH=$out/panic $out/test_panic
}
installs() {
  local to=$PWD/$out/installed doc=$PWD/$out/installed/usr/share/doc/kvconn
  mkdir -p "$doc/licenses/example.org/gone" && touch "$doc/licenses/example.org/gone/LICENSE"
  DESTDIR=$to PREFIX=/usr scripts/install.sh || return 1
  [[ -n $(find licenses -type f) ]] || { echo "licenses/ is empty"; return 1; }
  cmp LICENSE "$doc/LICENSE" && diff -r licenses "$doc/licenses" && cmp include/kvconn.h "$to/usr/include/kvconn.h" || return 1
}
# As docs/quickstart-c.md says, with what was installed and nothing of this tree but the example.
builds_installed() {
  local flags
  flags=$(PKG_CONFIG_PATH=$PWD/$out/installed/usr/lib/pkgconfig pkg-config --cflags --libs "kvconn = $(sed -n 's/^#define KVCONN_VERSION "\([^"]*\)".*/\1/p' include/kvconn.h)") || return 1
  cc -std=gnu99 "${warn[@]}" examples/c/move_blocks.c $flags -o $out/move_blocks_installed || return 1
  LD_LIBRARY_PATH=$out/installed/usr/lib timeout 60 $out/move_blocks_installed
}

case_ "exports are those of kvconn.h" exports
case_ "needs libc only" needs
case_ "has no fault point" "${PYTHON:-python3}" scripts/check-faults.py $lib
case_ "has its soname" soname
case_ "docs/quickstart-go.md, as it stands" "${PYTHON:-python3}" scripts/run-page.py docs/quickstart-go.md '' --says '--- PASS: Example'
case_ "example compiles as C" cc -std=gnu99 "${warn[@]}" examples/c/move_blocks.c "${link[@]}" -o $out/move_blocks
case_ "example compiles as C++" c++ -std=c++17 "${warn[@]}" -x c++ examples/c/move_blocks.c "${link[@]}" -o $out/move_blocks_cpp
case_ "example moves blocks (C)" timeout 60 $out/move_blocks
case_ "example moves blocks (C++)" timeout 60 $out/move_blocks_cpp
case_ "contract test compiles" cc -std=gnu11 "${warn[@]}" capi/test/contract.c "${link[@]}" -lpthread -o $out/contract
case_ "contract" timeout 120 $out/contract
case_ "geometry test compiles" cc -std=gnu11 "${warn[@]}" capi/test/geometry.c "${link[@]}" -o $out/geometry
case_ "geometry" timeout 120 $out/geometry
case_ "memory test compiles" cc -std=gnu11 "${warn[@]}" capi/test/memory.c "${link[@]}" -o $out/memory
case_ "memory" timeout 120 $out/memory
case_ "device memory test compiles" cc -std=gnu11 "${warn[@]}" capi/test/device.c "${link[@]}" -ldl -o $out/device
double=0
scripts/gpu-double.sh || double=$?
if ((double == 75)); then
  printf '%s\n' "############" "## an engine in C over device memory: NOT RUN, since there is no cuda.h" "############" >&2
else
  case_ "device memory that sleeps and wakes" timeout 120 env KVCONN_LIBCUDA="$PWD/build/gpu-double/libkvgpu-double.so" $out/device
fi
case_ "marks test compiles" cc -std=gnu11 "${warn[@]}" -I include capi/test/slots.c capi/slots.c -lpthread -o $out/slots
case_ "marks" timeout 60 $out/slots
case_ "panic test compiles" cc -std=gnu11 "${warn[@]}" capi/test/panic.c -I include -L $out -lkvconn -o $out/test_panic
case_ "no panic reaches the host" panics
case_ "is installed with its licences" installs
if command -v pkg-config >/dev/null; then
  case_ "docs/quickstart-c.md, as it stands" "${PYTHON:-python3}" scripts/run-page.py docs/quickstart-c.md 'Build and run the example' --says '5 blocks, 327680 bytes by local in .* ms, every byte verified'
  case_ "a program builds by pkg-config with what is installed, and runs" builds_installed
else
  printf '%s\n' "############" "## docs/quickstart-c.md and a program that builds by pkg-config: NOT RUN: there is no pkg-config" "############" >&2
fi
echo "$passed passed, $failed failed"
[[ $failed == 0 ]]
