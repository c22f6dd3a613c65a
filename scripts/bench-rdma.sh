#!/usr/bin/env bash
# RDMA writes beside ib_write_bw of the same size and depth, in one guest (scripts/rxe-vm). The figures are the emulator's:
# only the ratios mean anything.
#   scripts/bench-rdma.sh [--pairs N] [--depth N] [--sizes 4K,16K,64K,1M] [--mb N] [SIDE]
# Each pair runs both sides, the order alternates, and the ratio is the median of the pairs' ratios. SIDE is what is
# compared: a function bw_SIDE below, kvconn unless given; perftest is ib_write_bw against itself, which shows the noise;
# register is something else, the time that registering memory takes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/bench-rdma
pairs=5 depth=128 sizes=4K,16K,64K,1M mb=64 side=kvconn
bad() { echo "bench-rdma: $*; usage: bench-rdma.sh [--pairs N] [--depth N] [--sizes 4K,64K] [--mb N] [SIDE]" >&2; exit 2; }
guest=
while (($#)); do
  case $1 in
    --guest) guest=1; shift;;
    --pairs|--depth|--mb) [[ ${2:-} =~ ^[1-9][0-9]{0,4}$ ]] || bad "$1 takes a number"; declare "${1#--}=$2"; shift 2;;
    --sizes) [[ ${2:-} =~ ^[0-9]+[KM]?(,[0-9]+[KM]?)*$ ]] || bad "$1 takes sizes"; sizes=$2; shift 2;;
    -*) bad "no option $1";;
    *) side=$1; shift;;
  esac
done

# ---- the sides: MB/s (10^6 bytes) of writes of SIZE bytes, TOTAL bytes in all, at most DEPTH outstanding ----

bw_perftest() { # SIZE TOTAL DEPTH
  local n=$(($2 / $1)) port=18515 server bw
  ((n >= $3)) || n=$3 # perftest fills its queue
  local options=(-d rxe0 -x 1 -s "$1" -n "$n" -t "$3" -p $port -F)
  timeout 120 ib_write_bw "${options[@]}" >"$tmp/server" 2>&1 &
  server=$!
  until grep -qi " [0-9A-F]*:$(printf %04X $port) [0-9A-F]*:0000 0A" /proc/net/tcp /proc/net/tcp6; do # it listens
    kill -0 $server 2>/dev/null || { cat "$tmp/server" >&2; return 1; }
    read -rt 0.05 <> <(:) || true
  done
  timeout 120 ib_write_bw "${options[@]}" "$RXE_IP" >"$tmp/client" 2>&1 || { cat "$tmp/server" "$tmp/client" >&2; return 1; }
  wait $server
  bw=$(awk -v size="$1" '$1 == size && NF >= 5 { print $4 * 1.048576 }' "$tmp/client") # its MB are 2^20
  [[ $bw ]] || { cat "$tmp/client" >&2; return 1; }
  echo "$bw"
}

bw_kvconn() { kvconn_bench "$@" scattered; } # blocks of SIZE, scattered on both sides
bw_adjacent() { kvconn_bench "$@" adjacent; } # blocks of SIZE that are merged

kvconn_bench() { # SIZE TOTAL DEPTH ORDER: whole loads, the control plane included
  local total=$(($2 / ($1 * 8) * $1 * 8))
  timeout 300 build/kvconn bench --transport rdma --order "$4" --rdma-qps 1 --rdma-send-depth "$3" --block "$1" --total "$total" --rounds 4 --json |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["results"][0]["median_gb_per_s"] * 1000)'
}

[[ $side == register || $(type -t "bw_$side") == function ]] || bad "no side $side"
if [[ $guest ]]; then
  tmp=$(mktemp -d)
  for size in ${sizes//,/ }; do
    for ((i = 0; i < pairs; i++)); do
      sides=(perftest "$side") got=()
      for k in $((i % 2)) $((1 - i % 2)); do
        got[k]=$("bw_${sides[k]}" "$(numfmt --from=iec "$size")" $((mb * 1000000)) "$depth")
      done
      echo "pair $size ${got[0]} ${got[1]}"
    done
  done
  exit
fi

. scripts/await.sh
mkdir -p $out
if [[ $side == register ]]; then # from the opening of the library until 1, 2 and 4 GiB are registered
  rxe_prepare bench-rdma $out/prepare.log
  go test -c -o $out/rdma.test ./rdma
  rxe_vm --paths 1 --mem 9000 --share $out --timeout 600 -- $out/rdma.test -test.run '^$' -test.bench Open -test.benchtime 3x
  exit
fi
make -s cmd
rxe_prepare bench-rdma $out/prepare.log
rc=0
rxe_vm --paths 1 --share $out --timeout 1800 -- scripts/bench-rdma.sh --guest --pairs "$pairs" --depth "$depth" --sizes "$sizes" --mb "$mb" "$side" \
  >$out/pairs || rc=$?
((rc == 0)) || { cat $out/pairs >&2; echo "bench-rdma: failed (status $rc)" >&2; exit $rc; }
python3 - $out/pairs "$side" "$depth" <<'PY'
import statistics as s, sys

pairs = {}
for line in open(sys.argv[1]):
    word, *rest = line.split()
    if word == "pair":
        pairs.setdefault(rest[0], []).append((float(rest[1]), float(rest[2])))
side = sys.argv[2] if sys.argv[2] != "perftest" else "again"
print(f"{'size':>6} {'ib_write_bw':>12} {side:>12}   MB/s, medians; depth {sys.argv[3]}; ratio of pairs: median (least to most)")
for size, both in pairs.items():
    ratios = sorted(b / a for a, b in both)
    print(f"{size:>6} {s.median(a for a, _ in both):12.1f} {s.median(b for _, b in both):12.1f}   {s.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} pairs)")
PY
