#!/usr/bin/env bash
# Installs what Baton builds and tests with, from Debian's packages. Idempotent: a second run only looks.
# Usage: scripts/install_deps.sh [--build-only | --browser]    (--browser: what the slow tests of pages and images need, too)
set -euo pipefail

build_packages=(
  build-essential cmake ninja-build ccache pkg-config git ca-certificates curl python3 python3-venv
  libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libprotoc-dev
  libabsl-dev prometheus-cpp-dev libspdlog-dev nlohmann-json3-dev libyaml-cpp-dev libutf8proc-dev
  libssl-dev libxxhash-dev libboost-dev zlib1g-dev)
test_packages=(libgtest-dev libgmock-dev libbenchmark-dev prometheus clang-14 clang-tidy-14 clang-format-14
  libclang-rt-14-dev golang-go npm openssl iproute2)

wanted=("${build_packages[@]}")
[ "${1:-}" = "--build-only" ] || wanted+=("${test_packages[@]}")
[ "${1:-}" != "--browser" ] || wanted+=(chromium fonts-dejavu-core debootstrap)

missing=()
for package in "${wanted[@]}"; do
  # A toolchain that is already on the machine, from wherever, serves as well as Debian's.
  case "$package" in
    golang-go) command -v go >/dev/null && continue ;;
    npm) command -v npm >/dev/null && continue ;;
  esac
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi

echo "[deps] installing ${#missing[@]} Debian packages: ${missing[*]}"
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
export DEBIAN_FRONTEND=noninteractive
# Daemons that packages bring (prometheus) must not start on a build machine.
if [ ! -e /usr/sbin/policy-rc.d ]; then
  printf '#!/bin/sh\nexit 101\n' | $sudo tee /usr/sbin/policy-rc.d >/dev/null
  $sudo chmod +x /usr/sbin/policy-rc.d
  trap '$sudo rm -f /usr/sbin/policy-rc.d' EXIT
fi
$sudo apt-get update -qq
$sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
echo "[deps] done"
