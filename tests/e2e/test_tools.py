"""The tools people bring: ghz by reflection, promtool, and our own `baton`."""
import json
import re
import signal
import subprocess
import time

import pytest

import harness
from harness import BIN, CACHE, MODELS, ROOT, SLOWNESS, SMOLLM2, pb, run_baton

GHZ = CACHE / "tools" / "bin" / "ghz"
TINY = MODELS / "tiny-qwen3"


def ghz(service, call, data, total=20, concurrency=4, *flags):
    run = subprocess.run([GHZ, "--insecure", "--call", f"baton.v1.Generation.{call}", "-d", json.dumps(data), "-n", str(total),
                          "-c", str(concurrency), "-t", f"{int(60 * SLOWNESS)}s", "-O", "json", *flags, service.router.address],
                         capture_output=True, text=True, timeout=300 * SLOWNESS)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


# Case 17.2: no proto file is given, so this is reflection too.
@pytest.mark.parametrize("call", ["GenerateUnary", "Generate"])
def test_ghz_runs_by_reflection_and_every_call_is_ok(tiny, call):
    before = tiny.router.metric("baton_generation_tokens_total")
    report = ghz(tiny, call, [{"text": f"Chapter {i}", "sampling": {"maxTokens": 8, "ignoreEos": True}} for i in range(5)])
    assert report["count"] == 20 and report["statusCodeDistribution"] == {"OK": 20}, report["statusCodeDistribution"]
    assert not report.get("errorDistribution")
    tiny.wait_idle()
    assert tiny.router.metric("baton_generation_tokens_total") - before == 160


# Case 17.2: ghz cuts a stream after its first message; that is a cancelled call, not an error of ours.
def test_a_client_that_cuts_its_stream_counts_as_cancelled(tiny):
    report = ghz(tiny, "Generate", {"text": "Chapter", "sampling": {"maxTokens": 300, "ignoreEos": True}}, 6, 2,
                 "--stream-call-count=1", "--count-errors")
    assert set(report["statusCodeDistribution"]) <= {"Canceled", "OK"}
    tiny.wait_idle()


def test_reflection_lists_the_services(tiny):
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
    services = ProtoReflectionDescriptorDatabase(tiny.channel).get_services()
    assert "baton.v1.Generation" in services and "grpc.health.v1.Health" in services


def test_promtool_accepts_every_metrics_page(tiny):
    tiny.ids("hello", sampling={"max_tokens": 4})
    for process in tiny.processes:
        page = process.metrics_text()
        run = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
        assert run.returncode == 0 and not run.stderr.strip(), (process.name, run.stdout, run.stderr)
        assert "process_resident_memory_bytes" in page and "baton_build_info" in page


def test_ttft_is_broken_down_by_stage(tiny):
    answer = tiny.stream(tiny.request(ids=[300 + i % 90 for i in range(200)], sampling={"max_tokens": 4, "ignore_eos": True}))
    t = answer.timings
    assert 0 < t.ttft_s < t.e2e_s and 0 < t.prefill_s <= t.ttft_s and 0 < t.prefill_compute_s <= t.prefill_s
    assert 0 < t.append_s < t.prefill_compute_s and t.first_decode_s > 0 and t.handover_exposed_s >= 0
    assert t.kv_bytes > 0 and t.prefill_worker == tiny.prefill[0].address and t.decode_worker == tiny.decode[0].address
    stages = {re.search(r'stage="(\w+)"', key)[1] for key in tiny.router.metrics() if key.startswith("baton_router_ttft_stage_seconds_count")}
    assert {"tokenize", "queue", "reserve", "prefill", "forward"} <= stages


def test_status_names_workers_load_kv_and_transport(tiny):
    tiny.ids("hello", sampling={"max_tokens": 4})
    tiny.wait_idle()
    run = run_baton("status", "--address", tiny.router.address, "--json")
    assert run.returncode == 0, run.stderr
    status = json.loads(run.stdout)
    assert status["serving"] and {w["role"] for w in status["workers"]} == {"prefill", "decode"}
    for worker in status["workers"]:
        assert worker["state"] == "ready" and worker["kv_blocks_total"] == 256 and worker["kv_dtype"] == "fp8"
        assert any(peer["transport"] == "shm" and peer["probe_bytes_per_second"] > 0 for peer in worker["peers"])
    table = run_baton("status", "--address", tiny.router.address)
    assert table.returncode == 0 and "prefill" in table.stdout and "shm" in table.stdout


def test_generate_streams_text_and_prints_one_json_object(tiny):
    plain = run_baton("generate", "--address", tiny.router.address, "--prompt", "In the beginning", "--max-tokens", 12, "--temperature", 0)
    assert plain.returncode == 0 and plain.stdout.strip()
    run = run_baton("generate", "--address", tiny.router.address, "--max-tokens", 12, "--temperature", 0, "--json", stdin="In the beginning")
    answer = json.loads(run.stdout)
    assert answer["text"].strip() == plain.stdout.strip()
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] and answer["finish_reason"] in ("length", "stop")
    assert answer["timings"]["ttft_s"] > 0 and answer["usage"]["prompt_tokens"] > 0
    bad = run_baton("generate", "--address", tiny.router.address, "--prompt", "x", "--top-p", 7)
    assert bad.returncode == 1 and "top_p" in bad.stderr
    nobody = run_baton("generate", "--address", "127.0.0.1:1", "--prompt", "x", "--timeout", "2s")
    assert nobody.returncode == 1 and nobody.stderr
    unknown = run_baton("generate", "--no-such-flag")
    assert unknown.returncode == 2 and "no-such-flag" in unknown.stderr


def test_a_chat_keeps_its_history(pool):
    service = pool.get(SMOLLM2)
    run = run_baton("chat", "--address", service.router.address, "--temperature", 0, "--max-tokens", 16, "--json",
                    stdin="My name is Ada.\nWhat is my name?\n")
    assert run.returncode == 0, run.stderr
    first, second = [json.loads(line) for line in run.stdout.splitlines()]
    # The second prompt is the first, its answer, and the new question.
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    table = run_baton("chat", "--address", service.router.address, "--max-tokens", 4, "--stats", "--message", "Hello")
    assert table.returncode == 0 and all(word in table.stdout for word in ("prompt tokens", "TTFT", "ITL", "KV handed over"))
    service.wait_idle()


def test_help_lists_flags_with_their_defaults():
    for command in ("serve", "generate", "chat", "status", "tokenize", "render"):
        run = run_baton(command, "--help")
        assert run.returncode == 0 and "--" in run.stdout, command
    for binary in ("baton-router", "baton-prefill", "baton-decode"):
        run = subprocess.run([BIN / binary, "--help"], capture_output=True, text=True, timeout=30 * SLOWNESS)
        assert run.returncode == 0 and "--listen" in run.stdout and "Default" in run.stdout


@pytest.mark.parametrize("topology", ["pd", "single"])
def test_serve_starts_everything_and_ctrl_c_stops_it(tmp_path, topology):
    ports = tmp_path / "ports.json"
    serve = subprocess.Popen([BIN / "baton", "serve", "--model", TINY, "--topology", topology, "--prefill", "2", "--decode", "1",
                              "--grpc-port", "0", "--http-port", "0", "--num-blocks", "64", "--kv-dtype", "bf16", "--port-file", ports],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60 * SLOWNESS
        while not ports.exists():
            assert serve.poll() is None and time.monotonic() < deadline, serve.communicate()[1]
            time.sleep(0.02)
        address = f"127.0.0.1:{json.loads(ports.read_text())['grpc']}"
        status = json.loads(run_baton("status", "--address", address, "--json").stdout)
        assert sorted(w["role"] for w in status["workers"]) == (["decode", "prefill", "prefill"] if topology == "pd" else ["decode"])
        assert all(w["kv_dtype"] == "bf16" for w in status["workers"])
        assert run_baton("generate", "--address", address, "--prompt", "And", "--max-tokens", 3).returncode == 0
    finally:
        serve.send_signal(signal.SIGINT)
        output, errors = serve.communicate(timeout=60 * SLOWNESS)
    assert serve.returncode == 0, errors
    children = subprocess.run(["pgrep", "-f", str(ports)], capture_output=True, text=True).stdout
    assert not children.strip()


@pytest.mark.parametrize("flags, words", [(["--topology", "ring"], "pd, single"), (["--model", ""], "--model"), (["--decode", "0"], "--decode"),
                                          (["--kv-dtype", "int3"], "fp8_dynamic")])
def test_serve_refuses_a_bad_setting(flags, words):
    run = run_baton("serve", "--model", TINY, "--grpc-port", 0, "--http-port", 0, *flags)
    assert run.returncode != 0 and words in run.stdout + run.stderr


def test_tokenize_and_render_go_on_after_a_bad_record():
    tokenizer = TINY / "tokenizer.json"
    run = run_baton("tokenize", "--tokenizer", tokenizer, stdin='{"text":"In the beginning"}\nnot json\n{"text":"<|im_end|>"}\n')
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0 and lines[0]["ids"] and lines[1]["error"] and len(lines[2]["ids"]) == 1
    literal = run_baton("tokenize", "--tokenizer", tokenizer, "--literal", stdin='{"text":"<|im_end|>"}\n')
    assert len(json.loads(literal.stdout)["ids"]) > 1
    record = {"template": "qwen3", "messages": [{"role": "user", "content": "hi"}], "tools": None, "add_generation_prompt": True}
    run = run_baton("render", "--tokenizer", tokenizer, stdin=json.dumps(record) + "\n" + json.dumps({**record, "messages": []}) + "\n" + json.dumps(record) + "\n")
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert lines[0]["prompt"].startswith("<|im_start|>user") and lines[0] == lines[2] and lines[1]["error"]
