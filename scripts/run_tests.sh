#!/usr/bin/env bash
# Runs every suite of `make test` over a finished build, goes on after a failure, and closes with one line of counts.
# Usage: scripts/run_tests.sh BUILD_DIR
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
python=.cache/tools/venv/bin/python
passed=0 failed=0
report=$(mktemp -d)
trap 'rm -rf "$report"' EXIT

# count FILE: adds the tests of a JUnit file.
count() {
  local numbers
  numbers=$("$python" - "$1" <<'PY'
import sys, xml.etree.ElementTree as tree
root = tree.parse(sys.argv[1]).getroot()
suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
total = sum(int(s.get("tests", 0)) for s in suites)
bad = sum(int(s.get("failures", 0)) + int(s.get("errors", 0)) for s in suites)
print(total - bad, bad)
PY
  ) || numbers="0 1"
  passed=$((passed + ${numbers% *}))
  failed=$((failed + ${numbers#* }))
}

suite() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name"
  "$@"
  local code=$?
  if [ -e "$report/$name.xml" ]; then count "$report/$name.xml"; else failed=$((failed + 1)); fi
  if [ $code -ne 0 ] && [ "$failed" -eq 0 ]; then failed=1; fi
  echo "== $name: exit $code after $((SECONDS - start)) s"
}

suite ctest ctest --test-dir "$build" -LE long --output-on-failure -j2 --output-junit "$report/ctest.xml"
suite tidy "$python" -m pytest -q tests/tidy --junitxml="$report/tidy.xml"
export BATON_BUILD_DIR="$PWD/$build"
rm -rf "$build/e2e-logs"
# pytest_suite NAME TESTS...: what `suite` runs; processes leave their logs in a folder of the suite.
pytest_suite() {
  local name=$1
  shift
  BATON_TEST_LOGS="$BATON_BUILD_DIR/e2e-logs/$name" "$python" -m pytest -q -m "not slow" "$@" --junitxml="$report/$name.xml"
}
# Workers on the emulated device compute, whoever else does; the other tests of real processes also look at the clock, and have the
# machine to themselves.
emulated=(tests/e2e/test_emulated_device.py tests/e2e/test_device_check.py)
suite e2e pytest_suite e2e tests/e2e "${emulated[@]/#/--ignore=}"

deploy() {
  wait "$deploy_pid"
  local code=$?
  cat "$report/deploy.log"
  return $code
}
pytest_suite deploy tests/deploy >"$report/deploy.log" 2>&1 &
deploy_pid=$!
suite emulated pytest_suite emulated "${emulated[@]}"
suite deploy deploy

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
