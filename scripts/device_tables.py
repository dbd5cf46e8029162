#!/usr/bin/env python3
"""Makes the tables of a device report (tests/device_check.sh) that stand in docs/measurements/.

Usage: scripts/device_tables.py REPORT.json [--out FILE.md]
"""
import argparse
import json
import pathlib
import sys


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def number(value, digits=3):
    return "-" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def ceilings(part):
    rows = [["copy on the device, read and write", number(part.get("copy", {}).get("gb_per_s")), "GB/s"],
            ["host to device", number(part.get("host_to_device", {}).get("gb_per_s")), "GB/s"]]
    for mode in ("bf16", "fp8_block"):
        product = part.get(f"product_{mode}", {})
        rows.append([f"product of {product.get('side', '?')} squares, {mode}", product.get("error") or number(product.get("tflops")), "TFLOP/s"])
    return table(["ceiling", "measured", "unit"], rows)


def products(part):
    rows = [[r["mode"], r["n"], r["k"], r["tokens"], r.get("error") or number(r["us"]), number(r.get("tflops")), number(r.get("weight_gb_per_s"))]
            for r in part.get("products", [])]
    return table(["mode", "N", "K", "tokens", "us", "TFLOP/s", "weights GB/s"], rows)


def attention(part):
    rows = [[r["queries"], r["context"], number(r["own_us"]), number(r["own_tflops"]), number(r.get("flashinfer_us")), number(r.get("flashinfer_tflops")),
             number(r.get("relative_difference"))] for r in part.get("chunks", [])]
    return table(["queries", "context", "own us", "own TFLOP/s", "FlashInfer us", "FlashInfer TFLOP/s", "relative difference"], rows)


def model(part):
    prompts = table(["prompt tokens", "TTFT ms", "floor ms", "percent of the floor"],
                    [[r["tokens"], number(r["ms"]), number(r["floor_ms"]), number(r["percent_of_floor"])] for r in part.get("ttft", [])])
    steps = table(["batch", "context", "step ms", "floor ms", "percent of the floor"],
                  [[r["batch"], r["context"], number(r["ms"]), number(r["floor_ms"]), number(r["percent_of_floor"])] for r in part.get("itl", [])])
    return f"`{part.get('backend', '?')}`\n\n{prompts}\n\n{steps}"


def facts(part):
    return table(["what", "found"], [[key, json.dumps(value)] for key, value in part.items() if key not in ("ok", "seconds")])


def page(report):
    info = report["parts"].get("info", {})
    sections = [f"# Device check: {info.get('name', 'unknown device')}\n\n"
                f"Commit `{report.get('commit', '?')}`, {report.get('made_at', '?')}, by `tests/device_check.sh`; written by `scripts/device_tables.py`.\n"
                "Weights are made up (a hash), shapes are real. Floors: `tests/device/floors.h`."]
    for name, part in report["parts"].items():
        heading = f"## {name}\n\n" + ("" if part.get("ok") else f"**Failed**: {part.get('error') or part.get('failures') or 'exit code ' + part.get('exit_code', '?')}\n\n")
        writer = {"ceilings": ceilings, "products": products, "attention": attention}.get(name, model if name.startswith("model") else facts)
        sections.append(heading + writer(part))
    return "\n\n".join(sections) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    text = page(json.loads(arguments.report.read_text()))
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
