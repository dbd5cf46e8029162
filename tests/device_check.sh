#!/usr/bin/env bash
# What a machine with an NVIDIA GPU (compute capability 9.0) can say that others cannot: every wrapper and kernel and the
# whole backend, from build/tests/device_tests, on the device. Writes one JSON report.
# Usage: tests/device_check.sh [BUILD_DIR] [REPORT]
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:-build} report=${2:-$build/device_report.json}
if ! ls /dev/nvidia[0-9]* >/dev/null 2>&1; then
  echo "device check: no NVIDIA device on this machine; nothing was checked"
  exit 3
fi
mkdir -p "$(dirname "$report")"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
timeout 300 "$build/tests/device_tests" --gtest_output="json:$report"
code=$?
echo "device check: exit $code, report in $report"
exit $code
