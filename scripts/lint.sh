#!/usr/bin/env bash
# What can be checked without running anything: format, syntax of scripts, proto style, lock annotations.
# Usage: scripts/lint.sh BUILD_DIR   (built: the lock check needs generated headers)
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1
python=.cache/tools/venv/bin/python
failed=0

step() {
  local name=$1 start=$SECONDS
  shift
  if "$@"; then echo "== $name: fine after $((SECONDS - start)) s"; else
    failed=1
    echo "== $name: FAILED"
  fi
}

shell_syntax() { for script in scripts/*.sh; do bash -n "$script" || return 1; done; }
python_syntax() { git ls-files -co --exclude-standard -- '*.py' | xargs "$python" -c 'import ast, sys
for name in sys.argv[1:]: ast.parse(open(name).read(), name)'; }

step "format and tree" "$python" -m pytest -q tests/tidy
step "shell" shell_syntax
step "python" python_syntax
step "locks" scripts/check_locks.py "$build"
exit $failed
