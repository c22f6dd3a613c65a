#!/usr/bin/env bash
# Installs the library, its header and kvconn.pc under PREFIX (DESTDIR honoured), and under PREFIX/share/doc/kvconn the licences of
# all that the library has in it.
set -euo pipefail
cd "$(dirname "$0")/.."
to=${DESTDIR:-}${PREFIX:?}
for made in build/libkvconn.so licenses/go/LICENSE; do
  [[ -f $made ]] || { echo "there is no $made: run make lib first" >&2; exit 1; }
done
version=$(sed -n 's/^#define KVCONN_VERSION "\([^"]*\)".*/\1/p' include/kvconn.h)
install -d "$to/lib/pkgconfig" "$to/include"
install -m 755 build/libkvconn.so "$to/lib/libkvconn.so.$version"
ln -sf "libkvconn.so.$version" "$to/lib/libkvconn.so.0"
ln -sf libkvconn.so.0 "$to/lib/libkvconn.so"
install -m 644 include/kvconn.h "$to/include/kvconn.h"
doc=$to/share/doc/kvconn
rm -rf "$doc/licenses" # of modules that an earlier version had
install -D -m 644 LICENSE "$doc/LICENSE"
(cd licenses && find . -type f -print0) | while IFS= read -r -d '' file; do install -D -m 644 "licenses/$file" "$doc/licenses/$file"; done
cat >"$to/lib/pkgconfig/kvconn.pc" <<PC
prefix=\${pcfiledir}/../..
Name: kvconn
Description: carries KV caches between LLM engines
Version: $version
Cflags: -I\${prefix}/include
Libs: -L\${prefix}/lib -lkvconn
PC
if [[ -z ${DESTDIR:-} ]] && command -v ldconfig >/dev/null; then
  if [[ $(id -u) == 0 ]]; then ldconfig; else echo "for programs to find it: sudo ldconfig, or LD_LIBRARY_PATH=$to/lib"; fi
fi
echo "installed libkvconn $version under $to"
