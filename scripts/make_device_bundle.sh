#!/usr/bin/env bash
# Makes one file of what tests/device_check.sh needs on a GPU host that has only the driver, cuBLASLt and perhaps NCCL: stripped
# programs with every shared library they load, the loader and the C library too, so that the host's distribution does not matter;
# the tests' models; the script. cudart is static; driver, cuBLASLt, NCCL and NVML are the host's and are not packed.
# Usage: scripts/make_device_bundle.sh [BUILD_DIR] [OUT.tar.gz]
# There: tar xzf baton-device.tar.gz && baton-device/tests/device_check.sh   (LD_LIBRARY_PATH may name cuBLASLt's folder)
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build} out=${2:-$build/baton-device.tar.gz}
limit=$((60 << 20))
programs=("$build/bin/baton" "$build/bin/baton-router" "$build/bin/baton-prefill" "$build/bin/baton-decode"
  "$build/tests/device_tests" "$build/tests/device_bench")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/baton-device
mkdir -p "$root"/{bin,lib,tests/data/models}

# The libraries that a program is linked with, the loader among them.
libraries() { ldd "$1" | sed -n -e 's/.*=> \(\/[^ ]*\) .*/\1/p' -e 's/^\s*\(\/[^ ]*\) .*/\1/p'; }

for program in "${programs[@]}"; do
  [ -x "$program" ] || { echo "[bundle] $program is missing (make device-bundle builds it)"; exit 1; }
  name=$(basename "$program")
  mkdir -p "$root/libexec"
  strip --strip-all -o "$root/libexec/$name" "$program"
  libraries "$program" >>"$work/libraries"
  # Our own loader with our own libraries first; what the host has to bring is found as ever.
  cat >"$root/bin/$name" <<'SH'
#!/bin/sh
root=$(cd "$(dirname "$0")/.." && pwd)
exec "$root/lib/ld-linux-x86-64.so.2" --library-path "$root/lib:${LD_LIBRARY_PATH:-}:${BATON_HOST_LIBRARIES:-/usr/lib/x86_64-linux-gnu:/usr/lib64:/usr/local/cuda/lib64:/usr/lib/wsl/lib}" \
  --argv0 "$0" "$root/libexec/$(basename "$0")" "$@"
SH
  chmod +x "$root/bin/$name"
done
# The host's driver may ask for these by name; older ones than our C library would not do.
for name in librt.so.1 libdl.so.2 libpthread.so.0 libutil.so.1; do ldconfig -p | sed -n "s/.*$name (libc6,x86-64.*=> //p" | head -1; done >>"$work/libraries"
sort -u "$work/libraries" | while read -r library; do
  cp -L "$library" "$root/lib/$(basename "$library")"
  case $library in *ld-linux*|*libc.so*) ;; *) strip --strip-unneeded "$root/lib/$(basename "$library")" ;; esac
done
for model in tiny-qwen3 random-qwen3-gqa5-shards random-qwen3-gqa1-hd128 random-qwen2-gqa2-tied random-llama-gqa2-yarn \
  random-qwen3-gqa4-yarn random-llama-gqa4-hd128; do
  cp -r "tests/data/models/$model" "$root/tests/data/models/"
done
cp tests/device_check.sh "$root/tests/"
mkdir -p "$(dirname "$out")"
tar -C "$work" --sort=name --owner=0 --group=0 --mtime=@0 -cz baton-device >"$out"
size=$(stat -c %s "$out")
echo "[bundle] $out: $((size >> 20)) MiB, unpacked $(du -sm "$root" | cut -f1) MiB"
[ "$size" -le "$limit" ] || { echo "[bundle] more than $((limit >> 20)) MiB"; exit 1; }
