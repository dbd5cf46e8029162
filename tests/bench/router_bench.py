"""The router's own cost: real baton-router between workers that compute nothing and a load generator.

    python tests/bench/router_bench.py [--build build] [--json FILE]

Prints, for a load of 1,000 requests/s of 128 pre-tokenised prompt tokens, the router's internal time (its own histogram
baton_router_overhead_seconds), then the rate of streamed tokens, then memory with 2,000 open streams that are read and with
streams whose reader has stopped. All processes share the machine's cores.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "models" / "chain"


def wait_file(path, process, timeout=30):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().strip():
            return path.read_text()
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} ended with {process.returncode}")
        time.sleep(0.02)
    raise TimeoutError(str(path))


def tree(pid):
    """The process and its descendants."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += map(int, pathlib.Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


class Processes:
    """What was started goes with it. `router` is the process that is measured, with those it has started."""

    def __init__(self):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="baton-bench-"))
        self.processes = []
        self.router = None

    def start(self, name, *argv):
        log = open(self.directory / f"{name}.log", "wb")
        process = subprocess.Popen([str(a) for a in argv], stdout=log, stderr=subprocess.STDOUT, cwd=self.directory)
        self.processes.append(process)
        return process

    def rss_mb(self):
        kilobytes = (re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{one}/status").read_text()) for one in tree(self.router.pid))
        return sum(int(found.group(1)) for found in kilobytes) / 1024

    def cpu_seconds(self):
        ticks = 0
        for one in tree(self.router.pid):
            fields = pathlib.Path(f"/proc/{one}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / 100

    def close(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Bench(Processes):
    def __init__(self, build, gap_us=0, router_flags=()):
        super().__init__()
        self.build = pathlib.Path(build).absolute()
        ports = self.directory / "workers"
        worker = self.start("workers", self.build / "bench/null_worker", f"--port_file={ports}", f"--gap_us={gap_us}",
                            f"--model={MODEL}")
        prefill, decode = wait_file(ports, worker).split()
        port_file = self.directory / "router.json"
        self.router = self.start("router", self.build / "bin/baton-router", f"--model={MODEL}", "--listen=127.0.0.1:0", "--http-port=0",
                                 f"--port-file={port_file}", f"--prefill=127.0.0.1:{prefill}", f"--decode=127.0.0.1:{decode}",
                                 "--max-concurrent=100000", "--max-queue=100000", "--prefill-queue-tokens=0", *router_flags)
        router = json.loads(wait_file(port_file, self.router))
        self.address, self.http = f"127.0.0.1:{router['grpc']}", router["http"]
        self.wait_ready()

    def wait_ready(self):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/ready", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise TimeoutError((self.directory / "router.log").read_text()[-3000:])

    def load_command(self, **arguments):
        return [str(self.build / "bench/router_load"), f"--address={self.address}", *(f"--{k}={v}" for k, v in arguments.items())]

    def load(self, **arguments):
        run = subprocess.run(self.load_command(**arguments), capture_output=True, text=True, timeout=300, check=True)
        return json.loads(run.stdout.splitlines()[-1])

    def metrics(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/metrics", timeout=30) as reply:
            return reply.read().decode()

    def overhead(self, before=""):
        """{stage: {p50, p99, mean, count}} in seconds; percentiles are upper edges of buckets, interpolated."""
        return {stage: summary(buckets(self.metrics(), stage), buckets(before, stage)) for stage in ("dispatch", "forward", "total")}

    def gauge(self, name):
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.metrics().splitlines() if line.startswith(name + "{"))


def buckets(text, stage):
    """[(upper edge, cumulative count)]"""
    found = re.findall(rf'baton_router_overhead_seconds_bucket{{[^}}]*stage="{stage}"[^}}]*le="([^"]+)"}} (\S+)', text)
    return [(float("inf") if edge == "+Inf" else float(edge), float(count)) for edge, count in found]


def summary(now, before):
    counts = [(edge, count - (before[i][1] if before else 0)) for i, (edge, count) in enumerate(now)]
    total = counts[-1][1] if counts else 0

    def percentile(p):
        rank, low, seen = p / 100 * total, 0.0, 0.0
        for edge, count in counts:
            if count >= rank:
                if edge == float("inf"):
                    return low
                return low + (edge - low) * (rank - seen) / max(1e-9, count - seen)
            low, seen = edge, count
        return low
    return {"count": total, "p50_us": percentile(50) * 1e6, "p99_us": percentile(99) * 1e6} if total else {"count": 0}


def rate_run(build, rate, seconds):
    with Bench(build) as bench:
        bench.load(rate=200, seconds=2, prompt=128, tokens=4)
        before, cpu = bench.metrics(), bench.cpu_seconds()
        result = bench.load(rate=rate, seconds=seconds, prompt=128, tokens=4)
        return {"load": result, "overhead": bench.overhead(before), "router_cpu_share": (bench.cpu_seconds() - cpu) / result["seconds"]}


def fan_out_run(build, streams, tokens):
    with Bench(build) as bench:
        cpu = bench.cpu_seconds()
        result = bench.load(streams=streams, tokens=tokens, prompt=16)
        return {"load": result, "router_cpu_share": (bench.cpu_seconds() - cpu) / result["seconds"]}


def memory_run(build, streams):
    with Bench(build, gap_us=100_000) as bench:
        idle = bench.rss_mb()
        load = subprocess.Popen(bench.load_command(streams=streams, tokens=100, prompt=128), stdout=subprocess.PIPE, text=True)
        peak, most = idle, 0
        while load.poll() is None:
            peak, most = max(peak, bench.rss_mb()), max(most, bench.gauge("baton_router_requests_in_flight"))
            time.sleep(0.2)
        return {"load": json.loads(load.stdout.read().splitlines()[-1]), "idle_mb": idle, "peak_mb": peak, "open_streams": most,
                "kb_per_stream": (peak - idle) * 1024 / max(1, most)}


def stopped_readers_run(build, streams):
    """Readers stop after a message, while tokens come for each: the router cuts them off and lets the workers go."""
    with Bench(build, gap_us=500) as bench:
        idle = bench.rss_mb()
        load = subprocess.Popen(bench.load_command(streams=streams, tokens=200_000, prompt=128, stop_reading=1, seconds=1),
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        begin, peak, cut_after = time.monotonic(), idle, None
        while time.monotonic() - begin < 120:
            peak = max(peak, bench.rss_mb())
            if time.monotonic() - begin > 1 and bench.gauge("baton_router_requests_in_flight") == 0:
                cut_after = time.monotonic() - begin
                break
            time.sleep(0.2)
        load.communicate("go\n", timeout=120)
        return {"streams": streams, "idle_mb": idle, "peak_mb": peak, "all_cut_after_s": cut_after}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build")
    parser.add_argument("--json")
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--only", choices=["rate", "fan_out", "memory", "stopped"])
    arguments = parser.parse_args()
    runs = {"rate": lambda: rate_run(arguments.build, arguments.rate, arguments.seconds),
            "fan_out": lambda: fan_out_run(arguments.build, 200, 2000),
            "memory": lambda: memory_run(arguments.build, 2000),
            "stopped": lambda: stopped_readers_run(arguments.build, 20)}
    results = {name: run() for name, run in runs.items() if arguments.only in (None, name)}
    print(json.dumps(results, indent=1))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
