#!/usr/bin/env bash
# Takes the headers of FlashInfer (Apache-2.0), with those of CUTLASS and CCCL that it brings (BSD-3, Apache-2.0), out of its
# PyPI wheel into .deps/flashinfer (62 MB to fetch, 60 MB kept), for builds with -DBATON_FLASHINFER=ON. Nothing of the wheel is
# run, none of its Python is kept. Idempotent.
# Usage: scripts/get_flashinfer.sh
set -euo pipefail
cd "$(dirname "$0")/.."
target=.deps/flashinfer
# An older one will not do: 0.6.18 masks scores with -5e4 in units of the codes, which products of e4m3 go below by themselves.
version=0.7.2.post1
sha256=bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49
mark="$target/.done-$version-1"

[ ! -e "$mark" ] || exit 0
echo "[flashinfer] taking the headers of FlashInfer $version into $target"
mkdir -p .deps
work=$(mktemp -d .deps/flashinfer-work.XXXXXX)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
echo "flashinfer-python==$version --hash=sha256:$sha256" >"$work/requirements.txt"
"$work/venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
  --dest "$work/wheel" --requirement "$work/requirements.txt"
python3 -m zipfile -e "$work"/wheel/*.whl "$work/tree"
data=$work/tree/flashinfer/data
mkdir -p "$work/root/cccl"
mv "$data/include" "$work/root/include"
mv "$data/cutlass/include" "$work/root/cutlass"
mv "$data/cccl/libcudacxx/include" "$work/root/cccl/libcudacxx"
mv "$data/cccl/cub" "$data/cccl/thrust" "$work/root/cccl/"
cp -r "$work"/tree/flashinfer_python-*.dist-info/licenses "$work/root/licenses"
echo "$version" >"$work/root/VERSION"
rm -rf "$target"
mv "$work/root" "$target"
touch "$mark"
