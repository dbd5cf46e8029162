#!/usr/bin/env python3
"""Says whether a load test was good enough, from the JSON of ghz or of llmbench; for CI, since ghz itself always exits with 0.

Usage: check_thresholds.py [--p50 T] [--p95 T] [--p99 T] [--average T] [--min-rps N] [--max-error-ratio R] [--min-count N]
                           [--ttft-p95 T] [--itl-p95 T] [--min-goodput-ratio R] [--accept-canceled] FILE|-
Times are like 250ms or 1.5s. Exit code 0: all held; 1: one did not; 2: the report or a bound could not be read.
"""
import argparse
import json
import re
import sys

UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def duration(text):
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)(us|ms|s|m)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: want a time like 250ms or 1.5s")
    return float(match[1]) * UNITS[match[2]]


def check(report, bounds):
    """[(what, measured, bound, held)] of every bound that was given. Raises KeyError where the report lacks the figure."""
    results = []

    def at_most(name, value, bound):
        results.append((name, value, bound, value <= bound))

    def at_least(name, value, bound):
        results.append((name, value, bound, value >= bound))

    good = report.get("statusCodeDistribution", {})
    passed = good.get("OK", 0) + (good.get("Canceled", 0) if bounds.accept_canceled else 0)
    count = report["count"]
    latency = {entry["percentage"]: entry["latency"] / 1e9 for entry in report.get("latencyDistribution") or []}
    for name in ("p50", "p95", "p99"):
        if getattr(bounds, name) is not None:
            at_most(name, latency[int(name[1:])], getattr(bounds, name))
    if bounds.average is not None:
        at_most("average", report["average"] / 1e9, bounds.average)
    if bounds.min_rps is not None:
        at_least("rps", report["rps"], bounds.min_rps)
    if bounds.min_count is not None:
        at_least("count", count, bounds.min_count)
    if bounds.max_error_ratio is not None:
        # A run without calls has shown nothing.
        at_most("error ratio", (count - passed) / count if count else 1.0, bounds.max_error_ratio)
    for name in ("ttft", "itl"):
        bound = getattr(bounds, f"{name}_p95")
        if bound is not None:
            at_most(f"{name} p95", report[f"{name}_s"]["p95"], bound)
    if bounds.min_goodput_ratio is not None:
        at_least("goodput ratio", report["goodput_ratio"], bounds.min_goodput_ratio)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("p50", "p95", "p99", "average", "ttft-p95", "itl-p95"):
        parser.add_argument(f"--{name}", type=duration)
    for name in ("min-rps", "max-error-ratio", "min-goodput-ratio"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--min-count", type=int)
    parser.add_argument("--accept-canceled", action="store_true", help="calls that the client cut count as good (recipe cut.json)")
    parser.add_argument("report", help="file, or - for standard input")
    bounds = parser.parse_args()
    try:
        report = json.load(sys.stdin if bounds.report == "-" else open(bounds.report))
        results = check(report, bounds)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"report: {type(error).__name__} {error}", file=sys.stderr)
        return 2
    if not results:
        print("no bound was given", file=sys.stderr)
        return 2
    for name, value, bound, held in results:
        print(f"{'ok  ' if held else 'MISS'}  {name:14} {value:.6g}  bound {bound:.6g}")
    return 0 if all(held for *_, held in results) else 1


if __name__ == "__main__":
    sys.exit(main())
