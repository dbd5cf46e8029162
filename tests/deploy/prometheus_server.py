"""A real Prometheus (Debian's) that scrapes real processes of ours, for tests."""
import json
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

import yaml

from support import CHART


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """Use as a context manager. `targets`: {component: [port, ...]}. Rules run each second."""

    def __init__(self, targets, namespace="inference"):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="baton-prometheus-"))
        self.started = time.time()
        statics = [{"targets": [f"127.0.0.1:{port}"], "labels": {"component": component, "namespace": namespace, "pod": f"baton-{component}-{i}"}}
                   for component, ports in targets.items() for i, port in enumerate(ports)]
        for rules in ("recording", "alerts"):
            text = (CHART / f"rules/{rules}.yaml").read_text().replace("interval: 30s", "interval: 1s")
            (self.directory / f"{rules}.yaml").write_text(text)
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
                  "rule_files": ["recording.yaml", "alerts.yaml"],
                  "scrape_configs": [{"job_name": "baton", "static_configs": statics}]}
        (self.directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        self._log = open(self.directory / "log", "wb")
        self.process = subprocess.Popen(["prometheus", f"--config.file={self.directory}/prometheus.yaml", f"--storage.tsdb.path={self.directory}/data",
                                         f"--web.listen-address=127.0.0.1:{self.port}"], stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self.wait(lambda: self.get("/-/ready", raw=True), "ready")
        except BaseException:
            self.stop()
            raise

    def wait(self, condition, what, timeout=60):
        deadline = time.monotonic() + timeout
        while True:
            assert self.process.poll() is None, (self.directory / "log").read_text()[-3000:]
            try:
                if condition():
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, f"Prometheus: {what} within {timeout} s"
            time.sleep(0.1)

    def get(self, path, raw=False, **query):
        url = f"http://127.0.0.1:{self.port}{path}" + ("?" + urllib.parse.urlencode(query, doseq=True) if query else "")
        try:
            with urllib.request.urlopen(url, timeout=20) as reply:
                text = reply.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 503:
                raise OSError("not ready") from error
            raise AssertionError(f"{query}: {error.read().decode()[:500]}") from error
        return text if raw else json.loads(text)["data"]

    def query(self, expr):
        return self.get("/api/v1/query", query=expr)["result"]

    def range(self, expr, step=1):
        """Matrix from the start until now."""
        return self.get("/api/v1/query_range", query=expr, start=self.started, end=time.time(), step=step)["result"]

    def stop(self):
        self.process.terminate()
        self.process.wait(20)
        self._log.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()
