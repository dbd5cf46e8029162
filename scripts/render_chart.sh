#!/usr/bin/env bash
# Renders the Helm chart with each of its example values: golden files for the tests, and the kustomize bases.
# Usage: scripts/render_chart.sh [OUT_DIR]    (default: the committed places)
set -euo pipefail
cd "$(dirname "$0")/.."
helm=.cache/tools/bin/helm
chart=deploy/helm/baton
golden=${1:-tests/deploy/golden}
bases=${1:+$1/bases}
bases=${bases:-deploy/kustomize/bases}
mkdir -p "$golden"

for values in "$chart"/ci/*-values.yaml; do
  name=$(basename "$values" -values.yaml)
  # Dashboards and rules are long and have tests of their own: their text stays out of the golden files.
  "$helm" template baton "$chart" --namespace inference --values "$values" | python3 -c '
import re, sys
text = sys.stdin.read()
text = re.sub(r"(  baton-\w+\.json: \|-\n)(    .*\n?)+", r"\1    # deploy/helm/baton/dashboards\n", text)
text = re.sub(r"(kind: PrometheusRule\n(?:.*\n)*?  groups:\n)(?:    .*\n)+", r"\1    # deploy/helm/baton/rules\n", text)
sys.stdout.write(text)' >"$golden/$name.yaml"
done

# Without what belongs to Helm alone: its tests, and its labels.
for name in cpu split slice; do
  mkdir -p "$bases/$name"
  "$helm" template baton "$chart" --namespace inference --values "$chart/ci/$name-values.yaml" --skip-tests \
    --set monitoring.podMonitor.enabled=false,monitoring.prometheusRule.enabled=false,monitoring.dashboards.enabled=false |
    grep -v -E '^ *(helm.sh/chart: |app.kubernetes.io/managed-by: )|^# Source: ' >"$bases/$name/manifests.yaml"
  cat >"$bases/$name/kustomization.yaml" <<'K'
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [manifests.yaml]
K
done
