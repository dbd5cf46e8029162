"""From the abort of a request until its KV blocks are free: real processes, under load, clients that leave at random moments.

    python tests/bench/abort_bench.py [--build build] [--requests 600] [--json FILE]

DESIGN's bars: blocks that are not being computed on < 50 ms at p99; those that are, one step (decode) or one layer (prefill) more.
Three phases, each with a load of its own and the workers' own histogram baton_kv_abort_to_free_seconds before and after:
  queue   prompts wait in the prefill worker or are on their way, decode has promised blocks and computes nothing with them
  answer  all answers are being generated when their clients leave
  mixed   clients leave at any moment
A histogram's percentile is the upper end of the bucket that it falls into: the true value is at most that. Steps are as long as they
are with --step-delay (for tests only) on top of the compute; 0: the compute alone. Afterwards every gauge must be back at its idle value.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import re
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--requests", type=int, default=600, help="of each phase")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--step-delay-ms", type=int, default=0)
    parser.add_argument("--chunk-tokens", type=int, default=512, help="of a prefill step")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(400, 1400), help="least and most, in phases queue and mixed")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    return parser.parse_args()


ARGUMENTS = parse()
os.environ["BATON_BUILD_DIR"] = str(pathlib.Path(ARGUMENTS.build).resolve())
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
import grpc  # noqa: E402
from harness import MODELS, Service  # noqa: E402

BLOCKS = 1024
HISTOGRAM = "baton_kv_abort_to_free_seconds"


def buckets(worker, name=HISTOGRAM):
    """{upper end: cumulative count}, over all labels."""
    found = {}
    for key, value in worker.metrics().items():
        if key.startswith(name + "_bucket{"):
            end = float(re.search(r'[{,]le="([^"]*)"', key)[1].replace("+Inf", "inf"))
            found[end] = found.get(end, 0) + value
    return found


def grown(before, after):
    return {end: after[end] - before.get(end, 0) for end in sorted(after)}


def percentile(counts, share):
    """Upper end of the bucket that holds it; None where nothing was observed."""
    total = max(counts.values(), default=0)
    return next((end for end, count in counts.items() if count >= share * total), None) if total else None


def step_time(worker, before):
    """Mean and largest bucket's end of a step, in this phase."""
    counts = grown(before, buckets(worker, "baton_iteration_duration_seconds"))
    return percentile(counts, 0.5), percentile(counts, 0.99)


def leave_at(phase, rng):
    """Seconds after the first token (answer) or the call (others) until the client leaves."""
    return {"queue": rng.uniform(0, 0.15), "answer": rng.uniform(0.02, 0.3), "mixed": rng.uniform(0, 1.0)}[phase]


def one(service, phase, number, rng):
    prompt = [rng.randrange(1900) for _ in range(rng.randrange(*ARGUMENTS.prompt_tokens) if phase != "answer" else 64)]
    request = service.request(ids=prompt, sampling={"max_tokens": 500, "ignore_eos": True, "seed": number})
    wait = leave_at(phase, rng)
    call = service.stub.Generate(request, timeout=60)
    timer = threading.Timer(wait, call.cancel)
    if phase != "answer":
        timer.start()
    try:
        for count, _ in enumerate(call):
            if phase == "answer" and count == 1:  # the second message comes from decode
                timer.start()
        return "completed"
    except grpc.RpcError as error:
        return error.code().name
    finally:
        timer.cancel()


def run_phase(service, phase):
    service.wait_idle()
    workers = {"prefill": service.prefill[0], "decode": service.decode[0]}
    before = {role: buckets(w) for role, w in workers.items()}
    steps = {role: buckets(w, "baton_iteration_duration_seconds") for role, w in workers.items()}
    quarantine = buckets(workers["decode"], "baton_kv_quarantine_seconds")
    rngs = [random.Random(ARGUMENTS.seed * 1_000_003 + i) for i in range(ARGUMENTS.requests)]
    begin, load_before = time.monotonic(), os.getloadavg()[0]
    with concurrent.futures.ThreadPoolExecutor(ARGUMENTS.concurrency) as threads:
        ends = list(threads.map(lambda i: one(service, phase, i, rngs[i]), range(ARGUMENTS.requests)))
    service.wait_idle()
    result = {"phase": phase, "seconds": time.monotonic() - begin, "load_average": [load_before, os.getloadavg()[0]],
              "ends": {end: ends.count(end) for end in sorted(set(ends))}}
    for role, worker in workers.items():
        counts = grown(before[role], buckets(worker))
        p50, p99 = step_time(worker, steps[role])
        result[role] = {"aborts": max(counts.values()), "p50_s": percentile(counts, 0.5), "p99_s": percentile(counts, 0.99),
                        "max_s": percentile(counts, 1.0), "step_p50_s": p50, "step_p99_s": p99}
    waited = grown(quarantine, buckets(workers["decode"], "baton_kv_quarantine_seconds"))
    result["decode"]["quarantined"] = max(waited.values())
    result["decode"]["quarantine_p99_s"] = percentile(waited, 0.99)
    for worker in service.workers:  # idle gauges, exactly
        counts = {s: worker.metric("baton_kv_blocks", state=s) for s in ("free", "cached", "active", "reserved", "quarantined")}
        assert counts["free"] + counts["cached"] == BLOCKS, (worker.name, counts)
    return result


def main():
    delay = [f"--test-step-delay={ARGUMENTS.step_delay_ms}ms"] if ARGUMENTS.step_delay_ms else []
    report = {"model": "tiny-qwen3", "requests": ARGUMENTS.requests, "concurrency": ARGUMENTS.concurrency, "cores": os.cpu_count(),
              "chunk_tokens": ARGUMENTS.chunk_tokens, "prompt_tokens": ARGUMENTS.prompt_tokens, "step_delay_ms": ARGUMENTS.step_delay_ms, "transport": ARGUMENTS.transport, "phases": []}
    with Service(MODELS / "tiny-qwen3", kv_blocks=BLOCKS, prefill_flags=(f"--chunk-tokens={ARGUMENTS.chunk_tokens}",), worker_flags=(f"--kv-transport={ARGUMENTS.transport}", *delay),
                 router_flags=("--local-prefill-tokens=0", "--prefill-queue-tokens=0", "--max-concurrent=1000")) as service:
        print(f"{'phase':8} {'worker':8} {'aborts':>7} {'p50 <=':>9} {'p99 <=':>9} {'max <=':>9} {'step p99':>9}   seconds; load average; ends")
        for phase in ("queue", "answer", "mixed"):
            result = run_phase(service, phase)
            report["phases"].append(result)
            for role in ("prefill", "decode"):
                row = result[role]
                cells = ["-" if row[k] is None else f"{row[k]:.4g}" for k in ("p50_s", "p99_s", "max_s", "step_p99_s")]
                tail = f"   {result['seconds']:.0f}; {result['load_average'][1]:.1f}; {result['ends']}" if role == "prefill" else ""
                print(f"{phase:8} {role:8} {row['aborts']:7.0f} " + " ".join(f"{c:>9}" for c in cells) + tail)
            print(f"{'':17} of decode's, {result['decode']['quarantined']:.0f} waited in quarantine, p99 <= {result['decode']['quarantine_p99_s']}")
    print("idle gauges exact after every phase")
    if ARGUMENTS.json:
        pathlib.Path(ARGUMENTS.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
