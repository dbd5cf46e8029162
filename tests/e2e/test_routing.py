"""Several workers of each role: where requests go, what happens when workers come, go, fill up or are drained."""
import concurrent.futures
import json
import random
import signal
import time

import grpc
import pytest

import harness
from harness import BIN, MODELS, SLOWNESS, Process, Service, pb, status_of, wait_until

TINY = MODELS / "tiny-qwen3"
BLOCK = 64


def prompt(length, seed):
    rng = random.Random(seed)
    return [rng.randrange(1900) for _ in range(length)]


def worker_status(service, address):
    return next(w for w in service.status().workers if w.address == address)


# Sessions stick where their prefix is: the workers tell the router what they hold.
def test_a_session_stays_with_its_workers_and_sends_no_block_twice():
    with Service(TINY, prefill=2, decode=2, router_flags=("--local-prefill-tokens=0",)) as service:
        sessions = {}
        for session in range(4):
            ids = prompt(200, session)
            for turn in range(3):
                answer = service.stream(service.request(ids=ids, sampling={"temperature": 0, "max_tokens": 70, "ignore_eos": True}))
                pair = (answer.timings.prefill_worker, answer.timings.decode_worker)
                assert sessions.setdefault(session, pair) == pair, f"session {session} turn {turn}"
                if turn > 0:
                    assert answer.usage.cached_prompt_tokens >= len(ids) // 2 // BLOCK * BLOCK
                # What both workers hold is known before the next turn.
                want = (len(ids) + 69) // BLOCK
                wait_until(lambda: worker_status(service, pair[1]).prefix_blocks >= want)
                ids = ids + answer.ids() + prompt(30, 100 * session + turn)
        assert len({pair[0] for pair in sessions.values()}) == 2, "and sessions are spread"
        service.wait_idle()


# What the decode worker holds but for a few tokens is computed there, with the same ids.
def test_decode_computes_the_short_rest_of_a_long_prompt_itself():
    with Service(TINY) as service:
        ids = prompt(400, 5)
        sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        first = service.stream(service.request(ids=ids, sampling=sampling))
        longer = ids + first.ids() + prompt(10, 6)
        decode = service.decode[0].address
        wait_until(lambda: worker_status(service, decode).prefix_blocks >= 6)
        # The prefill worker lacks the answer's block, so its way is the longer one.
        second = service.stream(service.request(ids=longer, sampling=sampling))
        with Service(TINY, topology="single") as alone:
            assert second.ids() == alone.stream(alone.request(ids=longer, sampling=sampling)).ids()
        local = service.router.metric("baton_router_decisions_total", decision="decode-only")
        assert local == (1 if second.timings.prefill_worker == "" else 0)
        service.wait_idle()


@pytest.mark.parametrize("policy", ["prefix", "least_load", "power_of_two", "round_robin"])
def test_every_policy_gives_every_answer_and_uses_all_workers(policy):
    with Service(MODELS / "chain", prefill=2, decode=2, router_flags=(f"--policy={policy}",)) as service:
        request = service.request("E", sampling={"temperature": 0, "max_tokens": 20})
        expected = service.stream(request).ids()
        used = set()
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            for answer in threads.map(lambda _: service.stream(request), range(64)):
                assert answer.ids() == expected
                used |= {answer.timings.prefill_worker, answer.timings.decode_worker}
        assert used - {""} == {w.address for w in service.workers}
        service.wait_idle()


# A full decode worker is waited for, not polled: the requests are queued in the router.
def test_requests_wait_for_blocks_without_being_sent_in_vain():
    with Service(TINY, kv_blocks=16, worker_flags=("--test-step-delay=5ms",)) as service:
        request = service.request(ids=prompt(200, 1), sampling={"temperature": 0, "max_tokens": 40, "ignore_eos": True})
        expected = service.stream(request).ids()
        with concurrent.futures.ThreadPoolExecutor(12) as threads:
            for answer in threads.map(lambda _: service.stream(request), range(12)):
                assert answer.ids() == expected
        assert service.router.metric("baton_router_retries_total", reason="exhausted") <= 12
        refused = service.decode[0].metric("baton_requests_finished_total", finished_reason="error")
        assert refused <= 60, "a few a report at most"
        service.wait_idle()


# Deadlines hold in the queue; what would be late is refused early, with a time to come back.
def test_a_request_that_the_queue_would_make_late_is_refused_at_once():
    with Service(TINY, prefill_flags=("--test-step-delay=300ms",), kv_blocks=512,
                 router_flags=("--local-prefill-tokens=0", "--prefill-queue-tokens=512")) as service:
        def ask(seed, timeout=60):
            return service.stream(service.request(ids=prompt(500, seed), sampling={"max_tokens": 2, "ignore_eos": True}), timeout=timeout)
        for seed in range(9):
            ask(seed)
        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            running = [threads.submit(ask, 100 + i) for i in range(10)]
            wait_until(lambda: service.status().requests_queued >= 7)
            begin = time.monotonic()
            code, details = status_of(lambda: ask(200, timeout=1.5))
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED, details
            assert time.monotonic() - begin < 1.0 * SLOWNESS, "early, not late"
            for future in running:
                future.result()
        assert service.router.metric("baton_router_rejected_total", reason="late") == 1
        status = worker_status(service, service.prefill[0].address)
        assert status.ttft_samples >= 15 and 0.2 < status.ttft_base_s + 500 * status.ttft_per_token_s < 3
        assert service.router.metric("baton_router_ttft_prediction_error_seconds_count") >= 1
        service.wait_idle()


def test_high_priority_goes_first_and_tenants_share():
    with Service(TINY, prefill_flags=("--test-step-delay=100ms",), router_flags=("--prefill-queue-tokens=64", "--local-prefill-tokens=0")) as service:
        order = []

        def ask(name, priority, tenant):
            call = service.stub.Generate(service.request(ids=prompt(100, name), sampling={"max_tokens": 2, "ignore_eos": True}, priority=priority),
                                         metadata=[("x-llm-d-inference-fairness-id", tenant)], timeout=60 * SLOWNESS)
            next(call)
            order.append(name)
            list(call)
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            futures = [threads.submit(ask, f"a{i}", pb.PRIORITY_NORMAL, "a") for i in range(6)]
            wait_until(lambda: service.status().requests_queued >= 4)
            futures += [threads.submit(ask, "b", pb.PRIORITY_NORMAL, "b"), threads.submit(ask, "low", pb.PRIORITY_LOW, "c")]
            wait_until(lambda: service.status().requests_queued >= 6)
            futures.append(threads.submit(ask, "high", pb.PRIORITY_HIGH, "c"))
            for future in futures:
                future.result()
        assert order.index("high") < order.index("b") < order.index("a5") < order.index("low"), order
        service.wait_idle()


# A worker that is drained gets nothing new; what runs there is finished, or moved when its time is over.
@pytest.mark.parametrize("drain, moved", [("60s", False), ("0.3s", True)])
def test_a_drained_decode_worker_loses_nothing(drain, moved):
    with Service(TINY, decode=2, worker_flags=("--test-step-delay=30ms",), decode_flags=(f"--drain-timeout={drain}",),
                 router_flags=("--policy=least_load",)) as service:
        request = service.request("In the day", sampling={"temperature": 1.0, "seed": 3, "max_tokens": 100, "ignore_eos": True})
        expected = service.stream(request).ids()
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(service.stream, request) for _ in range(8)]
            victim = service.decode[0]
            wait_until(lambda: victim.metric("baton_requests_running") >= 2)
            victim.signal(signal.SIGTERM)
            wait_until(lambda: worker_status(service, victim.address).state != "ready")
            later = threads.submit(service.stream, request)
            results = [future.result() for future in answers]
            assert later.result().timings.decode_worker == service.decode[1].address
        assert all(answer.ids() == expected for answer in results)
        assert any(answer.timings.retries > 0 for answer in results) == moved
        assert victim.popen.wait(20 * SLOWNESS) == 0
        service.wait_idle()


# Each of n choices resumes behind its own tokens, with its own noise.
def test_several_choices_survive_the_death_of_their_decode_worker():
    with Service(TINY, prefill=1, decode=2, worker_flags=("--test-step-delay=20ms",)) as service:
        request = service.request("In the day", sampling={"temperature": 1.0, "seed": 11, "n": 4, "max_tokens": 60, "ignore_eos": True})
        expected = service.stream(request)
        call = service.stub.Generate(request, timeout=60 * SLOWNESS)
        messages = [next(call) for _ in range(12)]
        victim = next(w for w in service.decode if w.metric("baton_requests_running") > 0)
        victim.kill()
        answer = harness.Answer(messages + list(call))
        for choice in range(4):
            assert answer.ids(choice) == expected.ids(choice), choice
        assert answer.timings.retries >= 1
        service.wait_idle()


# A stopped process is suspect, not down, and its running calls are left alone; one that goes on is used again.
def test_a_worker_that_is_only_slow_is_suspect_and_comes_back():
    with Service(TINY, decode=2, worker_flags=("--test-step-delay=30ms",), router_flags=("--heartbeat-timeout=500ms", "--policy=least_load")) as service:
        request = service.request("In the day", sampling={"temperature": 1.0, "seed": 3, "max_tokens": 100, "ignore_eos": True})
        short = service.request("In the day", sampling={"max_tokens": 3, "ignore_eos": True})
        expected = service.stream(request).ids()
        call = service.stub.Generate(request, timeout=60 * SLOWNESS)
        first = next(call)  # may come from the prefill worker, before decode begins
        wait_until(lambda: any(w.metric("baton_requests_running") > 0 for w in service.decode))
        victim = next(w for w in service.decode if w.metric("baton_requests_running") > 0)
        victim.signal(signal.SIGSTOP)
        try:
            wait_until(lambda: worker_status(service, victim.address).state == "suspect")
            assert service.status().serving
            for _ in range(3):
                assert service.stream(short).timings.decode_worker != victim.address
        finally:
            victim.signal(signal.SIGCONT)
        rest = list(call)
        assert list(first.token_ids) + [i for m in rest for i in m.token_ids] == expected
        assert rest[-1].finished.timings.retries == 0
        wait_until(lambda: worker_status(service, victim.address).state == "ready")
        service.wait_idle()


# Workers found by name: the addresses behind it are asked for again and again.
def test_workers_are_found_by_name():
    with Service(TINY) as service:
        flags = [f"--prefill=dns:localhost:{service.prefill[0].grpc_port}", f"--decode=dns:localhost:{service.decode[0].grpc_port}"]
        found = Process("router-dns", [BIN / "baton-router", f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=0", *flags],
                        service.directory).wait_ports()
        try:
            channel = grpc.insecure_channel(found.address)
            stub = harness.pb_grpc.GenerationStub(channel)
            wait_until(lambda: stub.GetStatus(pb.GetStatusRequest(), timeout=5).serving, message=found.log())
            messages = list(stub.Generate(service.request("hi", sampling={"max_tokens": 3, "ignore_eos": True}), timeout=30))
            assert sum(len(m.token_ids) for m in messages) == 3
            channel.close()
        finally:
            found.kill()
        service.wait_idle()


def test_status_shows_what_the_router_has_learned(tiny):
    for seed in range(10):
        tiny.ids(ids=prompt(150, 1000 + seed), sampling={"max_tokens": 2, "ignore_eos": True})
    table = harness.run_baton("status", f"--address={tiny.router.address}")
    assert table.returncode == 0, table.stderr
    assert "breaker" in table.stdout and "closed" in table.stdout and "s*n" in table.stdout
    shown = json.loads(harness.run_baton("status", f"--address={tiny.router.address}", "--json").stdout)
    prefill = next(w for w in shown["workers"] if w["role"] == "prefill")
    assert int(prefill["ttft_samples"]) >= 10 and prefill["breaker"] == "closed" and int(prefill["prefix_blocks"]) > 0


# A reader that has stopped is cut off after a limit, and what its request held is free.
def test_a_reader_that_stops_is_cut_off_and_its_blocks_are_freed():
    with Service(TINY, router_flags=("--client-buffer=200",), kv_blocks=512) as service:
        request = service.request(ids=prompt(100, 1), sampling={"max_tokens": 1000, "ignore_eos": True, "n": 16, "seed": 1, "logprobs": 20})
        # A window of 64 KiB that does not grow: what has been sent and not read stays small.
        channel = service.new_channel(**{"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 65535})
        call = harness.pb_grpc.GenerationStub(channel).Generate(request, timeout=100 * SLOWNESS)
        next(call)
        wait_until(lambda: service.router.metric("baton_router_requests_in_flight") == 0, timeout=60, message="still open")
        service.wait_idle()
        with pytest.raises(grpc.RpcError) as error:
            list(call)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
