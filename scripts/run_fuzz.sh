#!/usr/bin/env bash
# Searches with libFuzzer (clang, address sanitizer) for inputs that crash the readers of untrusted data: each target in
# tests/fuzz for SECONDS, beginning from its committed corpus. New inputs go to BUILD_DIR/corpus, crashes to
# BUILD_DIR/crashes: a crash becomes a file of tests/fuzz/corpus, which every test run replays.
# Usage: scripts/run_fuzz.sh SECONDS BUILD_DIR [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=$1 build=$2
shift 2

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER=clang-14 -DCMAKE_CXX_COMPILER=clang++-14 \
  -DBATON_SANITIZE=address -DBATON_LIBFUZZER=ON >/dev/null
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=($(cd tests/fuzz && ls -- *_fuzz.cc | sed 's/_fuzz\.cc$//'))
ninja -C "$build" -j"$(nproc)" "${targets[@]/#/fuzz_}"

failed=()
for target in "${targets[@]}"; do
  mkdir -p "$build/corpus/$target" "$build/crashes/$target"
  echo "== $target: $seconds s"
  "$build/tests/fuzz_$target" -max_total_time="$seconds" -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 -verbosity=0 \
    -artifact_prefix="$build/crashes/$target/" "$build/corpus/$target" "tests/fuzz/corpus/$target" 2>&1 |
    grep -vE '^(INFO|Dictionary)' || failed+=("$target")
done
[ ${#failed[@]} -eq 0 ] || { echo "FAILED: ${failed[*]}, see $build/crashes"; exit 1; }
