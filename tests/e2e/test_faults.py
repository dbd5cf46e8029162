"""Processes that die, stand still or are cut off at every step of the protocol, under load: every call ends within its bound with
the right status, or with the whole and undoubled text of an undisturbed run; nothing stays held."""
import itertools
import random
import signal
import subprocess
import sys
import time

import grpc
import pytest

import faults
import harness
from faults import Load, Steps, Undisturbed, check_idle, wait_until
from harness import MODELS, SLOWNESS, Service, status_of
from network import make_network

TINY = MODELS / "tiny-qwen3"
CALLS = 4
ROLES = ("prefill", "decode", "router")
# A process that answers no ping is given up after 15 s (channel.cc); the rest is for going on elsewhere.
GIVEN_UP_S = 15
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE

_seeds = itertools.count(1)


def fresh(count=CALLS):
    """Seeds of prompts that no cache holds yet."""
    return [next(_seeds) for _ in range(count)]


class Bench:
    """The service under faults, and what it must answer."""

    def __init__(self):
        self.service, self.undisturbed = None, Undisturbed()
        self._reference = Service(TINY, "single", kv_blocks=faults.BLOCKS)

    def healthy(self):
        """As it was before any fault; made anew when a test has left it otherwise."""
        try:
            assert self.service is not None and all(p.popen.poll() is None for p in self.service.processes)
            check_idle(self.service, timeout=2)
        except (AssertionError, OSError):
            if self.service is not None:
                self.service.kill()
            self.service = Service(TINY, **faults.flags())
        return self.service

    def learn(self, seeds):
        self.undisturbed.learn(self._reference, seeds)
        return seeds

    def check(self, outcomes, may_fail=(), within=20):
        for outcome in outcomes:
            self.undisturbed.check(outcome, may_fail)
            assert outcome.seconds < within * SLOWNESS, outcome

    def serves_again(self, service, seeds):
        service.wait_serving()
        self.check(Load(service, seeds).join(), within=10)
        check_idle(service)

    def close(self):
        for service in (self.service, self._reference):
            if service is not None:
                service.kill()


@pytest.fixture(scope="module")
def bench():
    made = Bench()
    yield made
    made.close()


def victim_of(service, role):
    return service.router if role == "router" else faults.busiest(getattr(service, role))


def before_reservation(service, role, load):
    """Decode workers stand still, so that nothing is reserved. Returns the victim and who is to go on."""
    wait_until(lambda: service.router.metric("baton_router_requests_in_flight") == len(load.outcomes))
    return {"router": service.router, "prefill": service.prefill[0], "decode": service.decode[0]}[role]


# What `make test` leaves to the long runs.
def long_run(*values):
    return pytest.param(*values, marks=[pytest.mark.slow])


STEPS = ("before reservation", *Steps.NAMES)
KILLS = [(step, role) if (step != "first token" if role != "router" else step in ("mid-transfer", "mid-answer")) else long_run(step, role)
         for step in STEPS for role in ROLES]


# Cases 11.1, 11.2: kill -9 at every step; then the same address again.
@pytest.mark.parametrize("step, role", KILLS)
def test_kill_9_loses_no_answer(bench, step, role):
    service = bench.healthy()
    seeds = bench.learn(fresh())
    held = service.decode if step == "before reservation" else []
    for worker in held:
        worker.signal(signal.SIGSTOP)
    try:
        steps = Steps(service) if not held else None
        load = Load(service, seeds)
        if held:
            victim = before_reservation(service, role, load)
        else:
            steps.wait(step, load)
            victim = victim_of(service, role)
        victim.kill()
    finally:
        for worker in held:
            if worker.popen.poll() is None:
                worker.signal(signal.SIGCONT)
    bench.check(load.join(), may_fail=(UNAVAILABLE,) if role == "router" else ())
    if role == "router":
        assert any(o.code == UNAVAILABLE for o in load.outcomes)
    check_idle(service)
    service.restart(victim)
    bench.serves_again(service, seeds[:2])


# A pause is no death: everything goes on where it stood.
@pytest.mark.parametrize("step, role", [("mid-transfer", "decode") if (step, role) == ("mid-transfer", "decode") else long_run(step, role)
                                        for step in Steps.NAMES for role in ROLES])
def test_a_process_that_stands_still_for_a_moment_disturbs_no_answer(bench, step, role):
    service = bench.healthy()
    seeds = bench.learn(fresh())
    steps, load = Steps(service), Load(service, seeds)
    steps.wait(step, load)
    victim = victim_of(service, role)
    victim.signal(signal.SIGSTOP)
    time.sleep(0.7)  # how long it stands still is the point
    victim.signal(signal.SIGCONT)
    bench.check(load.join())
    check_idle(service)
    bench.serves_again(service, seeds[:2])


# Cases 11.1, 11.2: a stopped worker is given up when it answers no ping; what it held is free again once it goes on.
@pytest.mark.slow
@pytest.mark.parametrize("role", ("prefill", "decode"))
@pytest.mark.parametrize("step", Steps.NAMES)
def test_a_worker_that_stands_still_for_long_loses_no_answer(bench, step, role):
    service = bench.healthy()
    seeds = bench.learn(fresh())
    steps, load = Steps(service), Load(service, seeds)
    steps.wait(step, load)
    victim = victim_of(service, role)
    victim.signal(signal.SIGSTOP)
    try:
        bench.check(load.join(), within=GIVEN_UP_S + 10)
        # Later calls do not wait for it, once its silence has been noticed.
        wait_until(lambda: any(w.state in ("suspect", "down") for w in service.status().workers))
        bench.check(Load(service, bench.learn(fresh(2))).join(), within=5)
    finally:
        victim.signal(signal.SIGCONT)
    check_idle(service)
    bench.serves_again(service, seeds[:2])


@pytest.fixture
def apart(bench):
    """Every process on a host of its own."""
    with Service(TINY, network=make_network(), **faults.flags(worker_flags=("--kv-transport=tcp",))) as service:
        yield service


# One prefill worker stands still and the host of a decode worker is cut off: nobody says so, and no answer is lost.
def test_a_stopped_worker_and_a_cut_host_lose_no_answer(bench, apart):
    seeds = bench.learn(fresh())
    steps, load = Steps(apart), Load(apart, seeds)
    steps.wait("mid-transfer", load)
    stopped, cut = victim_of(apart, "prefill"), victim_of(apart, "decode")
    stopped.signal(signal.SIGSTOP)
    apart.network.cut(cut)
    try:
        bench.check(load.join(), within=GIVEN_UP_S + 10)
        assert any(o.retries > 0 for o in load.outcomes)
        bench.check(Load(apart, seeds[:2]).join(), within=5)
    finally:
        stopped.signal(signal.SIGCONT)
        apart.network.mend(cut)
    check_idle(apart)
    wait_until(lambda: sum(w.state == "ready" for w in apart.status().workers) == 4)
    bench.serves_again(apart, seeds[:2])


@pytest.mark.slow
@pytest.mark.parametrize("role", ("prefill", "decode"))
@pytest.mark.parametrize("step", Steps.NAMES)
def test_a_cut_host_loses_no_answer_and_frees_what_it_held(bench, apart, step, role):
    seeds = bench.learn(fresh())
    steps, load = Steps(apart), Load(apart, seeds)
    steps.wait(step, load)
    cut = victim_of(apart, role)
    apart.network.cut(cut)
    bench.check(load.join(), within=GIVEN_UP_S + 10)
    # Its blocks are free before it is heard of again: it has noticed by itself.
    wait_until(lambda: held_on(apart, cut) == {}, timeout=GIVEN_UP_S + 10, message=f"{held_on(apart, cut)}")
    apart.network.mend(cut)
    check_idle(apart)
    wait_until(lambda: sum(w.state == "ready" for w in apart.status().workers) == 4)
    bench.serves_again(apart, seeds[:2])


def held_on(service, process):
    """Blocks in use, as the process's own host sees it."""
    lines = [line for line in service.network.metrics_text(process).splitlines() if line.startswith("baton_kv_blocks{")]
    return {line: 1 for line in lines if not line.endswith(" 0") and any(f'state="{s}"' in line for s in ("active", "reserved", "quarantined"))}


# The router's host is gone: clients have their own deadlines, and workers let go of everything without being told.
@pytest.mark.slow
@pytest.mark.parametrize("step", Steps.NAMES)
def test_a_cut_router_leaves_nothing_behind_on_the_workers(bench, apart, step):
    seeds = bench.learn(fresh())
    steps, load = Steps(apart), Load(apart, seeds, timeout=3, max_tokens=1000)
    steps.wait(step, load)
    apart.network.cut(apart.router)
    assert {o.code for o in load.join()} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    for worker in apart.workers:
        wait_until(lambda: held_on(apart, worker) == {}, timeout=GIVEN_UP_S + 10, message=f"{worker.name} {held_on(apart, worker)}")
    apart.network.mend(apart.router)
    wait_until(lambda: sum(w.state == "ready" for w in apart.status().workers) == 4)
    bench.serves_again(apart, seeds[:2])


# Case 11.2: decode dies or stands still in mid-transfer, again and again; prefill gets its blocks back and serves the next.
@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_prefill_gets_its_blocks_back_whatever_happens_to_decode(bench, rounds):
    with Service(TINY, **faults.flags(prefill=1, decode=1)) as service:
        for turn in range(rounds):
            seeds = bench.learn(fresh(2))
            steps, load = Steps(service), Load(service, seeds)
            steps.wait("mid-transfer", load)
            victim = service.decode[0]
            victim.signal(signal.SIGSTOP)
            if turn % 2:  # the client leaves meanwhile
                for call in load.calls.values():
                    call.cancel()
                wait_until(lambda: service.prefill[0].metric("baton_requests_running") == 0)
                victim.signal(signal.SIGCONT)
                bench.check(load.join(), may_fail=(grpc.StatusCode.CANCELLED,))
            else:
                victim.kill()
                bench.check(load.join(), may_fail=(UNAVAILABLE,))
                service.restart(victim)
            check_idle(service)
            bench.serves_again(service, seeds[:1])


# Case 11.3: blocks that a stopped process may still write into are nobody's until it has said that it is quiet.
@pytest.mark.parametrize("transport", ("shm", "tcp"))
def test_blocks_with_a_writer_that_stands_still_go_to_nobody(bench, transport):
    tight = faults.flags(decode=1, worker_flags=(f"--kv-transport={transport}",), decode_flags=("--num-blocks=14",),
                         router_flags=("--heartbeat-timeout=500ms",))
    with Service(TINY, **tight) as service:
        decode = service.decode[0]
        seeds = bench.learn(fresh(3))
        steps, load = Steps(service), Load(service, seeds[:1])
        steps.wait("mid-transfer", load)
        writer = faults.busiest(service.prefill)
        writer.signal(signal.SIGSTOP)
        try:
            load.calls[seeds[0]].cancel()
            load.join()
            if transport == "shm":  # over tcp the decode worker writes itself, and stops
                wait_until(lambda: decode.metric("baton_kv_blocks", state="quarantined") > 0)
            wait_until(lambda: any(w.state == "suspect" for w in service.status().workers))
            others = Load(service, seeds[1:])
            # One of them finds room beside the blocks in quarantine.
            wait_until(lambda: any(o.code for o in others.outcomes))
            if transport == "shm":
                assert decode.metric("baton_kv_blocks", state="quarantined") > 0
        finally:
            writer.signal(signal.SIGCONT)
        bench.check(others.join())
        service.wait_idle()
        assert sum(faults.blocks(decode).values()) == 14


# Case 11.6: the same address, another process, under load.
@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=[pytest.mark.slow])])
def test_a_worker_restarted_on_its_address_serves_at_once(bench, rounds):
    with Service(TINY, **faults.flags(prefill=1, decode=1)) as service:
        bench.learn(seeds := fresh(8))
        for role in ("decode", "prefill") * rounds:
            load = Load(service, seeds[:4])
            Steps(service).wait("mid-answer", load)
            victim = victim_of(service, role)
            victim.kill()
            begin = time.monotonic()
            bench.check(load.join(), may_fail=(UNAVAILABLE,))
            again = service.restart(victim)
            wait_until(lambda: again.http_status("/ready") == 200)
            service.wait_serving(timeout=10)
            bench.check(Load(service, seeds[4:]).join(), within=10)
            assert time.monotonic() - begin < 20 * SLOWNESS
            check_idle(service)


# Case 11.7: what prefill refuses or breaks off reaches the client unchanged, and decode lets go.
def test_what_prefill_refuses_reaches_the_client_and_decode_lets_go(bench, tmp_path):
    with Service(TINY, **faults.flags(prefill=1, decode=1, prefill_flags=("--max-model-len=200",))) as service:
        code, details = status_of(lambda: service.stream(faults.request(service, 1, tokens=300)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT and "300" in details, details
        check_idle(service)
        seed = fresh(1)[0]
        assert len(service.stream(faults.request(service, seed, tokens=150)).ids()) == faults.ANSWER_TOKENS
    # Blocks are on the way when the last chunk gives no finite logits.
    make_chain = [sys.executable, harness.ROOT / "scripts/models/make_chain.py", "--out", tmp_path / "bad", "--poison", "token:E"]
    subprocess.run(make_chain, check=True)
    with Service(tmp_path / "bad", prefill_flags=("--chunk-tokens=64", "--test-step-delay=20ms"), router_flags=("--local-prefill-tokens=0",)) as service:
        good = service.request("L", sampling={"temperature": 0, "max_tokens": 30})
        expected = service.ids("L", sampling={"temperature": 0, "max_tokens": 30})
        code, details = status_of(lambda: service.stream(service.request("L" * 200 + "E", sampling={"max_tokens": 4})))
        assert code == grpc.StatusCode.INTERNAL, details
        service.wait_idle()
        assert service.stream(good).ids() == expected


# Case 3.2: requests whose deadline passes in the queue are not computed, and the queue is empty as soon as the burst is over.
def test_requests_whose_deadline_passes_in_the_queue_are_not_computed():
    burst, tokens = 60, 128
    with Service(TINY, **faults.flags(prefill=1, decode=1, prefill_flags=("--test-step-delay=60ms",),
                                      router_flags=("--prefill-queue-tokens=128", "--refuse-late=false"))) as service:
        service.stream(faults.request(service, 10_000, tokens=tokens, max_tokens=2))
        prefill, router = service.prefill[0], service.router

        def computed():
            return prefill.metric("baton_prompt_tokens_total", source="computed") + prefill.metric("baton_prompt_tokens_total", source="cached")
        before, sent_before = computed(), router.metric("baton_router_decisions_total")
        stub = service.stub
        calls = [stub.Generate(faults.request(service, 10_001 + i, tokens=tokens, max_tokens=2), timeout=0.4 * SLOWNESS) for i in range(burst)]
        codes = []
        for call in calls:
            try:
                list(call)
                codes.append(grpc.StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED}
        assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) > burst // 2
        wait_until(lambda: router.metric("baton_router_queue_depth") == 0, timeout=1)
        service.wait_idle()
        sent = router.metric("baton_router_decisions_total") - sent_before
        assert sent < burst / 2 and computed() - before <= sent * tokens
        # An answer may be whole in the router in the moment in which its client gives up; nothing else may differ.
        ok, late = (router.metric("baton_router_requests_total", code=code) for code in ("OK", "DEADLINE_EXCEEDED"))
        assert ok + late == router.metric("baton_router_requests_total") == burst + 1
        assert burst // 2 < late <= codes.count(grpc.StatusCode.DEADLINE_EXCEEDED)


# Everything at once, by chance: the seed is in the message of a failure.
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chance", range(12))
def test_random_faults_under_random_load(bench, chance):
    rng = random.Random(chance)
    service = bench.healthy()
    for _ in range(6):
        seeds = bench.learn(fresh(rng.randrange(2, 8)))
        steps, load = Steps(service), Load(service, seeds, timeout=60)
        steps.wait(rng.choice(Steps.NAMES), load)
        time.sleep(rng.random() * 0.1)  # anywhere in the step
        role = rng.choice(ROLES)
        victim = rng.choice(getattr(service, role)) if role != "router" else service.router
        may_fail = []
        for seed in rng.sample(seeds, rng.randrange(2)):
            load.calls[seed].cancel()
            may_fail.append(grpc.StatusCode.CANCELLED)
        if rng.random() < 0.6:
            victim.kill()
            may_fail += [UNAVAILABLE] if role == "router" else []
        else:
            victim.signal(signal.SIGSTOP)
            time.sleep(rng.random() * 3)
            victim.signal(signal.SIGCONT)
        bench.check(load.join(), may_fail=may_fail, within=30)
        check_idle(service)
        if victim.popen.poll() is not None:
            service.restart(victim)
        bench.serves_again(service, seeds[:2])
