"""`baton bench` against a real service: what it counts is what was sent and what came."""
import html.parser
import json
import re

import jsonschema
import pytest

from harness import MODELS, run_baton

NUMBERS = {"type": "object", "required": ["mean", "p50", "p90", "p95", "p99", "max", "count"],
           "additionalProperties": {"type": "number", "minimum": 0}}
COUNTS = ("seed", "requests", "completed", "short_answers", "retries", "prompt_tokens", "cached_prompt_tokens", "output_tokens")
SCHEMA = {
    "type": "object", "additionalProperties": False,
    "properties": {
        **{name: {"type": "string"} for name in ("address", "model", "load")},
        **{name: {"type": "integer", "minimum": 0} for name in COUNTS},
        **{name: {"type": "number", "minimum": 0} for name in ("duration_s", "requests_per_s", "output_tokens_per_s")},
        **{name: NUMBERS for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "client_lag_s")},
        "codes": {"type": "object", "additionalProperties": {"type": "integer"}},
        "goodput": {"type": "object", "required": ["slo_ttft_s", "slo_tpot_s", "good", "share", "requests_per_s"],
                    "additionalProperties": {"type": "number"}},
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])


def bench(service, *flags):
    run = run_baton("bench", f"--address={service.router.address}", "--json", *flags)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    jsonschema.validate(report, SCHEMA)
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s"):
        sample = report[name]
        assert sample["p50"] <= sample["p90"] <= sample["p95"] <= sample["p99"] <= sample["max"]
    return report


@pytest.mark.parametrize("load", [("--rate=60",), ("--concurrency=4",)])
def test_every_request_and_token_is_counted(chain, load):
    tokens_before = chain.router.metric("baton_generation_tokens_total")
    report = bench(chain, *load, "--requests=40", "--prompt-tokens=20", "--output-tokens=9")
    assert report["requests"] == report["completed"] == report["codes"]["OK"] == 40
    assert report["output_tokens"] == 40 * 9 and report["prompt_tokens"] == 40 * 20 and report["short_answers"] == 0
    assert chain.router.metric("baton_generation_tokens_total") - tokens_before == 40 * 9
    assert report["ttft_s"]["count"] == report["e2e_s"]["count"] == report["tpot_s"]["count"] == 40
    assert report["itl_s"]["count"] <= 40 * 8
    assert report["e2e_s"]["max"] <= report["duration_s"] and 0 < report["ttft_s"]["mean"] < report["e2e_s"]["mean"]
    assert report["output_tokens_per_s"] == pytest.approx(360 / report["duration_s"])
    assert report["requests_per_s"] == pytest.approx(40 / report["duration_s"])
    # Without objectives everything whole is good.
    assert report["goodput"]["share"] == 1 and report["goodput"]["good"] == 40


def test_goodput_follows_the_objectives(chain):
    flags = ("--requests=20", "--concurrency=2", "--prompt-tokens=10-30", "--output-tokens=5")
    assert bench(chain, *flags, "--slo-ttft=100", "--slo-tpot=100")["goodput"]["share"] == 1
    none = bench(chain, *flags, "--slo-ttft=0.0000001")
    assert none["goodput"] == {"slo_ttft_s": 1e-7, "slo_tpot_s": 0, "good": 0, "share": 0, "requests_per_s": 0}
    assert none["completed"] == 20


# One place at a time: the requests queue in the service, and what they waited counts though each was sent in time.
def test_latency_counts_from_when_a_request_was_due(pool):
    service = pool.get(MODELS / "tiny-qwen3", decode_flags=("--test-step-delay=20ms",), router_flags=("--max-concurrent=1",))
    report = bench(service, "--rate=1000", "--requests=8", "--prompt-tokens=16", "--output-tokens=10")
    # Each takes nine steps of 20 ms and the eighth waits for seven others, so TTFTs are 0, 180, .. 1260 ms at least.
    assert report["ttft_s"]["max"] > 7 * 0.18 and report["ttft_s"]["p50"] > 3 * 0.18
    assert report["client_lag_s"]["p50"] < 0.18
    service.wait_idle()


def test_a_trace_gives_lengths_arrivals_and_shared_prefixes(tiny, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival": 100 + 0.2 * i, "prompt_tokens": 200, "output_tokens": 2 + i, "prefix_group": "a", "prefix_tokens": 128} for i in range(6)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    report = bench(tiny, f"--trace={trace}", "--time-scale=2", "--bench-seed=77")
    assert report["requests"] == 6 and report["output_tokens"] == sum(2 + i for i in range(6)) and report["prompt_tokens"] == 1200
    assert report["duration_s"] >= 0.5, "five gaps of 0.2 s, twice as fast"
    assert report["cached_prompt_tokens"] >= 3 * 128, "the group's two blocks are computed once a worker"


def test_failures_are_counted_by_status_and_are_no_part_of_the_latencies(tiny):
    report = bench(tiny, "--requests=5", "--concurrency=5", "--prompt-tokens=5000", "--output-tokens=3")
    assert report["codes"] == {"INVALID_ARGUMENT": 5} and report["completed"] == 0
    assert report["ttft_s"]["count"] == 0 and report["goodput"]["share"] == 0


class Page(html.parser.HTMLParser):
    """Tags opened and closed, and everything that would be fetched."""

    VOID = {"meta", "circle", "line"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.fetched = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "data", "action", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_page_without_outside_resources(chain, tmp_path):
    path = tmp_path / "report.html"
    report = bench(chain, "--requests=30", "--rate=100", "--prompt-tokens=normal:20:5", "--output-tokens=6", f"--html={path}")
    text = path.read_text()
    page = Page(text)
    assert page.open == [] and page.fetched == [] and "script" not in page.tags and "link" not in page.tags
    assert not re.search(r"https?:|@import|url\(", text)
    assert page.tags.count("svg") == 5 and page.tags.count("circle") == 30, "a dot for the TTFT of each request"
    assert f"{report['output_tokens']} tokens" in text


@pytest.mark.parametrize("flag, named", [("--prompt-tokens=0", "prompt-tokens"), ("--output-tokens=x", "output-tokens"), ("--rate=-1", "rate"),
                                         ("--concurrency=0", "concurrency"), ("--requests=0", "requests"), ("--trace=/nowhere", "/nowhere"),
                                         ("--channels=0", "channels"), ("--html=/nowhere/x.html", "/nowhere/x.html")])
def test_a_bad_setting_is_refused_by_name(chain, flag, named):
    run = run_baton("bench", f"--address={chain.router.address}", "--requests=1", "--prompt-tokens=5", "--output-tokens=1", flag)
    assert run.returncode != 0 and named in run.stderr, run.stderr


def test_it_ends_well_every_time(chain):
    """At its end gRPC is taken apart while answers' last callbacks still run."""
    for _ in range(60):
        run = run_baton("bench", f"--address={chain.router.address}", "--requests=2", "--concurrency=2", "--prompt-tokens=5", "--output-tokens=1")
        assert run.returncode == 0, run.stderr


def test_no_router_is_unavailable():
    run = run_baton("bench", "--address=127.0.0.1:1", "--requests=1")
    assert run.returncode != 0 and "127.0.0.1:1" in run.stderr
