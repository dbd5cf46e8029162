#!/usr/bin/env bash
# Two long checks of the kernels on the CPU, over a finished build.
# Usage: scripts/run_simt.sh ptx BUILD_DIR [JOBS]      the kernel tests from the PTX that nvcc emits, then with changed PTX
#        scripts/run_simt.sh mutants BUILD_DIR [JOBS]  the kernel tests with one barrier or wait missing at a time
set -euo pipefail
cd "$(dirname "$0")/.."
what=$1 build=$2 jobs=${3:-$(nproc)}

# has TARGET: whether the build knows it.
has() {
  ninja -C "$build" -t query "$1" >/dev/null 2>&1
}

case $what in
  ptx)
    if ! has simt_kernels_ptx; then
      echo "[simt-ptx] skipped: it needs nvcc of a CUDA 13 toolkit and sm_90a kernels (make cuda-toolkit)"
      exit 0
    fi
    tests="simt_conformance_ptx simt_kernels_ptx simt_sample_ptx"
    # shellcheck disable=SC2086 # a list of words
    ninja -C "$build" -j"$jobs" $tests
    for test in $tests; do
      echo "== $test"
      "$build/tests/$test" --gtest_brief=1
    done
    tests/simt/ptx_mutants.py "$build"
    ;;
  mutants)
    if ! has simt_kernels; then
      echo "[simt-mutants] skipped: it needs the headers of a CUDA 13 toolkit (make cuda-toolkit)"
      exit 0
    fi
    ninja -C "$build" -j"$jobs" simt_kernels simt_sample
    tests/simt/mutants.py "$build"
    ;;
  *)
    echo "run_simt.sh: ptx or mutants, not $what" >&2
    exit 2
    ;;
esac
