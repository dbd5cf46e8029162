"""Starts real router, prefill and decode processes on free ports, and talks to them over gRPC.

Nothing here knows how the service works inside: it has the binaries' flags, the protos and the metrics pages.
"""
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BATON_BUILD_DIR", ROOT / "build"))
BIN = BUILD / "bin"
LOGS = pathlib.Path(os.environ.get("BATON_TEST_LOGS", BUILD / "e2e-logs"))  # of the last session
MODELS = ROOT / "tests" / "data" / "models"
CACHE = ROOT / ".cache"
SMOLLM2 = CACHE / "models" / "SmolLM2-135M-Instruct.gguf"
# Sanitizer builds are several times slower; every bound on time is stretched by this.
SLOWNESS = float(os.environ.get("BATON_TEST_SLOWNESS", "1"))
# Ids are compared exactly, so workers compute on the CPU wherever a test does not say otherwise.
os.environ.setdefault("BATON_DEVICE", "cpu")


def generate_stubs():
    """Python code of the protos as they are now: the folder is named after their content."""
    protos = sorted(p for p in (ROOT / "proto").rglob("*.proto") if "baton" in p.parts)
    out = CACHE / "e2e_stubs" / hashlib.sha256(b"".join(p.read_bytes() for p in protos)).hexdigest()[:16]
    stamp = out / ".done"
    if not stamp.exists():
        out.mkdir(parents=True, exist_ok=True)
        import grpc_tools
        from grpc_tools import protoc
        well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
        args = ["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}"]
        if protoc.main(args + [str(p) for p in protos]) != 0:
            raise RuntimeError("protoc failed")
        stamp.touch()
    sys.path.insert(0, str(out))


generate_stubs()
import grpc  # noqa: E402
from baton.v1 import generation_pb2 as pb  # noqa: E402
from baton.v1 import generation_pb2_grpc as pb_grpc  # noqa: E402


class Bearer(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a token with every call."""

    def __init__(self, token):
        self.entry = ("authorization", f"Bearer {token}")

    def _call(self, continuation, details, request):
        return continuation(details._replace(metadata=[*(details.metadata or ()), self.entry]), request)

    intercept_unary_unary = intercept_unary_stream = _call


def wait_until(condition, timeout=30, message="it did not happen", pause=0.02):
    """What the condition is once it is true. Gauges, for one, follow the next heartbeat."""
    deadline = time.monotonic() + timeout * SLOWNESS
    while not (value := condition()):
        assert time.monotonic() < deadline, message
        time.sleep(pause)
    return value


class Process:
    """One of our binaries: its log, its ports, its metrics. `prefix` is a command that becomes the binary, on another host perhaps."""

    def __init__(self, name, argv, directory, env=None, host="127.0.0.1", prefix=()):
        self.name, self.host, self.prefix = name, host, list(prefix)
        self.directory = directory
        self.log_path = directory / f"{name}.log"
        self.port_file = directory / f"{name}.json"
        self.argv = [str(a) for a in argv] + [f"--port-file={self.port_file}"]
        self._log = open(self.log_path, "wb")
        self.popen = subprocess.Popen(self.prefix + self.argv, stdout=self._log, stderr=subprocess.STDOUT,
                                      env={**os.environ, **(env or {})}, start_new_session=True)
        self.grpc_port = self.http_port = None

    def wait_ports(self, timeout=30):
        deadline = time.monotonic() + timeout * SLOWNESS
        while time.monotonic() < deadline:
            if self.port_file.exists():
                ports = json.loads(self.port_file.read_text())
                self.grpc_port, self.http_port = ports["grpc"], ports["http"]
                return self
            if self.popen.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {self.popen.returncode}:\n{self.log()}")
            time.sleep(0.01)
        raise TimeoutError(f"{self.name} wrote no port file:\n{self.log()}")

    @property
    def address(self):
        return f"{self.host}:{self.grpc_port}"

    def again(self):
        """The same process started anew on the same address, after its end."""
        argv = [a for a in self.argv if not a.startswith(("--listen", "--port-file"))] + [f"--listen={self.address}"]
        self.port_file.unlink(missing_ok=True)
        name, _, count = self.name.partition("+")
        return Process(f"{name}+{int(count or 0) + 1}", argv, self.directory, host=self.host, prefix=self.prefix)

    def log(self):
        return self.log_path.read_text(errors="replace")

    def metrics_text(self):
        with urllib.request.urlopen(f"http://{self.host}:{self.http_port}/metrics", timeout=10 * SLOWNESS) as reply:
            return reply.read().decode()

    def metrics(self):
        """{'name{label="x"}': value} of every sample."""
        samples = {}
        for line in self.metrics_text().splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    def metric(self, name, **labels):
        """Sum over all samples of this name that carry these labels."""
        total, found = 0.0, False
        for key, value in self.metrics().items():
            base = key.split("{", 1)[0]
            if base == name and all(f'{k}="{v}"' in key for k, v in labels.items()):
                total, found = total + value, True
        if not found:
            raise KeyError(f"{self.name} exposes no {name} {labels}")
        return total

    def http_status(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.http_port}{path}", timeout=10 * SLOWNESS) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    def signal(self, number):
        self.popen.send_signal(number)

    def stop(self, timeout=20):
        """SIGTERM, and the exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(timeout * SLOWNESS)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
                raise TimeoutError(f"{self.name} did not stop on SIGTERM:\n{self.log()[-4000:]}")
        self._log.close()
        return self.popen.returncode

    def kill(self):
        if self.popen.poll() is None:
            try:
                self.popen.send_signal(signal.SIGCONT)
            except ProcessLookupError:
                pass
            self.popen.kill()
            self.popen.wait()
        self._log.close()


class OneHost:
    """Where processes run and how they reach one another: all on the loopback. See network.py for others."""

    def start(self, name, argv, directory):
        return Process(name, [*argv, "--listen=127.0.0.1:0"], directory)

    def address(self, process):
        """Under which others reach it."""
        return process.address

    def close(self):
        pass


class Service:
    """A router with its workers. Use as a context manager."""

    def __init__(self, model, topology="pd", prefill=1, decode=1, worker_flags=(), prefill_flags=(), decode_flags=(),
                 router_flags=(), wait=True, kv_blocks=256, threads=1, worker_bin=BIN, network=None, credentials=None, token=None):
        LOGS.mkdir(parents=True, exist_ok=True)
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="service-", dir=LOGS))
        self.topology, self.model = topology, model
        self.network = network or OneHost()
        self.credentials, self.token = credentials, token  # how tests call the router: TLS (None: plaintext), bearer token
        common = [f"--model={model}", "--http-port=0"]
        worker = common + [f"--threads={threads}", f"--num-blocks={kv_blocks}", *worker_flags]
        self.prefill = [self.network.start(f"prefill-{i}", [worker_bin / "baton-prefill", *worker, *prefill_flags], self.directory)
                        for i in range(prefill if topology == "pd" else 0)]
        self.decode = [self.network.start(f"decode-{i}", [worker_bin / "baton-decode", *worker, *decode_flags], self.directory)
                       for i in range(decode)]
        self.router = None
        self.more_routers = []
        try:
            for process in self.workers:
                process.wait_ports()
            flags = [f"--topology={topology}", "--decode=" + ",".join(map(self.network.address, self.decode)), *router_flags]
            if self.prefill:
                flags.append("--prefill=" + ",".join(map(self.network.address, self.prefill)))
            self._router_argv = [BIN / "baton-router", *common, *flags]
            self.router = self.network.start("router", self._router_argv, self.directory).wait_ports()
            self.channel = self.new_channel()
            self.stub = pb_grpc.GenerationStub(self.channel)
            if wait:
                self.wait_serving()
        except BaseException:
            self.kill()
            raise

    @property
    def workers(self):
        return self.prefill + self.decode

    @property
    def processes(self):
        return self.workers + ([self.router] if self.router else []) + self.more_routers

    def add_router(self):
        """Another router over the same workers, and a stub for it."""
        router = self.network.start(f"router-{len(self.more_routers) + 1}", self._router_argv, self.directory)
        self.more_routers.append(router)
        stub = pb_grpc.GenerationStub(grpc.insecure_channel(router.wait_ports().address))
        deadline = time.monotonic() + 60 * SLOWNESS
        while not stub.GetStatus(pb.GetStatusRequest(), timeout=5 * SLOWNESS).serving:
            assert time.monotonic() < deadline, router.log()
            time.sleep(0.02)
        return stub

    def new_channel(self, **options):
        arguments = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", 16 << 20),
                     ("grpc.use_local_subchannel_pool", 1), *options.items()]
        address = self.network.address(self.router)
        if self.credentials is None:
            channel = grpc.insecure_channel(address, options=arguments)
        else:
            channel = grpc.secure_channel(address, self.credentials, options=arguments)
        return grpc.intercept_channel(channel, Bearer(self.token)) if self.token else channel

    def status(self):
        return self.stub.GetStatus(pb.GetStatusRequest(), timeout=5 * SLOWNESS)

    def wait_serving(self, timeout=60):
        deadline = time.monotonic() + timeout * SLOWNESS
        while time.monotonic() < deadline:
            for process in self.processes:
                if process.popen.poll() is not None:
                    raise RuntimeError(f"{process.name} ended with {process.popen.returncode}:\n{process.log()}")
            try:
                if self.status().serving:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.02)
        raise TimeoutError("not serving:\n" + "\n".join(p.log()[-3000:] for p in self.processes))

    def refusal(self, request):
        """Code and details with which a pair that does not fit refuses; until both workers are known, the router has no pair at all."""
        def refused():
            code, details = status_of(lambda: self.stub.Generate(request, timeout=20 * SLOWNESS))
            return code != grpc.StatusCode.UNAVAILABLE and (code, details)
        return wait_until(refused, message="no pair of workers was tried")

    def wait_idle(self, timeout=10):
        """The leak rule: running, waiting, reserved, active and quarantined are back to nothing on every process."""
        deadline = time.monotonic() + timeout * SLOWNESS
        while True:
            busy = self.busy()
            if not busy:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle: {busy}")
            time.sleep(0.05)

    def busy(self):
        found = {}
        for worker in self.workers:
            if worker.popen.poll() is not None:
                continue
            samples = worker.metrics()
            for key, value in samples.items():
                base = key.split("{", 1)[0]
                counted = base in ("baton_requests_running", "baton_requests_waiting", "baton_kv_transfer_requests") or (
                    base == "baton_kv_blocks" and re.search(r'state="(active|reserved|quarantined)"', key))
                if counted and value != 0:
                    found[f"{worker.name} {key}"] = value
        in_flight = self.router.metric("baton_router_requests_in_flight") if self.router.popen.poll() is None else 0
        if in_flight:
            found["router in flight"] = in_flight
        return found

    def restart(self, process):
        """A process that has ended, again on its address; the router too."""
        again = process.again().wait_ports()
        for group in (self.prefill, self.decode):
            if process in group:
                group[group.index(process)] = again
        if process is self.router:
            self.router = again
        return again

    def stop(self):
        """Orderly, router first. Returns {name: exit code}."""
        codes = {}
        for process in reversed(self.processes):
            codes[process.name] = process.stop()
        return codes

    def kill(self):
        for process in self.processes:
            process.kill()
        self.network.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is not None:
            for process in self.processes:
                sys.stderr.write(f"--- {process.name} ---\n{process.log()[-3000:]}\n")
        self.kill()

    # ---- calls

    def request(self, prompt=None, *, ids=None, chat=None, sampling=None, **fields):
        request = pb.GenerateRequest(**fields)
        if prompt is not None:
            request.text = prompt
        if ids is not None:
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(ids)
        if chat is not None:
            request.chat.CopyFrom(chat)
        for name, value in (sampling or {}).items():
            field = getattr(request.sampling, name, None)
            if isinstance(value, dict):
                for key, entry in value.items():
                    field[key] = entry
            elif isinstance(value, (list, tuple)):
                field.extend(value)
            else:
                setattr(request.sampling, name, value)
        return request

    def stream(self, request, timeout=60, metadata=None):
        return Answer(self.stub.Generate(request, timeout=timeout * SLOWNESS, metadata=metadata))

    def unary(self, request, timeout=60):
        return self.stub.GenerateUnary(request, timeout=timeout * SLOWNESS)

    def ids(self, prompt=None, **arguments):
        """Token ids of choice 0, streamed."""
        return self.stream(self.request(prompt, **arguments)).ids(0)


class Answer:
    """A whole streamed answer, checked for the rules that hold for every stream."""

    def __init__(self, call):
        self.messages = []
        self.texts, self.token_ids, self.logprobs, self.finished, self.deltas = {}, {}, {}, {}, {}
        self.usage = self.timings = None
        for message in call:
            self.messages.append(message)
            index = message.index
            assert index not in self.finished, f"choice {index} goes on after it has finished"
            self.texts[index] = self.texts.get(index, "") + message.text
            self.deltas.setdefault(index, []).append(message.text)
            self.token_ids.setdefault(index, []).extend(message.token_ids)
            self.logprobs.setdefault(index, []).extend(message.logprobs)
            assert message.completion_tokens == len(self.token_ids[index]), "cumulative count is wrong"
            if message.HasField("finished"):
                self.finished[index] = message.finished
                if message.finished.HasField("usage"):
                    assert self.usage is None, "two messages carry usage"
                    self.usage, self.timings = message.finished.usage, message.finished.timings
        assert self.usage is not None, "the stream ended without usage"
        assert set(self.finished) == set(self.token_ids), "a choice has no final message"
        assert self.usage.completion_tokens == sum(len(ids) for ids in self.token_ids.values())

    def ids(self, index=0):
        return self.token_ids[index]

    def text(self, index=0):
        return self.texts[index]

    def reason(self, index=0):
        return pb.FinishReason.Name(self.finished[index].reason).removeprefix("FINISH_REASON_").lower()


def status_of(call):
    """The status code and details of a call that must fail."""
    try:
        result = call()
        if hasattr(result, "__iter__") and not isinstance(result, (str, bytes)):
            list(result)
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the call succeeded")


def run_baton(*arguments, stdin=None, timeout=120):
    return subprocess.run([str(BIN / "baton"), *map(str, arguments)], input=stdin, capture_output=True, text=True,
                          timeout=timeout * SLOWNESS)
