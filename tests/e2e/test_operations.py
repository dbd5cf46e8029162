"""What operators see of a request and of a process: log lines, trailers, traces, the probes' port, vLLM's names."""
import json
import re
import subprocess
import time

import grpc
import pytest

import harness
from harness import BIN, MODELS, SLOWNESS, Service

TINY = MODELS / "tiny-qwen3"
TRACE = "0af7651916cd43dd8448eb211c80319c"
STAGES = ["queue", "tokenize", "prefill", "prefill_queue", "prefill_compute", "append", "ttft", "handover", "first_decode", "itl_mean", "e2e"]


def request_lines(process, request_id):
    return [line for line in process.log().splitlines() if f"request_id={request_id}" in line and re.search(r": request( failed)? ", line)]


def wait_for(condition, what, timeout=10):
    deadline = time.monotonic() + timeout * SLOWNESS
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def fields(line):
    return dict(re.findall(r'(\w+)=("[^"]*"|\S+)', line))


def test_each_request_ends_with_one_line_that_holds_its_timeline(tiny):
    answer = tiny.stream(tiny.request("In the beginning", sampling={"max_tokens": 5, "ignore_eos": True}, request_label="nightly"))
    request_id = answer.messages[0].request_id
    lines = wait_for(lambda: request_lines(tiny.router, request_id), "a line")
    line = fields(lines[0])
    assert len(lines) == 1 and line["code"] == "OK" and line["label"] == "nightly" and line["completion_tokens"] == "5"
    assert line["prefill_worker"] == tiny.prefill[0].address and line["decode_worker"] == tiny.decode[0].address and line["kv_transport"] == "shm"
    assert all(float(line[f"{stage}_ms"]) >= 0 for stage in STAGES)
    assert abs(float(line["ttft_ms"]) - 1e3 * answer.timings.ttft_s) < 0.01
    assert "beginning" not in lines[0], "no text of prompts in logs"


def test_a_failed_request_has_its_line_too(tiny):
    call = tiny.stub.Generate(tiny.request("x", sampling={"top_p": 9.0}))
    with pytest.raises(grpc.RpcError):
        next(call)
    request_id = dict(call.initial_metadata())["x-request-id"]
    line = fields(wait_for(lambda: request_lines(tiny.router, request_id), "a line")[0])
    assert line["code"] == "INVALID_ARGUMENT" and "top_p" in line["message"]


@pytest.mark.parametrize("unary", [False, True], ids=["stream", "unary"])
def test_timings_come_as_a_trailer(tiny, unary):
    request = tiny.request("In the", sampling={"max_tokens": 4, "ignore_eos": True})
    if unary:
        _, call = tiny.stub.GenerateUnary.with_call(request, timeout=60)
    else:
        call = tiny.stub.Generate(request, timeout=60)
        list(call)
    timing = dict(call.trailing_metadata())["baton-server-timing"]
    values = {name: float(value) for name, value in re.findall(r"(\w+);dur=([0-9.]+)", timing)}
    assert list(values) == STAGES and 0 < values["ttft"] <= values["e2e"]


def test_a_trace_goes_through(tiny):
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    call = tiny.stub.Generate(tiny.request("In the", sampling={"max_tokens": 3, "ignore_eos": True}), timeout=60, metadata=[("traceparent", parent)])
    request_id = next(call).request_id
    list(call)
    back = dict(call.initial_metadata())["traceparent"]
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", back) and back != parent
    assert fields(wait_for(lambda: request_lines(tiny.router, request_id), "a line")[0])["trace_id"] == TRACE
    plain = tiny.stub.Generate(tiny.request("In the", sampling={"max_tokens": 1}), timeout=60, metadata=[("traceparent", "nonsense")])
    list(plain)
    assert "traceparent" not in dict(plain.initial_metadata())


# Case 16.1, on the port that probes use.
def test_probes_have_a_port_of_their_own():
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    with Service(TINY, worker_flags=("--health-port=0", f"--test-load-delay={2 * SLOWNESS:g}s"), router_flags=("--health-port=0",), wait=False) as service:
        probes = []
        for process in service.processes:
            port = json.loads(process.port_file.read_text())["health"]
            stub = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
            ready = "baton.v1.Generation" if process is service.router else "readiness"
            probes.append(lambda name, stub=stub, ready=ready: stub.Check(health_pb2.HealthCheckRequest(service=name or ready), timeout=5).status)
        for probe in probes:
            assert probe("liveness") == health_pb2.HealthCheckResponse.SERVING
            assert probe("") == health_pb2.HealthCheckResponse.NOT_SERVING
        for probe in probes:
            wait_for(lambda: probe("") == health_pb2.HealthCheckResponse.SERVING, "ready", 30)


def test_vllm_names_are_there_when_asked_for_and_agree():
    with Service(TINY, worker_flags=("--metrics-compat=vllm",), router_flags=("--metrics-compat=vllm",)) as service:
        service.ids("In the beginning", sampling={"max_tokens": 6, "ignore_eos": True})
        service.wait_idle()
        decode, router = service.decode[0], service.router
        assert decode.metric("vllm:generation_tokens_total") == decode.metric("baton_generation_tokens_total") > 0
        assert router.metric("vllm:time_to_first_token_seconds_count") == router.metric("baton_router_time_to_first_token_seconds_count") == 1
        assert decode.metric("vllm:nixl_bytes_transferred_sum") == decode.metric("baton_kv_transfer_bytes_sum", direction="recv") > 0
        info = next(key for key in decode.metrics() if key.startswith("vllm:cache_config_info"))
        assert 'block_size="64"' in info and 'num_gpu_blocks="256"' in info and 'engine="0"' in info
        assert not any(key.startswith("vllm:") for key in service.prefill[0].metrics() if "role=" in key)


@pytest.mark.parametrize("binary", ["baton-router", "baton-prefill"])
def test_an_unknown_compatibility_is_refused(binary):
    flags = ["--topology=single", "--decode=127.0.0.1:1"] if binary == "baton-router" else []
    run = subprocess.run([BIN / binary, f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=0", "--metrics-compat=tgi", *flags],
                         capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert run.returncode > 0 and "vllm" in run.stderr
