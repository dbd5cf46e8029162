"""`baton sim` against real processes: the same trace, the same answer within 15 %."""
import concurrent.futures
import json
import random
import time

import pytest

import harness
from harness import MODELS, SLOWNESS, Service

TINY = MODELS / "tiny-qwen3"
# Steps of a known length: what else a busy machine does is small beside it.
STEP_DELAY = "25ms"
TOLERANCE = 0.15


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(1900) for _ in range(length)]


def ask(service, length, seed, tokens):
    return service.stream(service.request(ids=prompt(length, seed), sampling={"temperature": 0, "max_tokens": tokens, "ignore_eos": True}), timeout=120)


def line_through(points):
    """Least squares of y = a + b*x."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def measured_speeds(service):
    """What `baton sim` wants to know of a worker, from a few requests on an idle service."""
    computed = [(length, ask(service, length, 1000 + i, 2).timings.prefill_compute_s) for i, length in enumerate([64, 128, 200, 300, 400, 500] * 2)]
    prefill_step, prefill_token = line_through(computed)
    single = [ask(service, 100, 2000 + i, 30).timings for i in range(3)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        batch = list(threads.map(lambda i: ask(service, 100, 3000 + i, 60).timings, range(8)))
    alone = sorted(t.itl_mean_s for t in single)[1]
    together = sorted(t.itl_mean_s for t in batch)[4]
    sequence = max(0.0, (together - alone) / 7)
    exposed = sorted(t.handover_exposed_s for t in single)[1]
    return {"prefill-step-s": prefill_step, "prefill-token-s": max(0.0, prefill_token), "prefill-pair-s": 0,
            "decode-step-s": max(0.001, alone - sequence), "decode-sequence-s": sequence, "decode-kv-token-s": 0,
            "transfer-s": exposed + 0.001, "rpc-s": 0.0005, "prefill-chunk-tokens": 512,
            "prefill-blocks": 512, "decode-blocks": 512, "sim-max-model-len": 2048}


def make_trace(count, rate, seed):
    rng = random.Random(seed)
    now, trace = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        trace.append({"arrival": now, "prompt_tokens": rng.randrange(64, 500), "output_tokens": rng.randrange(10, 50)})
    return trace


def run_for_real(service, trace, first_seed):
    begin = time.monotonic() + 0.2

    def one(indexed):
        i, request = indexed
        time.sleep(max(0.0, begin + request["arrival"] - time.monotonic()))
        answer = ask(service, request["prompt_tokens"], first_seed + i, request["output_tokens"])
        return answer.timings, time.monotonic() - begin, request["output_tokens"]
    with concurrent.futures.ThreadPoolExecutor(len(trace)) as threads:
        results = list(threads.map(one, enumerate(trace)))
    ttft = sorted(t.ttft_s for t, _, _ in results)
    gaps = sum(tokens - 1 for _, _, tokens in results)
    itl = sum(t.itl_mean_s * (tokens - 1) for t, _, tokens in results) / gaps
    return {"ttft mean": sum(ttft) / len(ttft), "ttft p50": ttft[len(ttft) // 2], "itl mean": itl,
            "duration": max(end for _, end, _ in results) - trace[0]["arrival"]}


def run_simulated(path, speeds):
    run = harness.run_baton("sim", f"--trace={path}", "--json", "--local-prefill-tokens=0", *(f"--{k}={v}" for k, v in speeds.items()))
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    return {"ttft mean": result["ttft_s"]["mean"], "ttft p50": result["ttft_s"]["p50"], "itl mean": result["itl_s"]["mean"],
            "duration": result["duration_s"]}


@pytest.mark.slow
def test_the_simulation_agrees_with_real_processes_within_15_percent(tmp_path):
    # Without drafts, and with prompts that share nothing: the trace says nothing of either.
    with Service(TINY, worker_flags=(f"--test-step-delay={STEP_DELAY}",), decode_flags=("--max-draft-tokens=0",), kv_blocks=512, router_flags=("--local-prefill-tokens=0",)) as service:
        speeds = measured_speeds(service)
        for rate in (4, 12):
            trace = make_trace(80, rate, seed=rate)
            path = tmp_path / f"trace-{rate}.jsonl"
            path.write_text("".join(json.dumps(request) + "\n" for request in trace))
            real, simulated = run_for_real(service, trace, 10_000 * rate), run_simulated(path, speeds)
            print(f"rate {rate}/s", {name: (round(real[name], 4), round(simulated[name], 4)) for name in real}, speeds)
            for name, value in real.items():
                assert abs(simulated[name] - value) <= TOLERANCE * value, f"rate {rate}: {name}: real {value}, simulated {simulated[name]}"


def write_trace(path, count, prompt_tokens, output_tokens, rate):
    path.write_text("".join(json.dumps({"arrival": i / rate, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}) + "\n" for i in range(count)))
    return f"--trace={path}"


def test_sim_prints_a_table_or_json_and_finds_the_best_split(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", 200, 1000, 20, 20)
    table = harness.run_baton("sim", trace, "--workers=6")
    assert table.returncode == 0, table.stderr
    assert "goodput" in table.stdout and "TTFT" in table.stdout and "best split" in table.stdout
    result = json.loads(harness.run_baton("sim", trace, "--workers=6", "--json").stdout)
    assert result["prefill_workers"] + result["decode_workers"] == 6 and result["completed"] == 200
    assert result["goodput"] == max(entry["goodput"] for entry in result["tried"])


def test_sim_runs_a_thousand_workers(tmp_path):
    trace = write_trace(tmp_path / "t.jsonl", 3000, 2000, 20, 1000)
    begin = time.monotonic()
    run = harness.run_baton("sim", trace, "--prefill-workers=400", "--decode-workers=600", "--json", timeout=100)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["completed"] == 3000
    assert time.monotonic() - begin < 60 * SLOWNESS


@pytest.mark.parametrize("flags, named", [
    ((), "--trace"), (("--trace=/nonexistent",), "/nonexistent"), (("--policy=best",), "least_load"), (("--workers=1",), "workers"),
    (("--decode-step-s=0",), "decode-step-s"), (("--accept-length=0",), "accept-length"), (("--sim-max-model-len=10",), "max_model_len")])
def test_sim_refuses_what_makes_no_sense_by_name(tmp_path, flags, named):
    trace = [] if not flags or flags[0].startswith("--trace") else [write_trace(tmp_path / "t.jsonl", 3, 100, 2, 1)]
    run = harness.run_baton("sim", *trace, *flags)
    assert run.returncode != 0 and named in run.stderr, run.stderr
