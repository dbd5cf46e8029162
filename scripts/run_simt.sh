#!/usr/bin/env bash
# Long checks of the kernels on the CPU; the first three over a finished build.
# Usage: scripts/run_simt.sh ptx BUILD_DIR [JOBS]      the kernel tests from the PTX that nvcc emits, then with changed PTX
#        scripts/run_simt.sh mutants BUILD_DIR [JOBS]  the kernel tests with one barrier or wait missing at a time, and those of two devices
#                                                      with one rule of their protocol broken
#        scripts/run_simt.sh tsan BUILD_DIR [JOBS]     tests of small grids under the thread sanitizer
#        scripts/run_simt.sh msan BUILD_DIR [JOBS]     the kernel tests under clang's memory sanitizer; BUILD_DIR is made where it is missing
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
    ninja -C "$build" -j"$jobs" simt_kernels simt_sample simt_tensor_parallel simt_kernels_tsan simt_tensor_parallel_tsan
    tests/simt/mutants.py "$build"
    tests/simt/protocol_mutants.py "$build" "$jobs"
    ;;
  tsan)
    if ! has simt_kernels_tsan; then
      echo "[simt-tsan] skipped: it needs the headers of a CUDA 13 toolkit (make cuda-toolkit)"
      exit 0
    fi
    ninja -C "$build" -j"$jobs" simt_conformance_tsan simt_faults_tsan simt_kernels_tsan simt_tensor_parallel_tsan
    export TSAN_OPTIONS=suppressions=$PWD/tests/support/tsan.supp:halt_on_error=1
    run() {
      echo "== $1"
      "$build/tests/$1" --gtest_brief=1 "${@:2}"
    }
    run simt_conformance_tsan
    # (A launch that a report has ended leaves its threads behind.)
    run simt_faults_tsan --gtest_filter="-*ReportsSayWhatIsWrong*"
    # One schedule, and not what takes minutes: the sanitizer sees a race in any order.
    run simt_kernels_tsan --gtest_filter="*random-*BothDevices*:*.Simple/*:*.Decode*:*.Verify*:*.Prefill/*:*.RandomShapes/*"
    run simt_tensor_parallel_tsan --gtest_filter="*DeviceGroupTest*"
    ;;
  msan)
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_COMPILER=clang-14 -DCMAKE_CXX_COMPILER=clang++-14 \
      -DBATON_SANITIZE=memory >/dev/null
    if ! has simt_kernels; then
      echo "[simt-msan] skipped: it needs the headers of a CUDA 13 toolkit (make cuda-toolkit)"
      exit 0
    fi
    tests="simt_conformance simt_faults simt_kernels simt_sample"
    # shellcheck disable=SC2086 # a list of words
    ninja -C "$build" -j"$jobs" $tests
    for test in $tests; do
      echo "== $test"
      "$build/tests/$test" --gtest_brief=1
    done
    ;;
  *)
    echo "run_simt.sh: ptx, mutants, tsan or msan, not $what" >&2
    exit 2
    ;;
esac
