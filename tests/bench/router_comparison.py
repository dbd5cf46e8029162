"""Baton's router beside other prefill/decode routers, each between workers that compute nothing.

    python tests/bench/router_comparison.py [--build build] [--rounds 3] [--json FILE]

Fetches the others from PyPI into .cache/tools/routers. They speak HTTP, so they get HTTP workers and an HTTP load
(tests/bench/http_null, in Go); Baton speaks gRPC and gets its own (null_worker, router_load). What is compared is what does
not depend on either: processor time of the router process for each request and each streamed token, its memory, and time to
first token, from which the HTTP load's time straight to a worker is taken off for the others and nothing for Baton. Rounds
are interleaved and the median counts. All processes share the machine's cores.
"""
import argparse
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from router_bench import ROOT, Bench, Processes, wait_file

TOOLS = (ROOT / ".cache" / "tools").absolute()
# What each is started with, beside the workers; round robin, so that no policy's index is part of the comparison.
OTHERS = {
    "vllm-router": ("0.1.17", ["bin/vllm-router", "--vllm-pd-disaggregation", "--log-level=warning"]),
    "sglang-router": ("0.3.2", ["bin/python", "-m", "sglang_router.launch_router", "--pd-disaggregation", "--log-level=warn"]),
    "smg": ("1.13.0", ["bin/smg", "launch", "--pd-disaggregation", "--log-level=warn"]),
}


def install(name, version):
    folder = TOOLS / "routers" / f"{name}-{version}"
    if not (folder / ".done").exists():
        print(f"[bench] {name} {version}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", f"{name}=={version}"], check=True)
        (folder / ".done").touch()
    return folder


def build_http_null():
    go = TOOLS / "venv/bin/go"
    subprocess.run([go if go.exists() else "go", "build", "-o", (TOOLS / "bin/http_null").absolute(), "."],
                   cwd=ROOT / "tests/bench/http_null", check=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Http(Processes):
    """HTTP workers, and a router before them where `name` tells one; else the load goes straight to the decode worker."""

    def __init__(self, name=None, gap_us=0):
        super().__init__()
        ports = {}
        for role, flags in (("prefill", ["-prefill"]), ("decode", ["-gap", f"{gap_us}us"])):
            file = self.directory / f"{role}.port"
            ports[role] = wait_file(file, self.start(role, TOOLS / "bin/http_null", "worker", "-port-file", file, *flags))
        self.url = f"http://127.0.0.1:{ports['decode']}"
        if name is None:
            return
        version, (program, *flags) = OTHERS[name]
        port = free_port()
        self.router = self.start(name, install(name, version) / program, *flags, "--host=127.0.0.1", f"--port={port}",
                                 f"--prometheus-port={free_port()}", "--policy=round_robin", "--prefill", f"http://127.0.0.1:{ports['prefill']}",
                                 "--decode", f"http://127.0.0.1:{ports['decode']}")
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            result = None
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                result = self.load(streams=1, tokens=4)
            except OSError:
                pass
            if result and result["ok"] == 1:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: {result}\n" + (self.directory / f"{name}.log").read_text()[-3000:])
            time.sleep(0.2)

    def load(self, **arguments):
        run = subprocess.run([TOOLS / "bin/http_null", "load", "-url", self.url, *(f"-{k}={v}" for k, v in arguments.items())],
                             capture_output=True, text=True, timeout=300, check=True)
        return json.loads(run.stdout)


def measure(service, rate, seconds, streams, tokens):
    """One router's figures of one round; `service` makes it, for a gap between tokens."""
    with service(0) as one:
        one.load(rate=rate, seconds=2, tokens=4)
        cpu = one.cpu_seconds()
        short = one.load(rate=rate, seconds=seconds, tokens=4)
        per_request = (one.cpu_seconds() - cpu) / short["requests"]
        flat_out = one.load(streams=streams, tokens=tokens)
        memory = one.rss_mb()
    with service(10_000) as one:
        one.load(rate=rate, seconds=1, tokens=1)
        cpu = one.cpu_seconds()
        paced = one.load(streams=streams, tokens=seconds * 100)
        per_token = (one.cpu_seconds() - cpu - streams * per_request) / paced["tokens"]
    for load in (short, flat_out, paced):
        if load["ok"] != load["requests"]:
            raise RuntimeError(f"failures: {load}")
    return {"cpu_us_per_request": per_request * 1e6, "cpu_us_per_token": per_token * 1e6, "p50_ttft_us": short["p50_ttft_us"],
            "p99_ttft_us": short["p99_ttft_us"], "tokens_per_s": flat_out["tokens_per_s"], "rss_mb": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=1000)
    arguments = parser.parse_args()
    build_http_null()
    for name, (version, _) in OTHERS.items():
        install(name, version)

    rounds = {name: [] for name in ("baton", *OTHERS)}
    direct = []
    for _ in range(arguments.rounds):
        with Http() as straight:
            straight.load(rate=arguments.rate, seconds=2, tokens=4)
            direct.append(straight.load(rate=arguments.rate, seconds=arguments.seconds, tokens=4))
        for name in rounds:
            service = (lambda gap: Bench(arguments.build, gap)) if name == "baton" else (lambda gap: Http(name, gap))
            rounds[name].append(measure(service, arguments.rate, arguments.seconds, arguments.streams, arguments.tokens))

    median = lambda runs, key: statistics.median(run[key] for run in runs)
    table = {name: {key: median(runs, key) for key in runs[0]} for name, runs in rounds.items()}
    for name, row in table.items():
        for key in ("p50_ttft_us", "p99_ttft_us"):
            row[key.replace("ttft", "added")] = row[key] - (0 if name == "baton" else median(direct, key))
    columns = ["cpu_us_per_request", "cpu_us_per_token", "p50_added_us", "p99_added_us", "tokens_per_s", "rss_mb"]
    print("| router | " + " | ".join(columns) + " |\n|---" + "|---:" * len(columns) + "|")
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{row[c]:,.1f} ({row[c] / table['baton'][c]:.1f}x)" for c in columns) + " |")
    if arguments.json:
        report = {"direct": direct, "rounds": rounds, "median": table, "versions": {name: version for name, (version, _) in OTHERS.items()}}
        pathlib.Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
