#!/usr/bin/env bash
# What a machine with an NVIDIA GPU (compute capability 9.0) can say that others cannot. Runs from a build folder (make device)
# or from an unpacked bundle (make device-bundle) on a host that has only the driver, cuBLASLt and, where wanted, NCCL.
# Each part is a process of its own with a limit on its time; what one of them does not survive is told, and the next one runs.
# Writes one JSON report, which scripts/device_tables.py makes tables of. Under six minutes.
# Usage: tests/device_check.sh [--programs DIR] [--workers DIR] [--models DIR] [--out FILE] [--parts "A B ..."] [--tiny]
#   --programs: device_bench, device_tests, baton, baton-router; --workers: baton-prefill, baton-decode
#   --tiny: sizes for the emulated device, where the script itself is tested
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
if [ -d "$here/bin" ]; then programs=$here/bin; else programs=$here/build/device; fi
workers="" models=$here/tests/data/models out=device_report.json tiny=""
parts="info ceilings products attention probes parity ids handover model-4b-fp8 model-8b-fp8 model-8b-bf16"
while [ $# -gt 0 ]; do
  case $1 in
    --programs) programs=$2; shift ;;
    --workers) workers=$2; shift ;;
    --models) models=$2; shift ;;
    --out) out=$2; shift ;;
    --parts) parts=$2; shift ;;
    --tiny) tiny=--tiny ;;
    *) echo "device check: unknown argument $1"; exit 2 ;;
  esac
  shift
done
workers=${workers:-$programs}
if [ -z "$tiny" ] && ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
  echo "device check: no NVIDIA device on this machine; nothing was checked"
  exit 3
fi
work=$(mktemp -d)
children=()
cleanup() { for pid in ${children[@]+"${children[@]}"}; do kill "$pid" 2>/dev/null; done; wait 2>/dev/null; rm -rf "$work"; }
trap cleanup EXIT
results=$work/results
mkdir "$results"
seconds_max=${BATON_DEVICE_CHECK_SECONDS:-340} began=$(date +%s)

# part NAME SECONDS COMMAND...: the command writes $results/NAME.json.
part() {
  local name=$1 limit=$2 code left=$((seconds_max - ($(date +%s) - began)))
  shift 2
  if [ $left -lt 5 ]; then
    echo "{\"ok\": false, \"error\": \"no time was left\"}" >"$results/$name.json"
    return
  fi
  [ $limit -le $left ] || limit=$left
  echo "device check: $name"
  timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1
  code=$?
  if [ $code -ne 0 ]; then
    tail -n 5 "$work/$name.log"
    echo $code >"$results/$name.code"
  fi
}
bench() {  # NAME SECONDS PART [flags]
  local name=$1 limit=$2 which=$3
  shift 3
  part "$name" "$limit" "$programs/device_bench" --part="$which" --out="$results/$name.json" --models="$models" $tiny "$@"
}

# start NAME PROGRAM flags...: a process of the service; its gRPC port is in $work/NAME.port when it is there.
start() {
  local name=$1
  shift
  "$@" --listen=127.0.0.1:0 --http-port=0 --port-file="$work/$name.port" >"$work/$name.log" 2>&1 &
  children+=($!)
}
port_of() {
  for _ in $(seq 600); do
    if [ -s "$work/$1.port" ]; then sed -n 's/.*"grpc": *\([0-9]*\).*/\1/p' "$work/$1.port"; return; fi
    sleep 0.1
  done
}
ids_of() {  # ROUTER-PORT: what the model says, as JSON
  "$programs/baton" generate --address="127.0.0.1:$1" --prompt="In the beginning God created" --temperature=0 --max-tokens=24 \
    --ignore_eos=true --timeout=60s --json
}
# Two worker processes on one device: what is handed over must go on as what one worker computes by itself.
handover() {
  local model=$models/tiny-qwen3 flags="--device=cuda --weight-dtype=bf16 --num-blocks=40" answer alone
  start prefill "$workers/baton-prefill" --model="$model" $flags
  start decode "$workers/baton-decode" --model="$model" $flags
  start single "$workers/baton-decode" --model="$model" $flags
  start router "$programs/baton-router" --model="$model" --prefill="127.0.0.1:$(port_of prefill)" --decode="127.0.0.1:$(port_of decode)"
  start router1 "$programs/baton-router" --model="$model" --topology=single --decode="127.0.0.1:$(port_of single)"
  for _ in $(seq 100); do answer=$(ids_of "$(port_of router)" 2>>"$work/generate.log") && break; sleep 0.3; done
  for _ in $(seq 100); do alone=$(ids_of "$(port_of router1)" 2>>"$work/generate.log") && break; sleep 0.3; done
  local transport ok=false
  transport=$(sed -n 's/.*"kv_transport":"\([a-z_]*\)".*/\1/p' <<<"$answer")
  answer=$(ids <<<"$answer") alone=$(ids <<<"$alone")
  [ -n "$answer" ] && [ "$answer" = "$alone" ] && ok=true
  echo "{\"ok\": $ok, \"ids\": [$answer], \"ids_of_one_worker\": [$alone], \"transport\": \"$transport\"}" >"$results/handover.json"
  if [ $ok = false ]; then tail -n 3 "$work"/{prefill,decode,router,generate}.log; return 1; fi
}
ids() { tr -d '\n ' | sed -n 's/.*"token_ids":\[\([0-9,]*\)\].*/\1/p'; }

for name in $parts; do
  case $name in
    info) bench info 30 info ;;
    ceilings) bench ceilings 40 ceilings ;;
    products) bench products 60 products ;;
    attention) bench attention 30 attention ;;
    probes) bench probes 30 probes ;;
    parity) part parity 90 env BATON_TESTS_ROOT="${models%/tests/data/models}" "$programs/device_tests" --gtest_output="json:$results/parity.json" ;;
    ids) bench ids 60 ids ;;
    handover)
      echo "device check: handover"
      handover || echo 1 >"$results/handover.code" ;;
    model-*)
      IFS=- read -r _ size dtype <<<"$name"
      if [ -n "$tiny" ]; then shape=tiny; else shape=qwen3-$size; fi
      bench "$name" 75 model --shape=$shape --weight_dtype="$dtype" ;;
    *) echo "device check: unknown part $name"; echo 2 >"$results/$name.code" ;;
  esac
done
"$programs/device_bench" --merge="$results" --out="$out"
code=$?
echo "device check: $(($(date +%s) - began)) s, report in $out"
exit $code
