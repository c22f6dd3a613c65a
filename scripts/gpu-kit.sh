#!/usr/bin/env bash
# Packs build/kvconn-gpu-kit.tar.gz: what is to be run by ./run on a machine with a GPU, without a network. It is tried on the driver
# double first, as it will be run, and where no driver is found; and its transport suite on a build of kvconn that has a defect. Without
# cuda.h it says NOT RUN and ends with 75.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/gpu-double.sh
make --no-print-directory lib cmd licenses
"${PYTHON:-python3}" scripts/check-faults.py build/libkvconn.so build/kvconn
name=kvconn-gpu-kit most=$((64 << 20))
kit=build/$name double=$PWD/build/gpu-double/libkvgpu-double.so
rm -rf "$kit" "$kit.tar.gz" "$kit.tried"
mkdir -p "$kit/python/kvconn" "$kit.tried/bin"
suite() { "${GO:-go}" build -trimpath -buildvcs=false -ldflags '-s -w' "$@" ./rig/conformance/suite; }
suite -o "$kit/kvgpu-suite"
cp build/gpu-double/kvgpu-facts build/kvconn rig/conformance/kit/{run,README,transfers.py,caches.py,environment.py,steps.py,offers.py} LICENSE "$kit/"
cp python/kvconn/*.py build/libkvconn.so "$kit/python/kvconn/"
cp -r licenses "$kit/"
git rev-parse HEAD >"$kit/commit" 2>/dev/null || echo unknown >"$kit/commit"
glibc=$(grep -aohE 'GLIBC_2\.[0-9]+' "$kit"/kv* "$kit"/python/kvconn/*.so | sort -uV | tail -1)
echo "Linux on $(uname -m), with glibc ${glibc#GLIBC_} or newer" >"$kit/needs"
tar -C build --sort=name --owner=0 --group=0 -czf "$kit.tar.gz" "$name"
size=$(stat -c %s "$kit.tar.gz")
((size < most)) || { echo "$kit.tar.gz has $size bytes, more than $most" >&2; exit 1; }
tar -C "$kit.tried" -xzf "$kit.tar.gz"
tried=$PWD/$kit.tried/$name log=$kit.tried/log
# The environment of a bare machine: no Go, no compiler, neither this tree's Python nor its library.
for tool in bash cat cp dirname env getconf grep mktemp rm timeout uname; do ln -s "$(command -v $tool)" "$kit.tried/bin/"; done
python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
try() { env -i PATH="$PWD/$kit.tried/bin" PYTHON="$python" KVCONN_LIBCUDA="$1" "${@:2}" "$tried/run" >"$log" 2>&1; }
try "$double" || { cat "$log" >&2; exit 1; }
"$python" - "$tried/kvconn-gpu.json" "$log" <<'PY'
import json, sys

said = json.load(open(sys.argv[1]))
assert said["facts"]["double"] and len(said["facts"]["facts"]) > 250 and said["speed"]["two_processes"], "facts or speed"
assert said["facts"]["not_ended"] == [], said["facts"]["not_ended"]
assert len(said["doctor"]["gpu"]["devices"]) == 2, said["doctor"]
several, one = said["transfers"], said["one_connection"]
for of in several, one:
    assert len(of["cases"]) > 20 and all(case["ok"] for case in of["cases"]), of
assert [case["case"] for case in one["cases"]] == [case["case"] for case in several["cases"]] and one["connections"] == "1" != several["connections"]
# A stream that stands still holds up a load where the device has one connection, and nowhere else.
assert [[case["held_up"] for case in of["cases"] if "held_up" in case] for of in (several, one)] == [[False] * 2, [True] * 2], (several, one)
here = said["environment"]
assert not any("error" in here[topic] for topic in ("mps", "mig", "confidential_computing", "numa")), here
assert {question.split(":")[0] for question in here["not_asked"]} >= {"MPS", "MIG", "confidential computing"}, here
assert len(here["numa"]["nodes"]) > 1 and here["numa"]["gpu_node"] is not None or any(q.startswith("NUMA") for q in here["not_asked"]), here
assert here["numa"]["ring_nodes"] or any("ring's pages" in question for question in here["not_asked"]), here
runs = {by: [run for run in said["suite"]["runs"] if run["transport"] == by] for by in ("tcp", "local", "rdma")}
assert [len(of) for of in runs.values()] == [6, 4, 6] and said["suite"]["double"] and said["suite"]["double_only"], said["suite"]
for run in runs["tcp"] + runs["local"]:
    assert run["verdict"] == "passed" and len(run["cases"]) > 40 and all(case["ok"] for case in run["cases"]), run
for run in runs["rdma"]:
    assert run["verdict"] == "passed" or run["verdict"] == "not run" and run["reason"], run
# What was not run is said, and once more at the end.
skipped = [f"{name}: {reason}" for of in (several, one) for name, reason in of["not_run"].items()]
skipped += [f"a decode step beside loads: {said['steps']['not_run']}"] if "not_run" in said["steps"] else []
skipped += [f"{run['transport']}, {run['memory']}: {run['reason'].splitlines()[0]}" for run in runs["rdma"] if run["verdict"] == "not run"]
log = open(sys.argv[2]).read()
assert skipped and all(log.count(f"NOT RUN: {of}\n") == 2 for of in skipped), (skipped, log)
assert all(log.count(f"NOT ASKED: {question}: {reason}\n") == 2 for question, reason in here["not_asked"].items()), (here, log)
PY
# A machine that has all of it: the double says that MPS is in use, an nvidia-smi of our own that the GPU is divided and confidential, and a
# folder in the place of /sys that there are two nodes. So each question is asked.
cat >"$kit.tried/bin/nvidia-smi" <<'SMI'
#!/usr/bin/env bash
case "$*" in
  -L) printf '%s\n' 'GPU 0: a GPU (UUID: GPU-0)' '  MIG 1g.5gb     Device  0: (UUID: MIG-0)' '  MIG 1g.5gb     Device  1: (UUID: MIG-1)' ;;
  'conf-compute -f') echo 'CC status: ON' ;;
  *) exit 1 ;;
esac
SMI
chmod +x "$kit.tried/bin/nvidia-smi"
env -i PATH="$PWD/$kit.tried/bin" PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$tried:$tried/python" KVCONN_LIBCUDA="$double" KVGPU_ATTRIBUTES=133=1 "$python" - "$kit.tried" 2>"$log" <<'PY' || { cat "$log" >&2; exit 1; }
import os, pathlib, sys

import environment as e

sys_at = pathlib.Path(sys.argv[1]).resolve() / "sys"
driver, asked = e.Driver(0), e.Asked()
nodes, cpu = sys_at / "devices/system/node", min(os.sched_getaffinity(0))
for node in 0, 1:
    (nodes / f"node{node}").mkdir(parents=True)
    (nodes / f"node{node}/cpulist").write_text(f"{cpu}\n")
(nodes / "online").write_text("0-1\n")
(sys_at / "bus/pci/devices/0000:17:00.0").mkdir(parents=True)
(sys_at / "bus/pci/devices/0000:17:00.0/numa_node").write_text("1\n")
mps, mig, cc, numa = e.mps(driver, asked), e.mig(driver, asked), e.confidential(driver, asked), e.numa(driver, asked, str(sys_at))
assert mps["in_use"] and mps["after_another_client_s_fault"] == 0, mps
two = mig["between_two"] # the double opens no memory of a device that is not visible
assert mig["instances"] == ["MIG-0", "MIG-1"] and two["wrong_blocks"] == 0 and two["reason"] == "it went by tcp, not by local", mig
assert cc["on"] and cc["answers"], cc
assert numa["gpu_node"] == 1 and numa["nodes"] == [0, 1] and all(of["two_processes"] for of in numa["speed"].values()) and len(numa["speed"]) == 2, numa
assert set(asked.not_asked) <= {e.RING_NODE}, asked.not_asked
assert numa["ring_nodes"] or e.RING_NODE in asked.not_asked, numa
maps = "7f00 default anon=3 N0=1 N1=2 kernelpagesize_kB=4\n8000 default file=/dev/nvidiactl\n"
assert [e.nodes_by_maps(at, maps)[0] for at in (0x7f10, 0x8000, 0x10)] == [[0, 1], [], []] and e.numbers("0-2,7\n") == [0, 1, 2, 7]
PY
# Bytes that are sent and told before they were copied are found, and the other cases and runs go on.
suite -tags faults -o "$kit.tried/suite-faults"
status=0
KVCONN_FAULT=gpu-report-early KVCONN_LIBCUDA=$double "$kit.tried/suite-faults" -only tcp -cases '^(ordered|expect twice)$' >"$kit.tried/faults.json" 2>"$log" || status=$?
"$python" - "$kit.tried/faults.json" $status <<'PY' || { cat "$log" >&2; exit 1; }
import json, sys

runs = json.load(open(sys.argv[1]))["runs"]
assert len(runs) == 6 and all(len(run["cases"]) == 2 for run in runs), runs
assert sys.argv[2] == "1" and any(run["verdict"] == "failed" for run in runs), (sys.argv[2], runs)
for run in runs:
    bad = [case for case in run["cases"] if not case["ok"]]
    assert (run["verdict"] == "failed") == bool(bad) and all("memory differs" in case["reason"] for case in bad), run
PY
for missing in "$PWD/build/no-such-driver.so:no CUDA driver was found" "$double:the driver finds no GPU"; do
  status=0
  try "${missing%%:*}" CUDA_VISIBLE_DEVICES=-1 || status=$?
  ((status == 2)) && grep -q "NOT RUN: ${missing#*:}" "$log" || { echo "without a GPU it ended with $status, and said:" >&2; cat "$log" >&2; exit 1; }
done
rm -rf "$kit.tried"
echo "$kit.tar.gz, $size bytes: unpack it on a machine with a GPU, and run ./run"
