#!/usr/bin/env python3
"""Writes docs/metrics.md: every metric of the project, from engine/base/metrics_table.h and process_stats.cc, with where it is
used. A metric that no dashboard, rule or autoscaler uses needs its reason in NOT_SHOWN.

Usage: scripts/make_metrics_doc.py [--out FILE]
"""
import argparse
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy/helm/baton"
NOT_SHOWN = {
    "process_start_time_seconds": "restarts show as changes of it; ask for it when looking for one",
    "process_threads": "constant while a process runs",
    "process_virtual_memory_bytes": "reserved addresses, not memory in use",
    "process_max_fds": "a limit, not a measurement",
}
ROLES = {"kAll": "all", "kRouter": "router", "kWorkers": "prefill, decode", "kPrefill": "prefill", "kDecode": "decode"}
HEAD = """# Metrics

Every process serves them on `/metrics` of its HTTP port, in the text format of Prometheus; `/metrics/lite` has the few that endpoint pickers ask for many times a second.
Every series also carries `model_name` and `role`. Histograms are in seconds, bytes or tokens. Labels written `a=x|y` have these values only, and their series exist from the start.
With `--metrics-compat=vllm` the same values are there a second time under the names that dashboards and autoscalers made for vLLM ask for (`engine/base/metrics_compat.cc`).

The last column names the dashboards (overview, disaggregation, engine, router), rules (alerts, recording) and autoscaling targets (scaling) that use a metric. This page is written by
`scripts/make_metrics_doc.py`; what to do about each alert stands in `operate.md`.

| metric | type | processes | labels | meaning | used in |
|---|---|---|---|---|---|
"""


def table_rows():
    text = (ROOT / "engine/base/metrics_table.h").read_text()
    for kind, block in re.findall(r"#define BATON_(COUNTERS|GAUGES|HISTOGRAMS)\(X\)((?:.*\\\n)+.*\n)", text):
        block = re.sub(r"/\*.*?\*/", "", block.replace("\\\n", " "))
        for entry in re.findall(r"X\(\s*\w+,((?:[^()\"]|\"(?:[^\"\\]|\\.)*\")*)\)", block):
            strings = re.sub(r'"\s+"', "", entry)
            name, roles, rest = re.match(r'\s*"([^"]+)",\s*(\w+),\s*(.*)', strings, re.DOTALL).groups()
            quoted = re.findall(r'"([^"]*)"', rest)
            yield name, kind.lower().rstrip("s"), ROLES[roles], quoted[0], quoted[-1]


def process_rows():
    text = (ROOT / "engine/base/process_stats.cc").read_text()
    for name, help_text, kind in re.findall(r'"(process_\w+)",\s*((?:"[^"]*"\s*)+),\s*MetricType::(\w+)', text):
        yield name, kind.lower(), "all", "", "".join(re.findall(r'"([^"]*)"', help_text))


def sources():
    """{where: all expressions in one text}."""
    out = {path.stem.removeprefix("baton-"): "\n".join(t["expr"] for p in json.loads(path.read_text())["panels"] for t in p.get("targets", []))
           for path in sorted((CHART / "dashboards").glob("*.json"))}
    for name in ("alerts", "recording"):
        text = re.sub(r"#.*", "", (CHART / f"rules/{name}.yaml").read_text())
        out[name] = "\n".join("".join(match) for match in re.findall(r"expr: (?:\|\n((?: {10}.*\n)+)|(.*))", text))
    out["scaling"] = "\n".join(re.findall(r"query: (.*)", (CHART / "templates/scaledobjects.yaml").read_text())
                               + re.findall(r"seriesQuery: (.*)", (ROOT / "deploy/monitoring/adapter-rules.yaml").read_text()))
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs/metrics.md")
    out = parser.parse_args().out
    texts, lines = sources(), []
    for name, kind, roles, labels, meaning in [*table_rows(), *process_rows()]:
        pattern = re.compile(rf"\b{name}(_bucket|_sum|_count)?\b")
        used = sorted(where for where, text in texts.items() if pattern.search(text))
        if not used and name not in NOT_SHOWN:
            raise SystemExit(f"{name}: used nowhere; show it, or say in NOT_SHOWN why not")
        where = ", ".join(used) if used else f"not shown: {NOT_SHOWN[name]}"
        cells = [f"`{name}`", kind, roles, ", ".join(f"`{label}`" for label in labels.split()).replace("|", "\\|"), meaning, where]
        lines.append("| " + " | ".join(cells) + " |")
    out.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
