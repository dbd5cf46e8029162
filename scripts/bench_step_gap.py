#!/usr/bin/env python3
"""What a decode worker's engine thread does between two steps, as a share of the steps: planning, drafting, drawing tokens,
handing them on. Sends so many requests at once, plain text with a temperature and top_p, and reads the worker's own histograms
(baton_step_gap_seconds, baton_iteration_duration_seconds) before and after.

Needs `make build tools models`; run it with .cache/tools/venv/bin/python. --model takes any model, such as one of
scripts/make_random_qwen3.py.
"""
import argparse
import concurrent.futures
import json
import pathlib
import shlex
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import harness  # noqa: E402


def sums(worker):
    samples = worker.metrics()
    total = lambda name: sum(value for key, value in samples.items() if key.startswith(name + "{"))
    return {"gap_s": total("baton_step_gap_seconds_sum"), "gaps": total("baton_step_gap_seconds_count"),
            "step_s": total("baton_iteration_duration_seconds_sum"), "steps": total("baton_iteration_duration_seconds_count")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=harness.SMOLLM2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--worker-flags", type=shlex.split, default=["--max-draft-tokens=0"])
    parser.add_argument("--json")
    options = parser.parse_args()
    record = {"when": time.strftime("%Y-%m-%d"), "model": options.model.name, "runs": []}
    sampling = {"temperature": options.temperature, "top_p": 0.9, "max_tokens": options.tokens, "ignore_eos": True}
    with harness.Service(options.model, "single", threads=options.threads, worker_flags=options.worker_flags) as service:
        ask = lambda seed: service.ids(ids=[300 + seed] * 20, sampling={**sampling, "seed": seed})
        ask(0)
        for batch in options.batches:
            before = sums(service.decode[0])
            with concurrent.futures.ThreadPoolExecutor(batch) as threads:
                list(threads.map(ask, range(1, batch + 1)))
            run = {key: value - before[key] for key, value in sums(service.decode[0]).items()}
            run |= {"batch": batch, "share": run["gap_s"] / run["step_s"]}
            record["runs"].append(run)
            print(f"batch {batch}: {run['steps']:.0f} steps of {1e3 * run['step_s'] / run['steps']:.2f} ms, gaps of "
                  f"{1e6 * run['gap_s'] / run['gaps']:.0f} us: {100 * run['share']:.2f} % of the step time", flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
