"""The CUDA backend inside real workers, where there is no GPU: its host code and kernels run on the emulated device of tests/simt,
whose memory the host cannot touch and whose streams run as late as they may. What it says must be what the cpu backend says."""
import pathlib
import re
import subprocess

import pytest

import harness
from harness import MODELS

EMULATED = harness.BUILD / "emulated"
TINY = MODELS / "tiny-qwen3"
STREAM_SEED = "7"

pytestmark = pytest.mark.skipif(not EMULATED.exists(), reason="built without a CUDA toolkit")

PROMPTS = ["In the beginning God created the heaven and the earth.", "And Moses said unto the people", "The LORD is my shepherd; " * 6,
           "Behold"]
# Logits of the two backends differ by rounding: where the two best tokens are closer than this either may win.
GAP = 0.3


@pytest.fixture
def emulated(pool, monkeypatch):
    """A service with emulated workers, started once a model and topology."""
    monkeypatch.setenv("BATON_EMULATED_STREAMS", STREAM_SEED)

    def get(model, topology="pd", flags=(), **settings):
        return pool.get(model, topology, worker_bin=EMULATED, kv_blocks=40,
                        worker_flags=("--device=cuda", "--weight-dtype=bf16", *flags), **settings)

    return get


def chain_ids(service, prompt, count=20):
    answer = service.stream(service.request(ids=prompt, sampling={"temperature": 0, "max_tokens": count, "ignore_eos": True}))
    return answer.ids()


@pytest.mark.parametrize("topology", ["pd", "single"])
def test_chain_ids_equal_the_cpu_backends(emulated, chain, topology):
    service = emulated(MODELS / "chain", topology)
    for length in [1, 2, 63, 64, 65, 150]:
        prompt = [(7 * i + length) % 700 for i in range(length)]
        assert chain_ids(service, prompt) == chain_ids(chain, prompt), length
    service.wait_idle()


def test_a_second_request_reads_the_cached_prefix_on_the_device(emulated, chain):
    service = emulated(MODELS / "chain")
    prompt = [(3 * i + 5) % 700 for i in range(140)]
    first = chain_ids(service, prompt)
    again = chain_ids(service, prompt + first[:3])
    assert again == chain_ids(chain, prompt + first[:3])
    service.wait_idle()


def greedy(service, prompt):
    sampling = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "logprobs": 2}
    answer = service.stream(service.request(prompt, sampling=sampling))
    return answer.ids(), answer.logprobs[0]


def expect_same(service, reference):
    """Greedy ids equal those of a service on the cpu backend, but where two tokens are as good as each other."""
    same = 0
    for prompt in PROMPTS:
        want, logprobs = greedy(reference, prompt)
        got, _ = greedy(service, prompt)
        same += got == want
        for position, (a, b) in enumerate(zip(got, want)):
            if a == b:
                continue
            top = {entry.token_id: entry.logprob for entry in logprobs[position].top}
            assert a in top and top[b] - top[a] < GAP, (prompt, position, a, b, top)
            break
    assert same >= len(PROMPTS) - 1
    service.wait_idle()


def test_tiny_qwen3_says_the_same_but_where_two_tokens_are_as_good(emulated, tiny):
    expect_same(emulated(TINY), tiny)


def test_decode_steps_are_graphs_and_eager_ones_say_the_same(emulated):
    plain = ("--max-draft-tokens=0",)
    graphs = emulated(TINY, decode_flags=plain)
    eager = emulated(TINY, flags=("--enforce-eager",), decode_flags=plain)
    for prompt in PROMPTS:
        assert greedy(graphs, prompt)[0] == greedy(eager, prompt)[0]
    assert "cuda graph captured" in graphs.decode[0].log()
    assert "cuda graph" not in eager.decode[0].log()


def test_verifies_and_draft_rounds_are_graphs_too(emulated, tiny):
    service = emulated(TINY, decode_flags=("--test-free-drafts", f"--draft-model={MODELS / 'tiny-qwen3-draft'}"))
    expect_same(service, tiny)
    queries = set(re.findall(r"cuda graph captured .* queries=(\d+)", service.decode[0].log()))
    assert "1" in queries and len(queries) > 1, queries


def test_workers_say_which_device_they_compute_on(emulated):
    service = emulated(MODELS / "chain")
    for worker in service.workers:
        assert "cuda emulated" in worker.log()


@pytest.mark.skipif(bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*"))), reason="there is a GPU")
def test_without_a_gpu_the_real_backend_says_so(tmp_path):
    run = subprocess.run([harness.BIN / "baton-decode", f"--model={MODELS / 'chain'}", "--device=cuda", "--listen=127.0.0.1:0",
                          "--http-port=0", f"--port-file={tmp_path / 'ports.json'}"], capture_output=True, text=True, timeout=60)
    assert run.returncode > 0, "a refusal, not a crash"
    assert "cuda: no device to compute on" in run.stdout + run.stderr
