"""TLS, tokens and tenants, from outside: certificates are made while the tests run."""
import datetime
import glob
import hashlib
import json
import os
import pathlib
import re
import subprocess
import urllib.error
import urllib.request

import grpc
import pytest

import harness
from harness import BIN, MODELS, SLOWNESS, pb, pb_grpc, wait_until

TINY = MODELS / "tiny-qwen3"
NAMES = "subjectAltName=DNS:localhost,DNS:router.test,IP:127.0.0.1"
PROMPT = list(range(300, 300 + 2 * 64 + 7))  # two full blocks and more


class Authority:
    """A CA of our own, and the leaves that it signs."""

    def __init__(self, folder, name):
        self.folder = folder
        self.cert, self.key = folder / f"{name}-ca.pem", folder / f"{name}-ca.key"
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", self.key, "-out", self.cert, "-days", "2", "-subj", f"/CN={name}")

    def sign(self, name):
        """Paths of a certificate and its key."""
        request, cert, key, names = (self.folder / f"{name}.{end}" for end in ("csr", "pem", "key", "ext"))
        names.write_text(NAMES)
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial", "-out", cert, "-days", "2", "-extfile", names)
        return cert, key


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def credentials(ca, pair=None):
    cert, key = (p.read_bytes() for p in pair) if pair else (None, None)
    return grpc.ssl_channel_credentials(ca.cert.read_bytes(), key, cert)


def replace(path, content):
    """As a mounted secret changes: all at once."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.rename(path)


def code_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def status_code(channel, timeout=5):
    """Of one GetStatus; OK included."""
    try:
        pb_grpc.GenerationStub(channel).GetStatus(pb.GetStatusRequest(), timeout=timeout * SLOWNESS)
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def answer_ids(service, **fields):
    return service.ids(ids=PROMPT, sampling={"max_tokens": 8, "temperature": 0, "ignore_eos": True}, **fields)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs")
    return Authority(folder, "ours"), Authority(folder, "other")


# ---- TLS


@pytest.fixture(scope="module")
def mutual(authorities):
    """Everything by mutual TLS: clients to router, router to workers, prefill to decode."""
    ca, _ = authorities
    cert, key = ca.sign("everybody")
    flags = [f"--tls-cert={cert}", f"--tls-key={key}", f"--tls-client-ca={ca.cert}", f"--tls-ca={ca.cert}", "--tls-reload-interval=1s"]
    with harness.Service(TINY, worker_flags=flags, router_flags=flags, credentials=credentials(ca, ca.sign("client"))) as service:
        yield service


def test_mutual_tls_changes_nothing_in_the_answer(mutual, tiny):
    assert answer_ids(mutual) == answer_ids(tiny)
    # The gauge follows the next heartbeat, not the answer.
    wait_until(lambda: any("baton_kv_transport_selected{" in key for key in mutual.decode[0].metrics()))
    for process in mutual.processes:
        assert "tls=mtls" in process.log(), process.name


@pytest.mark.parametrize("who", ["router", "prefill", "decode"])
def test_no_port_takes_plaintext_strangers_or_clients_without_certificate(mutual, authorities, who):
    ca, other = authorities
    process = {"router": mutual.router, "prefill": mutual.prefill[0], "decode": mutual.decode[0]}[who]
    stranger = other.sign("stranger")

    def health(channel):
        from grpc_health.v1 import health_pb2, health_pb2_grpc
        try:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5 * SLOWNESS).status
        except grpc.RpcError as error:
            return error.code()

    options = [("grpc.use_local_subchannel_pool", 1)]
    for refused in (None, credentials(ca), credentials(ca, stranger), credentials(other, ca.sign("client"))):
        channel = grpc.secure_channel(process.address, refused, options) if refused else grpc.insecure_channel(process.address, options)
        assert health(channel) == grpc.StatusCode.UNAVAILABLE
    assert health(grpc.secure_channel(process.address, credentials(ca, ca.sign("client")), options)) == 1


def test_certificates_are_taken_up_while_serving(authorities, tmp_path):
    ca, other = authorities
    files = {name: tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt")}

    def install(authority, *trusted):
        """Who trusts comes first, so that no moment is without a pair that fits."""
        replace(files["ca.crt"], b"".join(a.cert.read_bytes() for a in trusted))
        cert, key = authority.sign(f"leaf-{len(trusted)}-{authority.cert.stem}")
        replace(files["tls.key"], key.read_bytes())
        replace(files["tls.crt"], cert.read_bytes())

    install(ca, ca, other)
    flags = [f"--tls-cert={files['tls.crt']}", f"--tls-key={files['tls.key']}", f"--tls-client-ca={files['ca.crt']}", f"--tls-ca={files['ca.crt']}", "--tls-reload-interval=1s"]
    client = ca.sign("client")
    with harness.Service(TINY, worker_flags=flags, router_flags=flags, credentials=credentials(ca, client)) as service:
        before = answer_ids(service)
        running = service.stub.Generate(service.request(ids=PROMPT, sampling={"max_tokens": 300, "ignore_eos": True}))
        next(running)
        install(other, ca, other)
        other_client = other.sign("client")
        fresh = lambda: grpc.secure_channel(service.router.address, credentials(other, other_client), [("grpc.use_local_subchannel_pool", 1)])
        wait_until(lambda: status_code(fresh()) == grpc.StatusCode.OK)
        assert sum(len(m.token_ids) for m in running) >= 299, "what ran goes on"
        # A decode worker that is new, and so every connection to it: all of them by the new certificate.
        install(other, other)
        wait_until(lambda: status_code(grpc.secure_channel(service.router.address, credentials(ca, client), [("grpc.use_local_subchannel_pool", 1)])) != grpc.StatusCode.OK)
        old = service.decode[0]
        port = old.grpc_port
        old.kill()
        argv = [a for a in old.argv if not a.startswith(("--listen=", "--port-file="))] + [f"--listen=127.0.0.1:{port}"]
        service.decode[0] = harness.Process("decode-again", argv, service.directory).wait_ports()
        service.stub = pb_grpc.GenerationStub(fresh())
        service.wait_serving()
        assert answer_ids(service) == before


def test_a_prefill_worker_does_not_hand_over_to_a_stranger(authorities):
    ca, other = authorities
    cert, key = ca.sign("server")
    server = [f"--tls-cert={cert}", f"--tls-key={key}"]
    with harness.Service(TINY, worker_flags=server, router_flags=[*server, f"--tls-ca={ca.cert}"], prefill_flags=[f"--tls-ca={other.cert}"],
                         credentials=credentials(ca)) as service:
        request = service.request(ids=PROMPT, sampling={"max_tokens": 8})
        assert code_of(lambda: list(service.stub.Generate(request, timeout=5 * SLOWNESS))) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert all("baton_kv_transport_selected" not in key for key in service.decode[0].metrics())


def test_the_name_in_the_certificate_counts_and_can_be_said(authorities):
    ca, _ = authorities
    cert, key = ca.sign("server")
    server = [f"--tls-cert={cert}", f"--tls-key={key}"]
    with harness.Service(TINY, "single", worker_flags=server, router_flags=[*server, f"--tls-ca={ca.cert}", "--tls-server-name=router.test"], credentials=credentials(ca)) as service:
        answer_ids(service)
        for name, expected in (("router.test", grpc.StatusCode.OK), ("elsewhere.test", grpc.StatusCode.UNAVAILABLE)):
            channel = grpc.secure_channel(service.router.address, service.credentials, [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)])
            assert status_code(channel) == expected
        # The command line's clients, by the same rules.
        run = lambda *flags: subprocess.run([BIN / "baton", "status", f"--address={service.router.address}", *flags], capture_output=True, text=True)
        assert "decode" in run(f"--tls-ca={ca.cert}").stdout
        assert run(f"--tls-ca={ca.cert}", "--tls-server-name=elsewhere.test").returncode != 0
        assert run().returncode != 0
        assert "--tls-ca" in run("--tls-ca=/nonexistent").stderr


# ---- plaintext


@pytest.mark.parametrize("binary", ["baton-router", "baton-prefill", "baton-decode"])
def test_plaintext_beyond_loopback_must_be_meant(binary, authorities):
    ca, _ = authorities
    cert, key = ca.sign("server")

    def start(*flags):
        run = subprocess.run([BIN / binary, "--model=/nonexistent", "--listen=0.0.0.0:0", "--http-port=-1", *(["--decode=127.0.0.1:1", "--topology=single"] if binary == "baton-router" else []), *flags],
                             capture_output=True, text=True, timeout=60 * SLOWNESS)
        assert run.returncode == 1
        return run.stderr + run.stdout

    assert "--allow-plaintext" in start() and "0.0.0.0:0" in start()
    for meant in (["--allow-plaintext"], [f"--tls-cert={cert}", f"--tls-key={key}"]):
        text = start(*meant)
        assert "/nonexistent" in text and "--allow-plaintext" not in text, text


def test_kv_beyond_loopback_must_be_meant(authorities):
    """The tcp transport has no TLS of its own."""
    ca, _ = authorities
    cert, key = ca.sign("server")
    start = lambda *flags: subprocess.run([BIN / "baton-decode", "--model=/nonexistent", "--http-port=-1", "--kv-listen=0.0.0.0:0", f"--tls-cert={cert}", f"--tls-key={key}", *flags],
                                          capture_output=True, text=True, timeout=60 * SLOWNESS)
    text = start().stderr + start().stdout
    assert "--allow-plaintext-kv" in text and "--kv-listen" in text
    for meant in ("--allow-plaintext-kv", "--allow-plaintext", "--kv-transport=shm"):
        run = start(meant)
        assert "/nonexistent" in run.stderr + run.stdout, meant


def test_serve_refuses_and_takes_the_same(authorities, tmp_path):
    ca, _ = authorities
    serve = [BIN / "baton", "serve", f"--model={TINY}", "--host=0.0.0.0", "--grpc-port=0", "--http-port=0", "--num-blocks=128", "--threads=1"]
    refused = subprocess.run(serve, capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert refused.returncode != 0 and "--allow-plaintext" in refused.stderr
    cert, key = ca.sign("server")
    tokens, mine, ports = tmp_path / "tokens", tmp_path / "token", tmp_path / "ports"
    tokens.write_text("me secret:0123456789abcdef\n")
    mine.write_text("0123456789abcdef\n")
    child = subprocess.Popen([*serve, f"--tls-cert={cert}", f"--tls-key={key}", f"--token-file={tokens}", f"--port-file={ports}"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_until(ports.exists, 60)
        address = f"--address=127.0.0.1:{json.loads(ports.read_text())['grpc']}"
        generate = [BIN / "baton", "generate", address, f"--tls-ca={ca.cert}", "--prompt=In the beginning", "--max-tokens=4"]
        run = lambda *flags, **env: subprocess.run([*generate, *flags], capture_output=True, text=True, env={**os.environ, **env}, timeout=60 * SLOWNESS)
        assert run(f"--token-file={mine}").returncode == 0
        assert run(BATON_TOKEN="0123456789abcdef").returncode == 0
        assert "UNAUTHENTICATED" in run().stderr
        assert "UNAUTHENTICATED" in run(BATON_TOKEN="0123456789abcdeF").stderr
        assert "--token-file" in run("--token-file=/nonexistent").stderr
    finally:
        child.terminate()
        assert child.wait(60 * SLOWNESS) == 0


# ---- tokens


ALICE, BOB, OLD, SLOW, ONE = ("alice-0123456789", "bob-0123456789ab", "old-0123456789ab", "slow-0123456789a", "one-0123456789ab")


def token_lines():
    yesterday = (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (f"alice sha256:{hashlib.sha256(ALICE.encode()).hexdigest()}\nbob secret:{BOB}\nold secret:{OLD} expires={yesterday}\n"
            f"slow secret:{SLOW} rate=0.01 burst=2\none secret:{ONE} concurrent=1\n")


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    path.write_text(token_lines())
    return path


@pytest.fixture(scope="module")
def guarded(token_file):
    with harness.Service(TINY, router_flags=[f"--token-file={token_file}"], token=ALICE, kv_blocks=512) as service:
        yield service


def calls_of(service, token):
    channel = grpc.insecure_channel(service.router.address, [("grpc.use_local_subchannel_pool", 1)])
    return pb_grpc.GenerationStub(grpc.intercept_channel(channel, harness.Bearer(token)) if token else channel)


def small(service):
    return service.request(ids=PROMPT[:5], sampling={"max_tokens": 2})


@pytest.mark.parametrize("token", [None, "wrong-0123456789", ALICE[:-1], OLD], ids=["none", "wrong", "nearly", "expired"])
def test_every_method_wants_a_token(guarded, token):
    stub = calls_of(guarded, token)
    calls = [lambda: list(stub.Generate(small(guarded))), lambda: stub.GenerateUnary(small(guarded)), lambda: stub.Tokenize(pb.TokenizeRequest(text="x")),
             lambda: stub.Detokenize(pb.DetokenizeRequest(ids=[1])), lambda: stub.GetModelInfo(pb.GetModelInfoRequest()),
             lambda: stub.ListModels(pb.ListModelsRequest()), lambda: stub.GetStatus(pb.GetStatusRequest())]
    assert len(calls) == len(pb.DESCRIPTOR.services_by_name["Generation"].methods), "a new method is here too"
    before = guarded.router.metric("baton_router_rejected_total", reason="unauthenticated")
    assert [code_of(call) for call in calls] == [grpc.StatusCode.UNAUTHENTICATED] * len(calls)
    assert guarded.router.metric("baton_router_rejected_total", reason="unauthenticated") - before == 2


def test_health_and_reflection_are_open_and_secrets_are_not_logged(guarded):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
    channel = grpc.insecure_channel(guarded.router.address)
    assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="baton.v1.Generation")).status == 1
    assert "baton.v1.Generation" in ProtoReflectionDescriptorDatabase(channel).get_services()
    answer_ids(guarded)
    for secret in (ALICE, BOB, OLD, SLOW, ONE):
        assert secret not in guarded.router.log()


def test_rates_are_per_token_and_say_when_to_come_back(guarded):
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status
    slow = calls_of(guarded, SLOW)
    for _ in range(2):
        slow.GenerateUnary(small(guarded))
    with pytest.raises(grpc.RpcError) as caught:
        slow.GenerateUnary(small(guarded))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    details = rpc_status.from_call(caught.value).details
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in details) and 90 < retry.retry_delay.seconds <= 100
    assert code_of(lambda: slow.Tokenize(pb.TokenizeRequest(text="x"))) == grpc.StatusCode.RESOURCE_EXHAUSTED
    slow.GetStatus(pb.GetStatusRequest())
    calls_of(guarded, BOB).GenerateUnary(small(guarded))


def test_answers_at_a_time_are_per_token(guarded):
    one = calls_of(guarded, ONE)
    first = one.Generate(guarded.request(ids=PROMPT[:5], sampling={"max_tokens": 400, "ignore_eos": True}))
    next(first)
    assert code_of(lambda: one.GenerateUnary(small(guarded))) == grpc.StatusCode.RESOURCE_EXHAUSTED
    calls_of(guarded, BOB).GenerateUnary(small(guarded))
    first.cancel()

    def free():
        try:
            return one.GenerateUnary(small(guarded)) is not None
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            return False
    wait_until(free)
    one.GenerateUnary(small(guarded))


def cached(service, token, prompt, salt=""):
    request = service.request(ids=prompt, sampling={"max_tokens": 2, "ignore_eos": True}, cache_salt=salt)
    reply = calls_of(service, token).GenerateUnary(request)
    return reply.usage.cached_prompt_tokens


def test_tenants_never_share_cached_blocks(guarded):
    prompt = [7 + i % 200 for i in range(4 * 64 + 3)]
    assert cached(guarded, ALICE, prompt) == 0
    wait_until(lambda: cached(guarded, ALICE, prompt) >= 64)
    # Whatever salt the other chooses.
    for salt in ("", "alice", "alice\n", "\n", "bob\nalice"):
        assert cached(guarded, BOB, prompt, salt) == 0, salt
    wait_until(lambda: cached(guarded, BOB, prompt) >= 64)
    assert cached(guarded, ALICE, prompt, "of her own") == 0, "a client's salt still counts within its tenant"


def test_the_live_page_tries_prompts_with_a_token_only(guarded):
    def call(path, token, body=None):
        request = urllib.request.Request(f"http://127.0.0.1:{guarded.router.http_port}{path}", data=body and json.dumps(body).encode(), headers={"Content-Type": "application/json"})
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=30 * SLOWNESS) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    for token in (None, "wrong-0123456789", OLD):
        assert call("/api/try", token, {"prompt": "x", "max_tokens": 2})[0] == 401
        assert call("/api/live", token)[0] == 401
    status, text = call("/api/try", BOB, {"prompt": "In the beginning", "max_tokens": 3})
    assert status == 200 and "done" in json.loads(text.splitlines()[-1])
    assert call("/api/live", BOB)[0] == 200
    status, text = call("/api/try", SLOW, {"prompt": "x", "max_tokens": 2})
    assert "RESOURCE_EXHAUSTED" in text, "it is a call as any other"
    assert call("/metrics", None)[0] == 200 and call("/", None)[0] == 200


def test_a_changed_token_file_is_taken_up(guarded, token_file):
    newcomer = "newcomer-0123456789"
    try:
        replace(token_file, (token_lines().replace(f"bob secret:{BOB}\n", "") + f"new secret:{newcomer}\n").encode())
        wait_until(lambda: status_code(grpc.intercept_channel(grpc.insecure_channel(guarded.router.address), harness.Bearer(newcomer))) == grpc.StatusCode.OK)
        assert code_of(lambda: calls_of(guarded, BOB).GetStatus(pb.GetStatusRequest())) == grpc.StatusCode.UNAUTHENTICATED
        # A broken file changes nothing, and the log says which line, not what is in it.
        replace(token_file, b"alice secret:too-short-secr\n")
        wait_until(lambda: "the tokens stay as they were" in guarded.router.log())
        calls_of(guarded, newcomer).GetStatus(pb.GetStatusRequest())
        assert "line 1" in guarded.router.log() and "too-short-secr" not in guarded.router.log()
    finally:
        replace(token_file, token_lines().encode())
        wait_until(lambda: status_code(grpc.intercept_channel(grpc.insecure_channel(guarded.router.address), harness.Bearer(BOB))) == grpc.StatusCode.OK)


@pytest.mark.parametrize("content, words", [(None, "cannot be read"), ("alice\n", "line 1"), ("a secret:short\n", "16 to 1024")])
def test_a_bad_token_file_stops_the_start(tmp_path, content, words):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    run = subprocess.run([BIN / "baton-router", f"--model={TINY}", "--listen=127.0.0.1:0", "--http-port=-1", "--topology=single", "--decode=127.0.0.1:1", f"--token-file={path}"],
                         capture_output=True, text=True, timeout=60 * SLOWNESS)
    assert run.returncode == 1 and words in run.stderr + run.stdout and "--token-file" in run.stderr + run.stdout


# ---- limits


@pytest.mark.parametrize("fields, sampling, code", [
    ({"text": "x" * (17 << 20)}, {}, grpc.StatusCode.RESOURCE_EXHAUSTED),  # a message above 16 MiB is not even read
    ({"text": "x" * (15 << 20)}, {}, grpc.StatusCode.INVALID_ARGUMENT),  # and one below is still no prompt
    ({"token_ids": pb.TokenIds(ids=[1] * 100_000)}, {}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"text": "x"}, {"stop": ["a"] * 17}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"text": "x"}, {"stop": ["a" * 257]}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"text": "x"}, {"stop_token_ids": [1] * 257}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"text": "x"}, {"n": 17}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"text": "x"}, {"logprobs": 21}, grpc.StatusCode.INVALID_ARGUMENT),
    ({"text": "x", "cache_salt": "s" * 1025}, {}, grpc.StatusCode.INVALID_ARGUMENT),
], ids=["message", "text", "prompt", "stops", "stop", "stop_ids", "n", "logprobs", "salt"])
def test_what_a_request_may_be_is_bounded(tiny, fields, sampling, code):
    request = pb.GenerateRequest(**fields, sampling=pb.SamplingParams(**{"max_tokens": 2, **sampling}))
    channel = grpc.insecure_channel(tiny.router.address, [("grpc.use_local_subchannel_pool", 1)])
    assert code_of(lambda: pb_grpc.GenerationStub(channel).GenerateUnary(request, timeout=30 * SLOWNESS)) == code
    tiny.ids("x", sampling={"max_tokens": 2})


def test_open_calls_are_bounded():
    with harness.Service(TINY, "single", router_flags=("--max-concurrent=1", "--max-queue=1"), worker_flags=("--test-step-delay=20ms",)) as service:
        calls = []
        for expected in ("runs", "waits"):
            calls.append(service.stub.Generate(service.request("x", sampling={"max_tokens": 200, "ignore_eos": True})))
            if expected == "runs":
                next(calls[0])
        wait_until(lambda: service.status().requests_queued == 1)
        assert code_of(lambda: service.unary(service.request("x", sampling={"max_tokens": 2}))) == grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()
        service.wait_idle()


# ---- between processes of one machine


def test_memory_and_sockets_are_private_and_kill_leaves_nothing():
    before = {pattern: set(glob.glob(pattern)) for pattern in ("/dev/shm/*", "/tmp/baton*", "/run/user/*/baton*")}
    with harness.Service(TINY, worker_flags=["--kv-transport=shm"]) as service:
        answer_ids(service)
        pids = [p.popen.pid for p in service.processes]
        decode = service.decode[0].popen.pid
        files = [os.readlink(path) for path in glob.glob(f"/proc/{decode}/fd/*")]
        assert any(name.startswith("/memfd:") for name in files), "the pool is a memfd"
        inodes = {re.sub(r"\D", "", name) for name in files if name.startswith("socket:")}
        names = [line.split()[7] for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7 and line.split()[6] in inodes]
        assert names and all(re.fullmatch(r"@baton-kv-[0-9a-f]{32}", name) for name in names), names
        # Nothing of it is in the file system while it runs either.
        assert {pattern: set(glob.glob(pattern)) for pattern in before} == before
        service.kill()
        for pid in pids:
            assert not os.path.exists(f"/proc/{pid}")
        sockets = pathlib.Path("/proc/net/unix").read_text()
        assert all(name not in sockets for name in names)
    assert {pattern: set(glob.glob(pattern)) for pattern in before} == before


def test_a_killed_serve_takes_its_processes_with_it(tmp_path):
    before = set(glob.glob("/tmp/baton-serve-*"))
    ports = tmp_path / "ports"
    serve = subprocess.Popen([BIN / "baton", "serve", f"--model={TINY}", "--grpc-port=0", "--http-port=0", "--num-blocks=128", "--threads=1", f"--port-file={ports}"],
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(ports.exists, 60)
    children = pathlib.Path(f"/proc/{serve.pid}/task/{serve.pid}/children").read_text().split()
    assert len(children) == 3
    serve.kill()
    serve.wait()
    running = lambda pid: os.path.exists(f"/proc/{pid}") and pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    wait_until(lambda: not any(running(pid) for pid in children), 60)
    assert set(glob.glob("/tmp/baton-serve-*")) <= before
