#!/usr/bin/env bash
# Packs build/kvconn-gpu-kit.tar.gz: the conformance program, to be run by ./run on a machine with a GPU, without a network. It is tried
# on the driver double first, as it will be run. Without cuda.h it says NOT RUN and ends with 75.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/gpu-double.sh
name=kvconn-gpu-kit most=$((64 << 20))
kit=build/$name
rm -rf "$kit" "$kit.tar.gz" "$kit.tried"
mkdir -p "$kit" "$kit.tried"
cp build/gpu-double/kvgpu-facts cuda/conformance/kit/run cuda/conformance/kit/README "$kit/"
git rev-parse HEAD >"$kit/commit" 2>/dev/null || echo unknown >"$kit/commit"
tar -C build --sort=name --owner=0 --group=0 -czf "$kit.tar.gz" "$name"
size=$(stat -c %s "$kit.tar.gz")
((size < most)) || { echo "$kit.tar.gz has $size bytes, more than $most" >&2; exit 1; }
tar -C "$kit.tried" -xzf "$kit.tar.gz"
KVCONN_LIBCUDA=$PWD/build/gpu-double/libkvgpu-double.so "$kit.tried/$name/run" >"$kit.tried/log" || { cat "$kit.tried/log" >&2; exit 1; }
rm -rf "$kit.tried"
echo "$kit.tar.gz, $size bytes: unpack it on a machine with a GPU, and run ./run"
