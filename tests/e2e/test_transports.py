"""How KV blocks travel is decided when two workers meet, and a transport that must be used is used or the pair is refused."""
import subprocess

import grpc
import pytest

import harness
from harness import MODELS, status_of
from network import Hosts, namespaces_are_permitted


def ask(service):
    return service.request("In the beginning God created", sampling={"temperature": 0, "max_tokens": 8, "ignore_eos": True})


def refusal(service):
    """What a client is told. The first token needs no hand-over: where it was quicker than the meeting, the answer is one that broke."""
    code, details = status_of(lambda: service.stub.Generate(ask(service), timeout=30 * harness.SLOWNESS))
    broken = code == grpc.StatusCode.UNAVAILABLE and details.startswith("worker lost: ")
    assert code == grpc.StatusCode.FAILED_PRECONDITION or broken, (code, details)
    service.wait_idle()
    return details


# Case 16.4: the decode worker's private socket is in another network namespace, as between two pods.
@pytest.mark.skipif(not namespaces_are_permitted(), reason="no network namespaces")
def test_between_two_hosts_shared_memory_gives_way_to_tcp_and_says_so():
    with harness.Service(MODELS / "tiny-qwen3", network=Hosts()) as service:
        answer = service.stream(ask(service))
        assert answer.timings.kv_transport == "tcp" and answer.timings.kv_bytes > 0
        prefill, decode = service.prefill[0], service.decode[0]
        assert "transport not usable shm" in prefill.log()
        assert "transport fallback from=shm to=tcp reason=unreachable" in prefill.log()
        counted = [line for line in service.network.metrics_text(prefill).splitlines() if line.startswith("baton_kv_transport_fallback_total{")]
        # The other reasons are there, at zero.
        assert len(counted) == 4 and [line.endswith('} 1') for line in counted if 'reason="unreachable"' in line] == [True], counted
        assert all(line.endswith("} 0") for line in counted if 'reason="unreachable"' not in line), counted
        for worker in (prefill, decode):
            harness.wait_until(lambda: "baton_kv_transport_selected{" in service.network.metrics_text(worker))
            metrics = service.network.metrics_text(worker)
            selected = [line for line in metrics.splitlines() if line.startswith("baton_kv_transport_selected{")]
            assert len(selected) == 1 and 'transport="tcp"' in selected[0] and selected[0].endswith(" 1"), selected
            speed = [line for line in metrics.splitlines() if line.startswith("baton_kv_transport_probe_bytes_per_second{")]
            assert len(speed) == 1 and 'transport="tcp"' in speed[0] and float(speed[0].rsplit(" ", 1)[1]) > 1e6, speed


# Case 16.4
@pytest.mark.skipif(not namespaces_are_permitted(), reason="no network namespaces")
def test_between_two_hosts_required_shared_memory_is_refused_with_the_reason():
    with harness.Service(MODELS / "tiny-qwen3", network=Hosts(), prefill_flags=("--require-transport=shm",)) as service:
        details = refusal(service)
        assert "prefill offers shm, tcp and requires shm; decode offers shm, tcp" in details, details
        assert "shm: connect" in details, details


# Case 16.4
@pytest.mark.parametrize("prefill, decode, words", [
    ("--require-transport=shm", "--kv-transport=tcp", "the decode worker does not offer shm (prefill offers shm, tcp and requires shm; decode offers tcp"),
    ("--kv-transport=tcp", "--require-transport=shm", "the prefill worker does not offer shm (prefill offers tcp; decode offers shm, tcp and requires shm"),
    ("--kv-transport=shm", "--kv-transport=tcp", "none that both offer (prefill offers shm; decode offers tcp)"),
], ids=["prefill-requires", "decode-requires", "nothing-in-common"])
def test_a_pair_that_cannot_have_the_required_transport_is_refused(prefill, decode, words):
    with harness.Service(MODELS / "tiny-qwen3", prefill_flags=(prefill,), decode_flags=(decode,)) as service:
        details = refusal(service)
        assert words in details, details
        assert words in refusal(service), "the second client is told the same"


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_the_required_transport_is_used_although_another_is_preferred(name):
    with harness.Service(MODELS / "tiny-qwen3", worker_flags=(f"--require-transport={name}",)) as service:
        assert service.stream(ask(service)).timings.kv_transport == name
        for worker in service.workers:
            harness.wait_until(lambda: any(key.startswith("baton_kv_transport_selected{") for key in worker.metrics()))
            assert worker.metric("baton_kv_transport_selected", transport=name) == 1
            assert worker.metric("baton_kv_transport_probe_bytes_per_second", transport=name) > 1e6


@pytest.mark.parametrize("flags, words", [(("--require-transport=pigeon",), "accepted: "),
                                          (("--require-transport=shm", "--kv-transport=tcp"), "leaves it out")])
def test_a_requirement_that_cannot_be_met_is_refused_at_start(tmp_path, flags, words):
    for name in ("baton-prefill", "baton-decode"):
        run = subprocess.run([harness.BIN / name, f"--model={MODELS / 'chain'}", "--listen=127.0.0.1:0", "--http-port=0",
                              f"--port-file={tmp_path / 'ports.json'}", *flags], capture_output=True, text=True, timeout=60)
        assert run.returncode > 0 and words in run.stdout + run.stderr, run
