"""Services that several tests share, started once per model and topology."""
import pathlib
import shutil
import signal
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import harness  # noqa: E402


class ServicePool:
    """Running services by their settings. Two are kept at most: the machine has two cores."""

    def __init__(self, limit=2):
        self.limit, self.running = limit, {}

    def get(self, model, topology="pd", **settings):
        key = (str(model), topology, tuple(sorted((k, str(v)) for k, v in settings.items())))
        if key in self.running:
            service = self.running.pop(key)
            if all(p.popen.poll() is None for p in service.processes):
                self.running[key] = service
                return service
            service.kill()
        while len(self.running) >= self.limit:
            self.running.pop(next(iter(self.running))).kill()
        self.running[key] = harness.Service(model, topology, **settings)
        return self.running[key]

    def close(self):
        for service in self.running.values():
            service.kill()


@pytest.fixture(scope="session", autouse=True)
def ends_cleanly_when_terminated():
    """SIGTERM ends the session as Ctrl-C does: fixtures stop their services."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def fresh_logs():
    shutil.rmtree(harness.LOGS, ignore_errors=True)


@pytest.fixture(scope="session")
def pool():
    services = ServicePool()
    yield services
    services.close()


@pytest.fixture
def tiny(pool):
    """tiny-qwen3, one prefill and one decode worker."""
    service = pool.get(harness.MODELS / "tiny-qwen3")
    yield service
    service.wait_idle()


@pytest.fixture
def chain(pool):
    """The chain model: the next token is a fixed permutation of the current one."""
    service = pool.get(harness.MODELS / "chain")
    yield service
    service.wait_idle()
