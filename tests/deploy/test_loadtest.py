"""The load tests' recipes against real processes, and the tools around them."""
import json
import subprocess
import sys
import tomllib

import pytest

from support import ROOT, TOOLS, run

sys.path.insert(0, str(ROOT / "tests/e2e"))
LOADTEST = ROOT / "deploy/loadtest"
RECIPES = sorted(path.name for path in (LOADTEST / "ghz").iterdir() if path.suffix in (".json", ".toml") and path.name != "prompts.json")


@pytest.fixture(scope="module")
def service():
    import harness
    with harness.Service(harness.MODELS / "tiny-qwen3") as running:
        yield running


def target(service, recipe):
    return {"leg-prefill.json": service.prefill[0], "leg-decode.json": service.decode[0]}.get(recipe, service.router).address


def shortened(recipe, tmp_path, calls=12):
    """The recipe as it stands, but for its length."""
    path = LOADTEST / "ghz" / recipe
    settings = json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    if "duration" in settings:
        settings.update({"duration": "3s", "load-step-duration": "1s"})
    else:
        settings["total"] = calls
    out = tmp_path / (path.stem + ".json")
    out.write_text(json.dumps(settings))
    return out


def ghz(config, address):
    result = run(TOOLS / "bin/ghz", "--config", config, "-O", "json", address, cwd=LOADTEST / "ghz", timeout=280)
    return json.loads(result.stdout)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_run_and_every_call_ends_as_it_should(service, recipe, tmp_path):
    report = ghz(shortened(recipe, tmp_path), target(service, recipe))
    assert report["count"] >= 6
    accepted = {"OK", "Canceled"} if recipe == "cut.json" else {"OK"}
    assert set(report["statusCodeDistribution"]) <= accepted, report["statusCodeDistribution"]
    service.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_recipes(service, recipe):
    report = ghz(LOADTEST / "ghz" / recipe, target(service, recipe))
    accepted = {"OK", "Canceled"} if recipe == "cut.json" else {"OK"}
    assert set(report["statusCodeDistribution"]) <= accepted, report["statusCodeDistribution"]
    service.wait_idle()


def test_prefill_recipe_asks_no_decode_worker(service, tmp_path):
    before = service.decode[0].metric("baton_requests_finished_total")
    ghz(shortened("prefill.json", tmp_path), service.router.address)
    assert service.decode[0].metric("baton_requests_finished_total") == before


def test_decode_leg_finds_its_prompt_in_the_cache(service, tmp_path):
    """All but the last block's tokens: that is what makes it a test of decode."""
    ghz(shortened("leg-decode.json", tmp_path, 4), service.decode[0].address)
    decode = service.decode[0]
    before = {s: decode.metric("baton_prompt_tokens_total", source=s) for s in ("computed", "cached")}
    ghz(shortened("leg-decode.json", tmp_path, 4), decode.address)
    assert decode.metric("baton_prompt_tokens_total", source="cached") - before["cached"] == 4 * 64
    assert decode.metric("baton_prompt_tokens_total", source="computed") - before["computed"] == 4


def test_every_recipe_is_in_the_readme():
    readme = (LOADTEST / "ghz/README.md").read_text()
    assert all(f"`{recipe}`" in readme for recipe in RECIPES) and len(RECIPES) == 7


def test_llmbench_measures_first_tokens_gaps_and_goodput(service, tmp_path):
    config = shortened("stream.json", tmp_path, 20)
    result = run(TOOLS / "bin/llmbench", "--config", config, "--json", "--ttft-slo", "30s", "--itl-slo", "5s", service.router.address, cwd=LOADTEST / "ghz")
    report = json.loads(result.stdout)
    assert report["count"] == report["streams"] == report["complete"] == report["good"] == 20 and report["goodput_ratio"] == 1
    assert report["tokens"] == 16 * 32 + 4 * 64, "every token of prompts.json's five requests, four times"
    assert 0 < report["ttft_s"]["p50"] <= report["ttft_s"]["p99"] <= report["e2e_s"]["max"] and 0 < report["itl_s"]["mean"] < 1
    strict = run(TOOLS / "bin/llmbench", "--config", config, "--json", "--ttft-slo", "1us", service.router.address, cwd=LOADTEST / "ghz")
    assert json.loads(strict.stdout)["good"] == 0
    table = run(TOOLS / "bin/llmbench", "--config", config, service.router.address, cwd=LOADTEST / "ghz").stdout
    assert "TTFT" in table and "goodput: " in table
    path = tmp_path / "report.json"
    path.write_text(result.stdout)
    run(LOADTEST / "check_thresholds.py", "--ttft-p95", "30s", "--itl-p95", "5s", "--min-goodput-ratio", "1", "--max-error-ratio", "0", path)


def test_llmbench_says_what_is_wrong(service, tmp_path):
    for arguments in (["--config", tmp_path / "none.json", "127.0.0.1:1"], ["127.0.0.1:1"]):
        assert run(TOOLS / "bin/llmbench", *arguments, check=False).returncode != 0


REPORT = {"count": 10, "average": 2e8, "rps": 5.0, "statusCodeDistribution": {"OK": 8, "Canceled": 1, "Unavailable": 1},
          "latencyDistribution": [{"percentage": 50, "latency": 1e8}, {"percentage": 95, "latency": 4e8}, {"percentage": 99, "latency": 9e8}],
          "ttft_s": {"p95": 0.2}, "itl_s": {"p95": 0.02}, "goodput_ratio": 0.7}


@pytest.mark.parametrize("flags, code", [
    (["--p95", "400ms"], 0), (["--p95", "399ms"], 1), (["--p99", "1s", "--p50", "0.1s"], 0), (["--average", "199ms"], 1), (["--min-rps", "5"], 0), (["--min-rps", "5.1"], 1),
    (["--max-error-ratio", "0.2"], 0), (["--max-error-ratio", "0.1"], 1), (["--max-error-ratio", "0.1", "--accept-canceled"], 0), (["--min-count", "11"], 1),
    (["--ttft-p95", "200ms"], 0), (["--itl-p95", "19ms"], 1), (["--min-goodput-ratio", "0.71"], 1), ([], 2), (["--p95", "fast"], 2),
])
def test_threshold_checker(flags, code):
    result = subprocess.run([LOADTEST / "check_thresholds.py", *flags, "-"], input=json.dumps(REPORT), capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"count": 0, "statusCodeDistribution": {}}'])
def test_threshold_checker_never_passes_what_it_cannot_read(text):
    result = subprocess.run([LOADTEST / "check_thresholds.py", "--max-error-ratio", "0", "--p95", "1s", "-"], input=text, capture_output=True, text=True)
    assert result.returncode in (1, 2)


def test_threshold_checker_needs_calls_to_be_content():
    result = subprocess.run([LOADTEST / "check_thresholds.py", "--max-error-ratio", "0", "-"], input='{"count": 0, "statusCodeDistribution": {}}', capture_output=True, text=True)
    assert result.returncode == 1
