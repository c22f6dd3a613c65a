#!/usr/bin/env bash
# What a change costs: TCP throughput of this tree against a build of another commit, alternating in one run.
#   scripts/bench-against.sh REF [ROUNDS] [BLOCK]
set -euo pipefail
cd "$(dirname "$0")/.."
ref=${1:?usage: bench-against.sh REF [ROUNDS] [BLOCK]} rounds=${2:-15} block=${3:-16K}
dir=$(mktemp -d)
trap 'git worktree remove --force "$dir/tree" >/dev/null 2>&1; git worktree prune; rm -rf "$dir"' EXIT
git worktree add --quiet --detach "$dir/tree" "$ref"
(cd "$dir/tree" && go build -trimpath -buildvcs=false -buildmode=pie -ldflags '-s -w' -o "$dir/before" ./cmd/kvconn)
go build -trimpath -buildvcs=false -buildmode=pie -ldflags '-s -w' -o "$dir/after" ./cmd/kvconn
for ((i = 0; i < rounds; i++)); do
  # The order alternates too, so that neither always runs on the warmer machine.
  order=(before after)
  ((i % 2)) && order=(after before)
  for which in "${order[@]}"; do
    "$dir/$which" bench --transport tcp --json --iperf3=false --block "$block" --rounds 9 2>/dev/null >"$dir/$which.json"
    echo "$which $(python3 -c 'import json,sys; r=json.load(open(sys.argv[1]))["results"][0]; print(r["median_gb_per_s"], r["best_gb_per_s"])' "$dir/$which.json")"
  done
done | tee "$dir/log" | sed 's/^/  /'
python3 - "$dir/log" "$ref" "$block" <<'PY'
import statistics as s, sys
runs = [line.split() for line in open(sys.argv[1])]
median = {w: [float(m) for k, m, _ in runs if k == w] for w in ("before", "after")}
best = {w: max(float(b) for k, _, b in runs if k == w) for w in ("before", "after")}
pairs = sorted(a / b for b, a in zip(median["before"], median["after"]))
half = len(pairs) // 4
print(f"blocks of {sys.argv[3]}, {len(pairs)} pairs: GB/s {s.median(median['before']):.2f} at {sys.argv[2]}, {s.median(median['after']):.2f} here; "
      f"ratio of pairs: median {s.median(pairs):.3f}, middle half {pairs[half]:.3f} to {pairs[-1 - half]:.3f}; of the best {best['after'] / best['before']:.3f}")
PY
