#!/usr/bin/env bash
# From a clean clone to a streamed answer: installs, builds, fetches a small model, starts a router, a prefill worker and a
# decode worker, sends one chat request over gRPC, prints answer and timings, stops everything.
# Usage: scripts/demo.sh [QUESTION]
set -euo pipefail
cd "$(dirname "$0")/.."
question=${1:-"Explain in three sentences why the sky is blue."}
model=.cache/models/SmolLM2-135M-Instruct.gguf

step() { printf '\n[%3ds] %s\n' "$SECONDS" "$1"; }

step "1/4 packages"
scripts/install_deps.sh --build-only
step "2/4 build (several minutes the first time, seconds after)"
# The first time without the tests, whose packages come with `make test`.
[ -e build/CMakeCache.txt ] && tests=() || tests=(-DBATON_BUILD_TESTS=OFF)
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release "${tests[@]}" >build.configure.log 2>&1 || { cat build.configure.log; exit 1; }
rm -f build.configure.log
ninja -C build -j"$(nproc)" baton baton-router baton-prefill baton-decode
step "3/4 model: SmolLM2-135M-Instruct"
scripts/get_demo_model.sh

step "4/4 router, prefill worker, decode worker"
directory=$(mktemp -d)
build/bin/baton serve --model "$model" --grpc-port 0 --http-port 0 --port-file "$directory/ports.json" --kv-cache-bytes 268435456 \
  --log-level warning &
serve=$!
stop() { kill -TERM "$serve" 2>/dev/null && wait "$serve" 2>/dev/null || true; rm -rf "$directory"; }
trap stop EXIT
while [ ! -e "$directory/ports.json" ]; do
  kill -0 "$serve" 2>/dev/null || { echo "the service did not start"; exit 1; }
  sleep 0.05
done
port=$(sed -n 's/.*"grpc": *\([0-9]*\).*/\1/p' "$directory/ports.json")

printf '\n> %s\n\n' "$question"
build/bin/baton chat --address "127.0.0.1:$port" --message "$question" --temperature 0 --max-tokens 200 --stats

kill -TERM "$serve"
wait "$serve"
trap - EXIT
rm -rf "$directory"
printf '\nAll three processes have stopped. Try: build/bin/baton serve --model %s\n' "$model"
