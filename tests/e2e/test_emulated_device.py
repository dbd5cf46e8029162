"""The CUDA backend inside real workers, where there is no GPU: its host code and kernels run on the emulated device of tests/simt,
whose memory the host cannot touch and whose streams run as late as they may. What it says must be what the cpu backend says."""
import os
import pathlib
import re
import subprocess
import time

import grpc
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
    assert "draft rounds are chained on the device" in service.decode[0].log()


# What a request can ask of a draw. The emulated device draws as a part of the step; the logits stay there.
LIKELY = {5: 30, 17: 30, 40: 30, 99: 30}  # far likelier than the rest, so that they come again and again
DRAWS = {
    "temperature": {"temperature": 8, "seed": 3},
    "filters": {"temperature": 9, "top_p": 0.8, "top_k": 300, "min_p": 0.01, "seed": 4},
    "penalties": {"temperature": 1.5, "logit_bias": LIKELY, "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1, "seed": 5},
    "greedy penalties": {"temperature": 0, "logit_bias": LIKELY, "presence_penalty": 1, "frequency_penalty": 2},
    "bias": {"temperature": 1.5, "logit_bias": {**LIKELY, 100: -100}, "seed": 6},
    "stop ids": {"temperature": 8, "stop_token_ids": list(range(0, 700, 7)), "seed": 8},
    "min tokens": {"temperature": 8, "stop_token_ids": list(range(0, 700, 4)), "min_tokens": 6, "seed": 7},
    "logprobs": {"temperature": 1.5, "logprobs": 4, "seed": 9},
}


def drawn(service, sampling, prompt):
    return service.stream(service.request(ids=prompt, sampling={"max_tokens": 12, "ignore_eos": True, **sampling}))


def rows_drawn(service, place):
    return [worker.metric("baton_sampled_rows_total", place=place) for worker in service.workers]


DRAFTS = ("--test-free-drafts", "--max-draft-tokens=3")


@pytest.mark.parametrize("drafts", [(), DRAFTS, (*DRAFTS, f"--draft-model={MODELS / 'chain-draft'}")], ids=["plain", "drafts", "draft model"])
def test_tokens_are_drawn_on_the_device_and_are_the_cpu_backends(emulated, chain, drafts):
    service = emulated(MODELS / "chain", decode_flags=drafts or ("--max-draft-tokens=0",))
    prompt = chain_prompt(70)
    greedy_ids = chain_ids(chain, prompt, 12)
    others = 0
    for name, sampling in DRAWS.items():
        want, got = drawn(chain, sampling, prompt), drawn(service, sampling, prompt)
        assert got.ids() == want.ids(), name
        assert got.reason() == want.reason(), name
        others += want.ids() != greedy_ids[:len(want.ids())]
        for a, b in zip(got.logprobs.get(0, []), want.logprobs.get(0, [])):
            assert abs(a.logprob - b.logprob) < 0.05, name
            assert {entry.token_id for entry in a.top} == {entry.token_id for entry in b.top}, name
        assert len(got.logprobs[0]) == len(want.logprobs[0]) == (len(got.ids()) if "logprobs" in sampling else 0), name
    chained = "draft rounds are chained on the device" in service.decode[0].log()
    assert chained == any(flag.startswith("--draft-model") for flag in drafts)
    assert others >= len(DRAWS) - 1  # or what is drawn is what is likely anyway
    assert all(rows > 0 for rows in rows_drawn(service, "device"))
    assert rows_drawn(service, "host") == [0, 0]
    assert rows_drawn(chain, "device") == [0, 0]
    service.wait_idle()


def test_only_the_first_tokens_of_several_choices_are_drawn_on_the_host(emulated, chain):
    service = emulated(MODELS / "chain")
    request = {"ids": chain_prompt(90), "sampling": {"temperature": 9, "n": 3, "seed": 11, "max_tokens": 6, "ignore_eos": True}}
    before = rows_drawn(service, "host")
    got, want = service.stream(service.request(**request)), chain.stream(chain.request(**request))
    assert got.token_ids == want.token_ids and len(set(map(tuple, got.token_ids.values()))) > 1
    after = rows_drawn(service, "host")
    assert sum(after) == sum(before) + 1
    service.wait_idle()


NCCL_VERSION = "22809"  # of the emulated library, which is there where this is set


def direct(transport="cuda_ipc", **settings):
    """A service whose KV goes from device to device or not at all, so without a mirror on the host."""
    flags = ("--device=cuda", "--weight-dtype=bf16", f"--require-transport={transport}", *settings.pop("worker_flags", ()))
    return harness.Service(MODELS / "chain", worker_bin=EMULATED, kv_blocks=40, worker_flags=flags, **settings)


def chain_prompt(length):
    return [(7 * i + length) % 700 for i in range(length)]


# By file descriptor, and by legacy handle.
@pytest.mark.parametrize("transport, vmm", [("cuda_ipc", "1"), ("cuda_ipc", "0"), ("nccl", "1")], ids=["descriptors", "legacy", "nccl"])
def test_kv_goes_from_device_to_device_and_ids_equal_the_cpu_backends(monkeypatch, chain, transport, vmm):
    monkeypatch.setenv("BATON_EMULATED_STREAMS", STREAM_SEED)
    monkeypatch.setenv("BATON_EMULATED_VMM", vmm)
    monkeypatch.setenv("BATON_EMULATED_NCCL", NCCL_VERSION)
    with direct(transport) as service:
        for length in [1, 63, 64, 65, 150]:
            prompt = chain_prompt(length)
            sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
            answer = service.stream(service.request(ids=prompt, sampling=sampling))
            assert answer.timings.kv_transport == transport and answer.timings.kv_bytes > 0
            assert answer.ids() == chain_ids(chain, prompt), length
        service.wait_idle()
        for worker in service.workers:
            assert worker.metric("baton_kv_transport_selected", transport=transport) == 1
            assert worker.metric("baton_kv_transport_probe_bytes_per_second", transport=transport) > 0


def test_devices_are_preferred_where_both_sides_have_them(emulated):
    service = emulated(MODELS / "chain")
    request = service.request(ids=chain_prompt(70), sampling={"temperature": 0, "max_tokens": 2, "ignore_eos": True})
    assert service.stream(request).timings.kv_transport == "cuda_ipc"


class OtherDevices(harness.OneHost):
    """The decode worker's device is one that the prefill worker does not see."""

    def start(self, name, argv, directory):
        env = {"BATON_EMULATED_DEVICE": "3"} if name.startswith("decode") else None
        return harness.Process(name, [*argv, "--listen=127.0.0.1:0"], directory, env=env)


# Case 16.4
def test_a_device_that_is_not_visible_is_found_when_the_workers_meet(chain):
    flags = ("--device=cuda", "--weight-dtype=bf16")
    sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    with harness.Service(MODELS / "chain", worker_bin=EMULATED, kv_blocks=40, worker_flags=flags, network=OtherDevices()) as service:
        answer = service.stream(service.request(ids=chain_prompt(70), sampling=sampling))
        assert answer.timings.kv_transport == "shm" and answer.ids() == chain_ids(chain, chain_prompt(70))
        assert "transport not usable cuda_ipc: the decode worker's device GPU-" in service.prefill[0].log()
        assert service.prefill[0].metric("baton_kv_transport_fallback_total", **{"from": "cuda_ipc"}, to="shm", reason="refused") == 1
    with direct(network=OtherDevices()) as service:
        _, details = harness.status_of(lambda: service.stub.Generate(service.request(ids=chain_prompt(70), sampling=sampling),
                                                                      timeout=30 * harness.SLOWNESS))
        assert "is not visible here" in details and "decode offers cuda_ipc" in details, details
        service.wait_idle()


# As between two hosts: neither sees the other's device.
def test_auto_takes_nccl_where_devices_cannot_share_memory(monkeypatch, chain):
    monkeypatch.setenv("BATON_EMULATED_NCCL", NCCL_VERSION)
    flags = ("--device=cuda", "--weight-dtype=bf16")
    sampling = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    with harness.Service(MODELS / "chain", worker_bin=EMULATED, kv_blocks=40, worker_flags=flags, network=OtherDevices()) as service:
        answer = service.stream(service.request(ids=chain_prompt(150), sampling=sampling))
        assert answer.timings.kv_transport == "nccl" and answer.ids() == chain_ids(chain, chain_prompt(150))
        service.wait_idle()


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_killed_workers_leave_nothing_and_their_successors_are_met_anew(monkeypatch, chain, transport):
    monkeypatch.setenv("BATON_EMULATED_NCCL", NCCL_VERSION)
    want = chain_ids(chain, chain_prompt(100))
    with direct(transport) as service:
        assert chain_ids(service, chain_prompt(100)) == want
        for group in (service.decode, service.prefill):
            group[0].kill()
            service.restart(group[0])
            service.wait_serving()
            assert chain_ids(service, chain_prompt(100)) == want
            service.wait_idle()


def test_blocks_of_a_writer_that_was_killed_are_free_when_it_is_dead():
    sampling = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    with direct(worker_flags=("--chunk-tokens=64",), prefill_flags=("--test-step-delay=150ms",)) as service:
        steps = service.prefill[0].metric("baton_iteration_tokens_count")
        call = service.stub.Generate(service.request(ids=chain_prompt(600), sampling=sampling), timeout=60 * harness.SLOWNESS)
        deadline = time.monotonic() + 30 * harness.SLOWNESS
        # Some of its units have arrived by then: three of ten chunks have been computed.
        while service.prefill[0].metric("baton_iteration_tokens_count") < steps + 4:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert service.decode[0].metric("baton_kv_blocks", state="reserved") > 0
        service.prefill[0].kill()
        call.cancel()
        service.wait_idle()


def test_a_worker_without_a_device_does_not_start_with_device_memory_required(tmp_path):
    for name, transport in (("baton-prefill", "cuda_ipc"), ("baton-decode", "cuda_ipc"), ("baton-decode", "nccl")):
        run = subprocess.run([EMULATED / name, f"--model={MODELS / 'chain'}", "--device=cpu", f"--require-transport={transport}",
                              "--listen=127.0.0.1:0", "--http-port=0", f"--port-file={tmp_path / 'ports.json'}"],
                             capture_output=True, text=True, timeout=60)
        assert run.returncode > 0 and "does not lie on a device" in run.stdout + run.stderr, run


def test_workers_say_which_device_they_compute_on(emulated):
    service = emulated(MODELS / "chain")
    for worker in service.workers:
        assert "cuda emulated" in worker.log()


def test_auto_takes_a_device_that_can_be_used(pool, chain, monkeypatch):
    monkeypatch.setenv("BATON_EMULATED_STREAMS", STREAM_SEED)
    service = pool.get(MODELS / "chain", "single", worker_bin=EMULATED, kv_blocks=40, worker_flags=("--device=auto",))
    log = service.workers[0].log()
    assert "requested=auto backend=cuda" in log and "emulated compute_capability=9.0" in log
    build = [key for key in service.workers[0].metrics() if key.startswith("baton_build_info{")]
    assert len(build) == 1 and 'backend="cuda"' in build[0] and 'cuda="13.' in build[0], build
    prompt = [(5 * i + 3) % 700 for i in range(30)]
    assert chain_ids(service, prompt) == chain_ids(chain, prompt)


def test_a_device_and_the_cpu_do_not_share_keys_and_values(monkeypatch):
    """Their numbers differ by rounding, so neither pairs with the other."""
    monkeypatch.setenv("BATON_EMULATED_STREAMS", STREAM_SEED)
    with harness.Service(MODELS / "chain", kv_blocks=40, worker_bin=EMULATED, worker_flags=("--weight-dtype=bf16",),
                         decode_flags=("--device=cuda",), wait=False) as service:
        code, details = service.refusal(service.request(ids=[1, 2, 3], sampling={"max_tokens": 8}))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "sum_order_version" in details, (code, details)


@pytest.fixture
def two_devices(emulated, monkeypatch):
    """A service whose workers see two emulated devices; `prefill` and `decode` say how many ranks each has."""
    monkeypatch.setenv("BATON_EMULATED_DEVICES", "2")

    def get(model, prefill, decode, **settings):
        return emulated(model, prefill_flags=(f"--tp={prefill}",), decode_flags=(f"--tp={decode}", *settings.pop("decode_flags", ())),
                        **settings)

    return get


# The sums of a layer are cut in two, so logits differ by rounding: ids are equal but where two tokens are as good as each other, and
# in the model that counts nowhere. Two devices' memory is no pool that others can map: such KV goes through the host.
@pytest.mark.parametrize("prefill,decode", [(2, 2), (2, 1), (1, 2)])
def test_two_ranks_on_two_devices_say_what_one_says(two_devices, chain, prefill, decode):
    service = two_devices(MODELS / "chain", prefill, decode)
    for length in [1, 63, 64, 65, 150]:
        assert chain_ids(service, chain_prompt(length)) == chain_ids(chain, chain_prompt(length)), length
    sampling = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}
    assert service.stream(service.request(ids=chain_prompt(70), sampling=sampling)).timings.kv_transport == "shm"
    service.wait_idle()
    for worker, ranks in ((service.prefill[0], prefill), (service.decode[0], decode)):
        assert (" tp=2" in worker.log()) == (ranks == 2)
        # Each of two ranks has a part of a row.
        assert (worker.metric("baton_sampled_rows_total", place="device") > 0) == (ranks == 1)
        assert (worker.metric("baton_sampled_rows_total", place="host") > 0) == (ranks == 2)


@pytest.mark.slow
@pytest.mark.parametrize("prefill,decode", [(2, 2), (2, 1), (1, 2)])
def test_two_ranks_on_two_devices_say_tiny_qwen3s_words(two_devices, emulated, prefill, decode):
    expect_same(two_devices(TINY, prefill, decode), emulated(TINY))


@pytest.mark.slow
def test_each_of_two_ranks_has_its_graphs_and_eager_ones_say_the_same(two_devices):
    plain = ("--max-draft-tokens=0",)
    graphs = two_devices(TINY, 2, 2, decode_flags=plain)
    eager = two_devices(TINY, 2, 2, decode_flags=plain, flags=("--enforce-eager",))
    for prompt in PROMPTS:
        assert greedy(graphs, prompt)[0] == greedy(eager, prompt)[0]
    captured = re.findall(r"cuda graph captured (.*) graphs=", graphs.decode[0].log())
    assert captured and all(captured.count(shape) % 2 == 0 for shape in captured), captured
    assert "cuda graph" not in eager.decode[0].log()


@pytest.mark.slow
def test_two_ranks_verify_what_a_draft_model_on_one_device_proposes(two_devices, tiny):
    service = two_devices(TINY, 2, 2, decode_flags=("--test-free-drafts", f"--draft-model={MODELS / 'tiny-qwen3-draft'}"))
    expect_same(service, tiny)
    assert service.decode[0].metric("baton_spec_decode_draft_tokens_total") > 0


@pytest.mark.parametrize("devices,peers,flags,message", [
    ("1", "1", [], "rank 1 of tp=2: cuda: there is no device 1: devices=1"),
    ("2", "0", [], "cuda: device 0 has no peer access to device 1, which tp=2 needs"),
    ("2", "1", ["--require-transport=cuda_ipc"], "the KV cache lies on several devices"),
])
def test_what_two_ranks_need_of_devices_is_said_at_start(tmp_path, devices, peers, flags, message):
    run = subprocess.run([EMULATED / "baton-decode", f"--model={MODELS / 'chain'}", "--device=cuda", "--tp=2", "--listen=127.0.0.1:0",
                          "--http-port=0", "--num-blocks=8", f"--port-file={tmp_path / 'ports.json'}", *flags], capture_output=True,
                         text=True, timeout=60, env={**os.environ, "BATON_EMULATED_DEVICES": devices, "BATON_EMULATED_PEERS": peers})
    assert run.returncode > 0 and message in run.stdout + run.stderr, run


def test_auto_wants_a_device_for_each_rank(pool, chain, monkeypatch):
    monkeypatch.setenv("BATON_EMULATED_STREAMS", STREAM_SEED)
    auto = ("--device=auto", "--tp=2")
    service = pool.get(MODELS / "chain", "single", worker_bin=EMULATED, kv_blocks=40, worker_flags=auto)
    log = service.workers[0].log()
    assert "requested=auto backend=cpu" in log and "there is no device 1: devices=1" in log
    assert chain_ids(service, chain_prompt(30)) == chain_ids(chain, chain_prompt(30))


def test_a_device_and_two_do_not_meet_where_cuda_ipc_is_required(monkeypatch):
    monkeypatch.setenv("BATON_EMULATED_STREAMS", STREAM_SEED)
    monkeypatch.setenv("BATON_EMULATED_DEVICES", "2")
    with harness.Service(MODELS / "chain", worker_bin=EMULATED, kv_blocks=40, worker_flags=("--device=cuda", "--weight-dtype=bf16"),
                         prefill_flags=("--require-transport=cuda_ipc",), decode_flags=("--tp=2",), wait=False) as service:
        code, details = service.refusal(service.request(ids=[1, 2, 3], sampling={"max_tokens": 8}))
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "cuda_ipc" in details, (code, details)


@pytest.mark.skipif(bool(list(pathlib.Path("/dev").glob("nvidia[0-9]*"))), reason="there is a GPU")
def test_without_a_gpu_the_real_backend_says_so(tmp_path):
    run = subprocess.run([harness.BIN / "baton-decode", f"--model={MODELS / 'chain'}", "--device=cuda", "--listen=127.0.0.1:0",
                          "--http-port=0", f"--port-file={tmp_path / 'ports.json'}"], capture_output=True, text=True, timeout=60)
    assert run.returncode > 0, "a refusal, not a crash"
    assert "cuda: no device to compute on" in run.stdout + run.stderr
