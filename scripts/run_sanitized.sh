#!/usr/bin/env bash
# Builds with a sanitizer and runs unit, sim and e2e under it.
# Usage: scripts/run_sanitized.sh address,undefined|thread BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
sanitizer=$1 build=$2

export ASAN_OPTIONS=detect_leaks=1:halt_on_error=1
export LSAN_OPTIONS=suppressions=$PWD/tests/support/lsan.supp:print_suppressions=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=suppressions=$PWD/tests/support/tsan.supp:halt_on_error=1:second_deadlock_stack=1
export BATON_TEST_SLOWNESS=8

cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBATON_SANITIZE="$sanitizer" >/dev/null
ninja -C "$build" -j"$(nproc)" sanitized
failed=0
# Of the emulator what shows that it is understood, and what computes nothing. Its kernels run under the other sanitizers in every build,
# and would take the thread sanitizer hours.
ctest --test-dir "$build" -L "^(unit|sim)$" --output-on-failure -j"$(nproc)" || failed=1
ctest --test-dir "$build" -R "^simt_(conformance|transport)$" --output-on-failure || failed=1
# (The device check is hours of emulated kernels, which tests/simt runs under the sanitizers in every build.)
BATON_BUILD_DIR="$PWD/$build" .cache/tools/venv/bin/python -m pytest -q -m "not slow and not timing" --timeout=2400 tests/e2e --ignore tests/e2e/test_device_check.py || failed=1
exit $failed
