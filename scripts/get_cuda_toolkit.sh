#!/usr/bin/env bash
# Assembles a CUDA 13.0 toolkit (nvcc, headers, static cudart: 100 MB to fetch) from the vendor's PyPI wheels into
# .deps/cuda, where the build looks for one. Does nothing where a CUDA 13 nvcc is already installed. Idempotent.
# cuBLASLt, NCCL, NVML and the driver are loaded at run time, so the build needs none of them.
# Usage: scripts/get_cuda_toolkit.sh [--force]    (--force: although one is installed)
# BATON_CUDA=OFF in the environment: do nothing (a CPU-only build).
set -euo pipefail
cd "$(dirname "$0")/.."
target=.deps/cuda
# Pinned one by one: nvcc's own requirements name no versions and would mix releases.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85)
mark="$target/.done-${wheels[0]##*=}-1"

[ "${BATON_CUDA:-AUTO}" != OFF ] || exit 0
[ ! -e "$mark" ] || exit 0
if [ "${1:-}" != --force ]; then
  for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    if [ -x "$nvcc" ] && "$nvcc" --version | grep -qE 'release (1[3-9]|[2-9][0-9])\.'; then exit 0; fi
  done
fi

echo "[cuda] assembling CUDA 13.0 from wheels in $target"
mkdir -p .deps
work=$(mktemp -d .deps/cuda-work.XXXXXX)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$work/wheels" "${wheels[@]}"
root="$work/wheels/nvidia/cu13"
chmod +x "$root"/bin/* "$root"/nvvm/bin/*
ln -sfn lib "$root/lib64"
# nvcc looks for the runtime where an installed toolkit has it.
"$root/bin/nvcc" --version | grep -q 'release 13.0' || { echo "[cuda] nvcc from the wheels does not run"; exit 1; }
rm -rf "$target"
mv "$root" "$target"
touch "$mark"
