"""The live page: its data, its token, its box; and in a real browser, wide and narrow, dark and light."""
import base64
import http.client
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

import pytest

from support import ROOT

sys.path.insert(0, str(ROOT / "tests/e2e"))


@pytest.fixture(scope="module")
def service():
    import harness
    with harness.Service(harness.MODELS / "tiny-qwen3") as running:
        for i in range(6):
            running.stream(running.request(f"In the beginning {i}", sampling={"max_tokens": 20, "ignore_eos": True}, request_label=f"call {i}"))
        yield running


def call(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, headers or {})
    reply = connection.getresponse()
    return reply.status, dict(reply.getheaders()), reply.read().decode()


def attempt(port, fields, **headers):
    return call(port, "POST", "/api/try", json.dumps(fields), {"Content-Type": "application/json", **headers})


def test_page_needs_nothing_from_elsewhere(service):
    status, headers, page = call(service.router.http_port, "GET", "/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    urls = re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://[^\s"']+""", page)
    assert set(urls) <= {"http://www.w3.org/2000/svg"}, urls
    assert page == (ROOT / "router/live_page.html").read_text()


def test_data_has_workers_series_and_requests_with_their_stages(service):
    status, _, text = call(service.router.http_port, "GET", "/api/live")
    data = json.loads(text)
    assert status == 200 and data["read_only"] is False and data["status"]["serving"] is True
    assert {w["role"] for w in data["status"]["workers"]} == {"prefill", "decode"}
    series = data["history"]["series"]
    assert all(len(values) == 120 for values in series.values()) and sum(series["requests"]) >= 6
    assert any(v for v in series["ttft_ms"] if v) and any(v for v in series["itl_ms"] if v)
    newest = data["history"]["requests"][0]
    assert newest["code"] == "OK" and newest["label"] == "call 5" and newest["completion_tokens"] == 20 and newest["kv_bytes"] > 0
    assert 0 < newest["ttft_s"] < newest["e2e_s"] and newest["queue_s"] + newest["tokenize_s"] + newest["prefill_s"] <= newest["e2e_s"]


def test_history_is_bounded(service):
    for i in range(45):
        service.unary(service.request("x", sampling={"max_tokens": 1}))
    assert len(json.loads(call(service.router.http_port, "GET", "/api/live")[2])["history"]["requests"]) == 40


def test_a_prompt_can_be_tried_and_its_tokens_stream_in(service):
    status, headers, text = attempt(service.router.http_port, {"prompt": "In the beginning", "max_tokens": 12, "temperature": 0})
    pieces = [json.loads(line) for line in text.splitlines()]
    assert status == 200 and headers["Content-Type"].startswith("application/x-ndjson") and len(pieces) > 1
    expected = service.stream(service.request("In the beginning", sampling={"max_tokens": 12, "temperature": 0}))
    assert "".join(p["text"] for p in pieces) == expected.text() and pieces[-1]["done"]["completion_tokens"] == len(expected.ids())
    chat = attempt(service.router.http_port, {"prompt": "hello", "chat": True, "max_tokens": 3})
    assert json.loads(chat[2].splitlines()[-1])["done"]["prompt_tokens"] > 5, "the template is around it"


@pytest.mark.parametrize("body, words", [
    ("", "JSON"), ("{}", "prompt"), ('{"prompt": 3}', "prompt"), ('{"prompt": "x", "max_tokens": 0}', "max_tokens"), ('{"prompt": "x", "max_tokens": 99999}', "max_tokens"),
    ('{"prompt": "x", "max_tokens": "y"}', ""), ("[" * 5000, "deeper"), ("[[[[" + "0" + "]]]]", "prompt"),
], ids=range(8))
def test_a_bad_try_is_refused(service, body, words):
    """Nesting among them: the HTTP server's own threads have little stack."""
    status, _, text = call(service.router.http_port, "POST", "/api/try", body, {"Content-Type": "application/json"})
    assert status == 400 and words.lower() in json.loads(text)["error"].lower()


def test_other_sites_and_methods_are_refused(service):
    port = service.router.http_port
    assert call(port, "POST", "/api/try", "prompt=x", {"Content-Type": "application/x-www-form-urlencoded"})[0] == 415
    assert call(port, "GET", "/api/try")[0] == 405 and call(port, "POST", "/")[0] == 405
    assert call(port, "POST", "/api/try", "x" * (300 << 10), {"Content-Type": "application/json"})[0] == 413


def test_an_error_of_the_service_reaches_the_page(service):
    _, _, text = attempt(service.router.http_port, {"prompt": "x", "max_tokens": 4, "temperature": -5})
    assert "INVALID_ARGUMENT" in json.loads(text.splitlines()[-1])["error"]


def test_token_and_read_only(tmp_path):
    import harness
    secret = tmp_path / "token"
    secret.write_text("sesame\n")
    with harness.Service(harness.MODELS / "chain", "single", router_flags=(f"--page-token-file={secret}", "--page=read-only")) as service:
        port = service.router.http_port
        assert call(port, "GET", "/")[0] == 200 and "sesame" not in call(port, "GET", "/")[2]
        for wrong in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "Bearer sesame2"}, {"Authorization": "sesame"}, {"Authorization": "Bearer "}):
            assert call(port, "GET", "/api/live", headers=wrong)[0] == 401
            assert attempt(port, {"prompt": "x"}, **wrong)[0] == 401
        status, _, text = call(port, "GET", "/api/live", headers={"Authorization": "Bearer sesame"})
        assert status == 200 and json.loads(text)["read_only"] is True
        assert attempt(port, {"prompt": "x"}, Authorization="Bearer sesame")[0] == 403
        assert call(port, "GET", "/metrics")[0] == 200, "scrapes need no token"


def test_page_can_be_switched_off_and_bad_settings_stop_the_start(tmp_path):
    import harness
    with harness.Service(harness.MODELS / "chain", "single", router_flags=("--page=off",)) as service:
        assert call(service.router.http_port, "GET", "/api/live")[0] == 404 and "metrics" in call(service.router.http_port, "GET", "/")[2]
    for flag in ("--page=some", f"--page-token-file={tmp_path}/none"):
        run = subprocess.run([harness.BIN / "baton-router", f"--model={harness.MODELS}/chain", "--topology=single", "--decode=127.0.0.1:1", "--listen=127.0.0.1:0", "--http-port=0", flag],
                             capture_output=True, text=True, timeout=60)
        assert run.returncode == 1 and "--page" in run.stderr


class Browser:
    """Headless Chromium, driven over its debugging protocol: one page, one socket."""

    def __init__(self, width, dark):
        self.profile = tempfile.mkdtemp(prefix="baton-browser-")
        binary = shutil.which("chromium") or shutil.which("chromium-browser")
        assert binary, "make test-all needs Debian's package chromium (scripts/install_deps.sh --browser)"
        self.process = subprocess.Popen([binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={self.profile}",
                                         f"--window-size={width},1400", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ports = os.path.join(self.profile, "DevToolsActivePort")
        deadline = time.monotonic() + 60
        while not (os.path.exists(ports) and os.path.getsize(ports)):
            assert self.process.poll() is None and time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.05)
        port = int(open(ports).readline())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as reply:
            page = next(t for t in json.load(reply) if t["type"] == "page")
        self.socket = socket.create_connection(("127.0.0.1", port))
        path = page["webSocketDebuggerUrl"].split(str(port), 1)[1]
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.socket.settimeout(60)
        self.stream = self.socket.makefile("rb")
        while self.stream.readline() != b"\r\n":
            pass
        self.count, self.events = 0, []
        self.send("Runtime.enable")
        self.send("Log.enable")
        self.send("Network.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=1400, deviceScaleFactor=1, mobile=width < 500)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def receive(self):
        head = self.stream.read(2)
        length = head[1] & 127
        if length >= 126:
            length = struct.unpack(">H" if length == 126 else ">Q", self.stream.read(2 if length == 126 else 8))[0]
        return json.loads(self.stream.read(length))

    def send(self, method, **params):
        self.count += 1
        data = json.dumps({"id": self.count, "method": method, "params": params}).encode()
        mask = os.urandom(4)
        size = bytes([128 | len(data)]) if len(data) < 126 else bytes([128 | 126]) + struct.pack(">H", len(data)) if len(data) < 65536 else bytes([255]) + struct.pack(">Q", len(data))
        self.socket.sendall(b"\x81" + size + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data)))
        while True:
            message = self.receive()
            if message.get("id") == self.count:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression, timeout=30):
        deadline = time.monotonic() + timeout
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def picture(self, name):
        directory = ROOT / ".cache/pictures"
        directory.mkdir(parents=True, exist_ok=True)
        height = int(self.evaluate("document.documentElement.scrollHeight"))
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                         clip={"x": 0, "y": 0, "width": self.evaluate("innerWidth"), "height": min(height, 12000), "scale": 1})["data"]
        path = directory / f"{name}.png"
        path.write_bytes(base64.b64decode(data))
        return path

    def errors(self):
        return [e for e in self.events if e["method"] == "Runtime.exceptionThrown" or (e["method"] == "Log.entryAdded" and e["params"]["entry"]["level"] == "error")]

    def requested(self):
        return {e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"}

    def close(self):
        self.socket.close()
        self.process.terminate()
        self.process.wait(20)
        shutil.rmtree(self.profile, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("width, dark", [(1280, False), (1280, True), (360, False), (360, True)])
def test_page_in_a_browser(service, width, dark):
    base = f"http://127.0.0.1:{service.router.http_port}/"
    browser = Browser(width, dark)
    try:
        browser.send("Page.navigate", url=base)
        browser.wait("document.querySelectorAll('#requests tr').length >= 6 && document.querySelectorAll('.worker').length === 2")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
        assert browser.evaluate("document.getElementById('state').textContent") == "serving"
        browser.evaluate("document.getElementById('prompt').value = 'In the beginning'; document.getElementById('max-tokens').value = 30; document.getElementById('go').click()")
        browser.wait("document.getElementById('try-facts').textContent.includes('30 tokens')")
        assert browser.evaluate("document.getElementById('answer').textContent.length") > 10
        browser.wait("[...document.querySelectorAll('#requests tr')].some(r => r.textContent.includes('live-page'))")
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(16, 20, 26)") == dark, background
        browser.picture(f"page-{width}-{'dark' if dark else 'light'}")
        browser.evaluate("1")
        assert not browser.errors(), browser.errors()
        assert all(url.startswith(base) for url in browser.requested()), browser.requested()
    finally:
        browser.close()


@pytest.mark.slow
def test_page_asks_for_its_token_in_a_browser(tmp_path):
    import harness
    secret = tmp_path / "token"
    secret.write_text("sesame\n")
    with harness.Service(harness.MODELS / "chain", "single", router_flags=(f"--page-token-file={secret}", "--page=read-only")) as running:
        browser = Browser(800, False)
        try:
            browser.send("Page.navigate", url=f"http://127.0.0.1:{running.router.http_port}/")
            browser.wait("!document.getElementById('login').hidden")
            assert browser.evaluate("document.getElementById('content').hidden")
            browser.evaluate("document.getElementById('token').value = 'sesame'; document.querySelector('#token-form button').click()")
            browser.wait("!document.getElementById('content').hidden")
            assert browser.evaluate("document.getElementById('try').hidden"), "read-only"
        finally:
            browser.close()
