"""Starting, draining, cancelling, failing: nothing lost, nothing leaked, nobody else disturbed."""
import concurrent.futures
import random
import re
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest

import harness
from harness import BIN, MODELS, ROOT, SLOWNESS, SMOLLM2, Process, Service, pb, status_of

TINY = MODELS / "tiny-qwen3"


def outcome_counts(service):
    finished = {}
    for worker in [service.router]:
        for key, value in worker.metrics().items():
            match = re.match(r'baton_router_requests_total\{(.*)\}', key)
            if match and value:
                code = re.search(r'code="([^"]*)"', match[1])[1]
                finished[code] = finished.get(code, 0) + value
    return finished


# Case 3.1
@pytest.mark.parametrize("count", [pytest.param(200, id="short"), pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_cancelled_requests_leave_no_block_behind(pool, count):
    service = pool.get(TINY)
    service.wait_idle()
    rng = random.Random(4)

    def one(i):
        request = service.request(f"Verse {i % 17} and the", sampling={"max_tokens": 1 + i % 24, "seed": i})
        cancel_after = rng.random() * 0.05 if rng.random() < 0.3 else None
        call = (service.stub.Generate if i % 2 else service.stub.GenerateUnary.future)(request, timeout=60 * SLOWNESS)
        timer = None
        if cancel_after is not None:
            timer = threading.Timer(cancel_after, call.cancel)
            timer.start()
        try:
            list(call) if i % 2 else call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            assert cancel_after is not None, "a call that nobody cancelled failed"
        finally:
            if timer:
                timer.cancel()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(count)))
    service.wait_idle()
    for worker in service.workers:
        blocks = {s: worker.metric("baton_kv_blocks", state=s) for s in ("free", "cached", "active", "reserved", "quarantined")}
        assert blocks["free"] + blocks["cached"] == 256, (worker.name, blocks)


# Case 15.1
def test_gauges_return_to_zero_after_everything_is_cancelled(pool):
    service = pool.get(TINY)
    calls = [service.stub.Generate(service.request(f"{i} In the", sampling={"max_tokens": 500, "ignore_eos": True}), timeout=60 * SLOWNESS) for i in range(50)]
    next(calls[0])
    for call in calls:
        call.cancel()
    service.wait_idle(timeout=5)


# Case 15.2
def test_every_request_has_exactly_one_outcome(pool):
    service = pool.get(TINY)
    service.wait_idle()
    before = outcome_counts(service)
    for i in range(5):
        service.stream(service.request(f"{i} and", sampling={"max_tokens": 3, "ignore_eos": True}))
    for i in range(5):
        status_of(lambda: service.stream(service.request("x", sampling={"top_p": 9.0})))
    for i in range(5):
        call = service.stub.Generate(service.request("so", sampling={"max_tokens": 800, "ignore_eos": True}), timeout=60 * SLOWNESS)
        next(call)
        call.cancel()
    # A deadline travels as what is left of it, so the server's ends later by the time the call was under way, and the
    # client's own cancel comes first; the router takes that for the deadline within half of the time given, here 1.5 s.
    endless = service.request("so", sampling={"max_tokens": 8000, "ignore_eos": True, "n": 4})
    with concurrent.futures.ThreadPoolExecutor(5) as threads:
        late = [threads.submit(status_of, lambda: service.stub.Generate(endless, timeout=3)) for i in range(5)]
        assert [call.result()[0] for call in late] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 5
    service.wait_idle()
    after = outcome_counts(service)
    grown = {code: after[code] - before.get(code, 0) for code in after if after[code] != before.get(code, 0)}
    assert grown == {"OK": 5, "INVALID_ARGUMENT": 5, "CANCELLED": 5, "DEADLINE_EXCEEDED": 5}


# Case 15.3
def test_ttft_is_measured_for_streams_and_unary_calls_alike(pool):
    service = pool.get(TINY)
    methods = ("generate", "generate_unary")

    def counts():
        return [service.router.metric("baton_router_time_to_first_token_seconds_count", method=method) for method in methods]
    for call in (service.stream, service.unary):
        call(service.request("once, so that both series are there", sampling={"max_tokens": 2}))
    before = counts()
    for i in range(10):
        service.stream(service.request(f"{i} and", sampling={"max_tokens": 30, "ignore_eos": True}))
    for i in range(10):
        reply = service.unary(service.request(f"{i} or", sampling={"max_tokens": 30, "ignore_eos": True}))
        assert 0 < reply.timings.ttft_s < reply.timings.e2e_s
    assert [now - then for now, then in zip(counts(), before)] == [10, 10]


# Case 16.1
def test_nothing_is_ready_while_a_model_loads_and_the_first_serving_call_succeeds():
    with Service(TINY, wait=False, worker_flags=("--test-load-delay=3s",)) as service:
        assert not service.status().serving
        assert service.router.http_status("/health") == 200 and service.router.http_status("/ready") == 503
        for worker in service.workers:
            assert worker.http_status("/health") == 200 and worker.http_status("/ready") == 503
        code, _ = status_of(lambda: service.stream(service.request("hi", sampling={"max_tokens": 2})))
        assert code == grpc.StatusCode.UNAVAILABLE
        service.wait_serving()
        assert len(service.ids("hi", sampling={"max_tokens": 2, "ignore_eos": True})) == 2
        assert service.router.http_status("/ready") == 200


# Case 16.1, as a Kubernetes probe sees it: Check, and Watch sends changes.
def test_health_check_and_watch_follow_readiness():
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    with Service(TINY, wait=False, worker_flags=("--test-load-delay=2s",)) as service:
        health = health_pb2_grpc.HealthStub(service.channel)
        request = health_pb2.HealthCheckRequest(service="baton.v1.Generation")
        assert health.Check(request).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert health.Check(health_pb2.HealthCheckRequest(service="")).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(request, timeout=60 * SLOWNESS)
        seen = [next(watch).status]
        while seen[-1] != health_pb2.HealthCheckResponse.SERVING:
            seen.append(next(watch).status)
        assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]
        watch.cancel()
        code, _ = status_of(lambda: health.Check(health_pb2.HealthCheckRequest(service="nobody")))
        assert code == grpc.StatusCode.NOT_FOUND


# Case 16.2
@pytest.mark.parametrize("victim", ["router", "prefill", "decode"])
def test_sigterm_lets_running_streams_finish(victim):
    with Service(TINY) as service:
        request = service.request("In the day", sampling={"temperature": 0, "max_tokens": 60, "ignore_eos": True})
        expected = service.stream(request).ids()
        calls = [service.stub.Generate(request, timeout=60 * SLOWNESS) for _ in range(10)]
        firsts = [next(call) for call in calls]
        process = {"router": service.router, "prefill": service.prefill[0], "decode": service.decode[0]}[victim]
        process.signal(signal.SIGTERM)
        deadline = time.monotonic() + 10 * SLOWNESS
        refused = None
        while refused is None and time.monotonic() < deadline:
            try:
                list(service.new_channel() and service.stub.Generate(service.request("new", sampling={"max_tokens": 1 if victim == "router" else 3}), timeout=10 * SLOWNESS))
            except grpc.RpcError as error:
                refused = error.code()
        assert refused == grpc.StatusCode.UNAVAILABLE
        for first, call in zip(firsts, calls):
            assert list(first.token_ids) + [i for m in call for i in m.token_ids] == expected
        assert process.popen.wait(20 * SLOWNESS) == 0


def test_stopping_everything_exits_with_zero():
    service = Service(TINY)
    service.ids("hi", sampling={"max_tokens": 3})
    assert set(service.stop().values()) == {0}


# Case 18.2
@pytest.mark.parametrize("binary, flag, accepted", [
    ("baton-decode", "--kv-dtype=fp8_e5m2", "fp8_dynamic"), ("baton-decode", "--kv-dtype=int3", "fp8_dynamic"),
    ("baton-decode", "--kv-dtype=FP8 ", "fp8_dynamic"), ("baton-prefill", "--weight-dtype=fp4", "int8"),
    ("baton-prefill", "--device=tpu", "cpu"), ("baton-prefill", "--kv-transport=pigeon", "tcp"), ("baton-decode", "--cpu-isa=sse2", "avx2"),
    ("baton-decode", "--no-such-flag=1", "no-such-flag"), ("baton-router", "--topology=ring", "single"),
    ("baton-router", "--no-such-flag=1", "no-such-flag"), ("baton-decode", "--max-model-len=10000000", "max"),
])
def test_a_bad_setting_stops_the_start_naming_what_is_accepted(binary, flag, accepted, tmp_path):
    run = subprocess.run([BIN / binary, f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=0", flag],
                         capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert run.returncode != 0
    assert accepted in run.stdout + run.stderr, run.stderr
    assert "Aborted" not in run.stderr and run.returncode > 0, run.stderr


# Case 18.2
def test_cuda_on_a_machine_without_it_is_refused_by_name():
    run = subprocess.run([BIN / "baton-decode", f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=0", "--device=cuda"],
                         capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert run.returncode > 0 and "cuda" in run.stderr


def test_what_is_running_names_the_device_in_use_not_the_one_asked_for():
    with Service(TINY, worker_flags=("--device=auto",)) as service:
        for worker in service.workers:
            used = re.search(r"device requested=auto backend=(\w+)", worker.log())[1]
            build = [key for key in worker.metrics() if key.startswith("baton_build_info{")]
            assert used in ("cpu", "cuda") and len(build) == 1 and f'backend="{used}"' in build[0] and "auto" not in build[0], build


@pytest.mark.parametrize("path", ["/nonexistent", "/etc/hostname", "/dev/null"])
@pytest.mark.parametrize("binary", ["baton-prefill", "baton-decode", "baton-router"])
def test_a_bad_model_path_stops_the_start(binary, path):
    flags = ["--topology=single", "--decode=127.0.0.1:1"] if binary == "baton-router" else []
    run = subprocess.run([BIN / binary, f"--model={path}", "--listen=127.0.0.1:0", "--http-port=0", *flags],
                         capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert run.returncode > 0 and path in run.stderr, run.stderr


# Case 5.3
@pytest.mark.parametrize("poison", ["nan", "huge"])
def test_non_finite_logits_end_that_request_with_internal(tmp_path, poison):
    subprocess.run([sys.executable, ROOT / "scripts/models/make_chain.py", "--out", tmp_path / "bad", "--poison", poison], check=True)
    with Service(tmp_path / "bad") as service:
        for topology_repeat in range(2):
            code, _ = status_of(lambda: service.stream(service.request("E", sampling={"max_tokens": 4})))
            assert code == grpc.StatusCode.INTERNAL
        counted = sum(w.metric("baton_nan_logits_total") for w in service.workers)
        assert counted >= 2
        service.wait_idle()
        assert all(p.popen.poll() is None for p in service.processes)


# Case 5.3: only the request that meets the bad weight.
def test_one_poisoned_request_does_not_disturb_its_neighbours(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts/models/make_chain.py", "--out", tmp_path / "bad", "--poison", "token:E"], check=True)
    with Service(tmp_path / "bad") as service:
        healthy = service.request("L", sampling={"temperature": 0, "max_tokens": 80})
        expected = service.stream(healthy).ids()
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            good = [threads.submit(lambda: service.stream(healthy).ids()) for _ in range(3)]
            bad = threads.submit(lambda: status_of(lambda: service.stream(service.request("E", sampling={"max_tokens": 4}))))
            assert bad.result()[0] == grpc.StatusCode.INTERNAL
            assert all(g.result() == expected for g in good)
        service.wait_idle()


# Case 17.1. gRPC's default server forgives two pings that come too early, so there are more of them than that.
@pytest.mark.parametrize("silence, interval", [pytest.param("27s", 6_000, id="short"),
                                               pytest.param("60s", 10_000, marks=[pytest.mark.slow])])
def test_keepalive_pings_during_a_silent_prefill_are_tolerated(silence, interval):
    with Service(TINY, prefill_flags=(f"--test-step-delay={silence}",)) as service:
        channel = service.new_channel(**{"grpc.keepalive_time_ms": interval, "grpc.keepalive_timeout_ms": 5_000,
                                         "grpc.http2.max_pings_without_data": 0, "grpc.keepalive_permit_without_calls": 1})
        stub = harness.pb_grpc.GenerationStub(channel)
        assert len(list(stub.Generate(service.request("hi", sampling={"max_tokens": 3, "ignore_eos": True}), timeout=200 * SLOWNESS))) > 0
        channel.close()


def test_a_dead_worker_makes_the_service_unavailable_and_its_return_heals_it():
    with Service(TINY) as service:
        service.ids("hi", sampling={"max_tokens": 3})
        dead = service.prefill[0]
        port = dead.grpc_port
        dead.kill()
        deadline = time.monotonic() + 20 * SLOWNESS
        while service.status().serving and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not service.status().serving
        code, _ = status_of(lambda: service.stream(service.request("hi", sampling={"max_tokens": 3})))
        assert code == grpc.StatusCode.UNAVAILABLE
        argv = [a for a in dead.argv if not a.startswith(("--listen", "--port-file"))] + [f"--listen=127.0.0.1:{port}"]
        dead.port_file.unlink(missing_ok=True)
        service.prefill[0] = Process("prefill-again", argv, service.directory).wait_ports()
        service.wait_serving(timeout=30)
        assert len(service.ids("hi", sampling={"max_tokens": 3, "ignore_eos": True})) == 3
        service.wait_idle()


# The sender dies in the middle: the decode side frees what it had promised.
def test_a_prefill_worker_killed_in_mid_request_leaves_nothing_reserved():
    with Service(TINY, prefill_flags=("--test-step-delay=500ms",)) as service:
        call = service.stub.Generate(service.request(ids=[300] * 900, sampling={"max_tokens": 5}), timeout=30 * SLOWNESS)
        time.sleep(0.3)
        service.prefill[0].kill()
        code, _ = status_of(lambda: call)
        assert code == grpc.StatusCode.UNAVAILABLE
        service.wait_idle()
