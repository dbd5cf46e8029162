"""What a scrape of /metrics costs: real processes, idle and under load, with vLLM's names and without.

    python tests/bench/metrics_bench.py [--build build] [--scrapes 400] [--json FILE]

Three times of each scrape, because they answer different questions:
  client   from the first byte of the request to the last of the answer, as seen by a client on this machine; over one connection that is kept, and with a
           new one each time
  handler  what the process itself says it took to write the page (the header Server-Timing)
  cpu      CPU time of the process meanwhile, all its threads: heartbeats and requests too, so only the idle service's says what a scrape costs
Scrapes come 20 times a second, as those of an endpoint picker, or one after the other (--interval-ms 0). The load is `baton bench` with --concurrency streams.
"""
import argparse
import gc
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--scrapes", type=int, default=400, help="of each kind")
    parser.add_argument("--interval-ms", type=float, default=50)
    parser.add_argument("--concurrency", type=int, default=2, help="streams of the load")
    parser.add_argument("--page", default="/metrics")
    parser.add_argument("--json")
    return parser.parse_args()


ARGUMENTS = parse()
os.environ["BATON_BUILD_DIR"] = str(pathlib.Path(ARGUMENTS.build).resolve())
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from harness import BIN, MODELS, Service  # noqa: E402

BUFFER = bytearray(1 << 20)


class Client:
    """GETs of one page, at the least cost to the client."""

    def __init__(self, port, path, keep):
        self.port, self.keep, self.socket = port, keep, None
        self.request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n".encode()

    def get(self):
        """(head, bytes of the body, ms)."""
        begin = time.perf_counter()
        if self.socket is None:
            self.socket = socket.create_connection(("127.0.0.1", self.port))
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(self.request)
        view, size, need = memoryview(BUFFER), 0, None
        while need is None or size < need:
            got = self.socket.recv_into(view[size:])
            assert got > 0, "the answer was cut"
            size += got
            if need is None and (end := BUFFER.find(b"\r\n\r\n", 0, size)) >= 0:
                head = BUFFER[:end].decode()
                need = end + 4 + int(re.search(r"Content-Length: (\d+)", head)[1])
        spent = 1e3 * (time.perf_counter() - begin)
        if not self.keep or "connection: close" in head.lower():
            self.socket.close()
            self.socket = None
        return head, need - end - 4, spent


def percentiles(values):
    values = sorted(values)
    return {name: round(values[min(len(values) - 1, int(share * len(values)))], 3) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))}


def scrape(process, keep):
    client = Client(process.http_port, ARGUMENTS.page, keep)
    clock = (~process.popen.pid << 3) | 2  # clock_getcpuclockid(3)
    times = {"client": [], "handler": [], "cpu": []}
    due = time.perf_counter()
    for _ in range(ARGUMENTS.scrapes):
        due += ARGUMENTS.interval_ms / 1e3
        time.sleep(max(0.0, due - time.perf_counter()))
        before = time.clock_gettime(clock)
        head, size, spent = client.get()
        times["cpu"].append(1e3 * (time.clock_gettime(clock) - before))
        times["client"].append(spent)
        timing = re.search(r"Server-Timing: page;dur=([0-9.]+)", head)
        if timing:
            times["handler"].append(float(timing[1]))
    return {"bytes": size} | {name: percentiles(values) for name, values in times.items() if values}


def load(service):
    return subprocess.Popen([BIN / "baton", "bench", "--address", service.router.address, "--concurrency", str(ARGUMENTS.concurrency), "--requests", "100000",
                             "--prompt-tokens", "20-60", "--output-tokens", "16"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def measure(flags):
    found = {}
    with Service(MODELS / "tiny-qwen3", worker_flags=flags, router_flags=flags) as service:
        for i in range(20):
            service.stream(service.request(f"In the beginning {i}", sampling={"max_tokens": 20, "ignore_eos": True}))
        service.wait_idle()
        for state in ("idle", "load"):
            running = load(service) if state == "load" else None
            try:
                for process in service.processes:
                    for keep in (True, False):
                        found[state, process.name, "kept" if keep else "new"] = scrape(process, keep)
            finally:
                if running is not None:
                    running.kill()
                    running.wait()
    return found


def main():
    gc.disable()
    rows = []
    for names, flags in (("native", ()), ("vllm", ("--metrics-compat=vllm",))):
        for (state, process, connection), values in measure(flags).items():
            rows.append({"names": names, "state": state, "process": process, "connection": connection, **values})
    print(f"{'names':7}{'state':6}{'process':11}{'conn.':6}{'bytes':>8}   client p50/p99/max   handler p50/p99/max   cpu p50/p99/max, ms")
    for row in rows:
        times = ["/".join(f"{v:.3f}" for v in row[kind].values()) if kind in row else "-" for kind in ("client", "handler", "cpu")]
        print(f"{row['names']:7}{row['state']:6}{row['process']:11}{row['connection']:6}{row['bytes']:8}   " + "   ".join(f"{t:19}" for t in times))
    if ARGUMENTS.json:
        pathlib.Path(ARGUMENTS.json).write_text(json.dumps(rows, indent=1) + "\n")


main()
