"""Several calls at a time, the steps of the hand-over as one sees them from outside, and what must hold after a fault."""
import dataclasses
import functools
import random
import threading
import time

import grpc

import harness
from harness import SLOWNESS, Answer, pb_grpc

PROMPT_TOKENS = 320
CHUNK_TOKENS = 64
ANSWER_TOKENS = 24
# Slow enough for every step to be met, on both sides.
PREFILL_DELAY, DECODE_DELAY = "30ms", "15ms"
BLOCKS = 256


wait_until = functools.partial(harness.wait_until, pause=0.003)  # some of what is waited for is over soon


def flags(**more):
    """Of a Service whose steps take their time."""
    settings = {"prefill": 2, "decode": 2, "kv_blocks": BLOCKS,
                "prefill_flags": (f"--test-step-delay={PREFILL_DELAY}", f"--chunk-tokens={CHUNK_TOKENS}", "--test-poison-freed"),
                "decode_flags": (f"--test-step-delay={DECODE_DELAY}", "--test-poison-freed"),
                "router_flags": ("--local-prefill-tokens=0", "--policy=least_load", "--prefill-queue-tokens=0")}
    for name, value in more.items():
        settings[name] = settings.get(name, ()) + value if name.endswith("_flags") else value
    return settings


def sampling(seed):
    chosen = {"temperature": 0} if seed % 3 == 0 else {"temperature": 1.0, "seed": seed, "top_p": 0.95}
    return {**chosen, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}


def request(service, seed, tokens=PROMPT_TOKENS, **more):
    rng = random.Random(seed)
    return service.request(ids=[rng.randrange(1900) for _ in range(tokens)], sampling={**sampling(seed), **more})


@dataclasses.dataclass
class Outcome:
    seed: int
    code: grpc.StatusCode = None  # OK where the answer was whole
    details: str = ""
    ids: tuple = ()  # all that came
    text: str = ""
    retries: int = 0
    seconds: float = 0


class Load:
    """Concurrent streams, each on a connection of its own. `received` counts tokens as they come."""

    def __init__(self, service, seeds, timeout=40, **more):
        self.outcomes = [Outcome(seed) for seed in seeds]
        self.received = 0
        self._lock = threading.Lock()
        self._service, self._timeout, self._more = service, timeout * SLOWNESS, more
        self._channels = [service.new_channel() for _ in seeds]
        self.calls = {}
        self._threads = [threading.Thread(target=self._one, args=pair) for pair in zip(self.outcomes, self._channels)]
        for thread in self._threads:
            thread.start()

    def _one(self, outcome, channel):
        begin, messages = time.monotonic(), []
        try:
            call = pb_grpc.GenerationStub(channel).Generate(request(self._service, outcome.seed, **self._more), timeout=self._timeout)
            self.calls[outcome.seed] = call
            for message in call:
                messages.append(message)
                with self._lock:
                    self.received += len(message.token_ids)
            answer = Answer(messages)  # whole, and every position once
            outcome.code, outcome.retries = grpc.StatusCode.OK, answer.timings.retries
        except grpc.RpcError as error:
            outcome.code, outcome.details = error.code(), error.details()
        except AssertionError as error:
            outcome.details = f"wrong answer: {error}"
        outcome.ids = tuple(i for m in messages for i in m.token_ids)
        outcome.text = "".join(m.text for m in messages)
        outcome.seconds = time.monotonic() - begin

    def join(self):
        for thread in self._threads:
            thread.join(self._timeout + 10 * SLOWNESS)
            assert not thread.is_alive(), "a call outlived its deadline"
        for channel in self._channels:
            channel.close()
        return self.outcomes


class Undisturbed:
    """{seed: (ids, text)} of a service to which nothing happens."""

    def __init__(self):
        self._known = {}

    def learn(self, service, seeds):
        new = [seed for seed in seeds if seed not in self._known]
        if not new:
            return
        for outcome in Load(service, new).join():
            assert outcome.code == grpc.StatusCode.OK, outcome
            self._known[outcome.seed] = (outcome.ids, outcome.text)

    def check(self, outcome, may_fail=()):
        """A whole, right answer; or a beginning of it and one of these codes."""
        ids, text = self._known[outcome.seed]
        if outcome.code == grpc.StatusCode.OK:
            assert (outcome.ids, outcome.text) == (ids, text), outcome
        else:
            assert outcome.code in may_fail, outcome
            assert outcome.ids == ids[:len(outcome.ids)] and text.startswith(outcome.text), outcome


class Steps:
    """Watches workers from the moment it is made, and waits for a step of the hand-over to be reached."""

    NAMES = ("reserved", "mid-transfer", "committed", "first token", "mid-answer")

    def __init__(self, service):
        self._service = service
        self._before = {w.name: w.metrics() for w in service.workers}

    def _grown(self, worker, name, *labels):
        def total(samples):
            return sum(v for k, v in samples.items() if k.split("{")[0] == name and all(label in k for label in labels))
        return total(worker.metrics()) - total(self._before.get(worker.name, {}))

    def wait(self, step, load):
        prefill, decode = self._service.prefill, self._service.decode
        wait_until({
            "reserved": lambda: any(w.metric("baton_kv_blocks", state="reserved") for w in decode),
            # Chunks are on the way, and no prompt is computed to its end.
            "mid-transfer": lambda: any(w.metric("baton_kv_transfer_requests", stage="inflight") and
                                        self._grown(w, "baton_prompt_tokens_total", 'source="computed"') >= CHUNK_TOKENS for w in prefill),
            "committed": lambda: any(self._grown(w, "baton_kv_transfer_bytes_count", 'direction="recv"') for w in decode),
            "first token": lambda: load.received >= 1,
            "mid-answer": lambda: load.received >= len(load.outcomes) * ANSWER_TOKENS // 3,
        }[step], timeout=15, message=f"step {step} was not reached")


def busiest(workers):
    return max(workers, key=lambda w: w.metric("baton_requests_running") + w.metric("baton_requests_waiting") + w.metric("baton_kv_blocks", state="reserved"))


def blocks(worker):
    return {s: worker.metric("baton_kv_blocks", state=s) for s in ("free", "cached", "active", "reserved", "quarantined")}


def check_idle(service, timeout=10):
    """Gauges exactly as before any request, and every block free or kept by the prefix cache alone."""
    service.wait_idle(timeout=timeout)
    for worker in service.workers:
        if worker.popen.poll() is None:
            wait_until(lambda: sum(blocks(worker).values()), message="it does not get ready")  # one that has just been started
            counts = blocks(worker)
            assert counts["free"] + counts["cached"] == BLOCKS, (worker.name, counts)
