"""Dashboards, rules and autoscaling targets: well formed, tested, and about metrics that exist and move."""
import concurrent.futures
import filecmp
import http.client
import json
import os
import re
import sys
import time

import grpc
import pytest
import yaml

from support import CHART, ROOT, kinds, render, run

sys.path.insert(0, str(ROOT / "tests/e2e"))
MONITORING = ROOT / "deploy/monitoring"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))
MODEL = "qwen3-8b"  # the name in the chart's examples
METRIC = re.compile(r"\b(baton[_:][a-z0-9_:]*|grpc_server_[a-z_]+|process_[a-z_]+)\b(?!\s*=)")


def rules(name):
    return [rule for group in yaml.safe_load((CHART / f"rules/{name}.yaml").read_text())["groups"] for rule in group["rules"]]


def board_targets():
    """(where, expression) of every query of every dashboard."""
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                yield f"{path.stem}: {panel['title']}: {target['refId']}", target["expr"]


def scaling_targets():
    """(where, query) of KEDA's triggers and of the adapter's metrics, as they reach Prometheus."""
    for name, scaled in kinds(render("split-keda"), "ScaledObject").items():
        for trigger in scaled["spec"]["triggers"]:
            yield f"ScaledObject {name}", trigger["metadata"]["query"]
    for rule in yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text())["rules"]:
        series = re.match(r"[a-z_]+", rule["seriesQuery"])[0]
        query = rule["metricsQuery"].replace("<<.Series>>", series).replace("<<.GroupBy>>", "pod")
        yield f"adapter {rule['name']['as']}", query.replace("<<.LabelMatchers>>", 'namespace="inference",pod=~"baton-.*"')


def family(name):
    return re.sub(r"_(bucket|sum|count)$", "", name)


def exposed(text):
    """Families of a /metrics page."""
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def test_rules_are_well_formed():
    run("promtool", "check", "rules", CHART / "rules/recording.yaml", CHART / "rules/alerts.yaml")


def test_sample_configuration_is_well_formed(tmp_path):
    (tmp_path / "rules").symlink_to(CHART / "rules")
    (tmp_path / "prometheus.yaml").write_text((MONITORING / "prometheus.yaml").read_text())
    run("promtool", "check", "config", tmp_path / "prometheus.yaml")


def test_every_alert_fires_and_stays_quiet():
    run("promtool", "test", "rules", MONITORING / "alerts_test.yaml")
    cases = [case for test in yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"] for case in test["alert_rule_test"]]
    for alert in (rule["alert"] for rule in rules("alerts")):
        outcomes = {bool(case["exp_alerts"]) for case in cases if case["alertname"] == alert}
        assert outcomes == {True, False}, f"{alert} has no case that {'fires' if True not in outcomes else 'stays quiet'}"


def test_alerts_say_what_to_do_and_the_guide_knows_them():
    guide = (ROOT / "docs/operate.md").read_text()
    for rule in rules("alerts"):
        assert set(rule["annotations"]) == {"summary", "description", "action"} and rule["labels"]["severity"] in ("critical", "warning", "info")
    shipped = [rule["alert"] for rule in rules("alerts")]
    explained = re.findall(r"^\| `(Baton\w+)` \|", guide, re.MULTILINE)
    assert sorted(explained) == sorted(set(shipped)), set(explained) ^ set(shipped)


def test_autoscalers_ask_for_metrics_that_the_adapter_has():
    known = {rule["name"]["as"] for rule in yaml.safe_load((MONITORING / "adapter-rules.yaml").read_text())["rules"]}
    asked = {metric["pods"]["metric"]["name"] for scaler in kinds(render("split"), "HorizontalPodAutoscaler").values() for metric in scaler["spec"]["metrics"]}
    assert len(asked) == 4 and asked == known


def test_dashboards_are_what_their_script_writes(tmp_path):
    run(sys.executable, ROOT / "scripts/make_dashboards.py", "--out", tmp_path)
    for path in BOARDS:
        assert filecmp.cmp(path, tmp_path / path.name, shallow=False), f"{path.name}: run scripts/make_dashboards.py"
    assert len(BOARDS) == len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_are_well_formed(path):
    board = json.loads(path.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and 39 <= board["schemaVersion"] <= 41
    assert [v["name"] for v in board["templating"]["list"]] == ["DS_PROMETHEUS", "namespace", "model_name", "role", "pod"]
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"] and panel["datasource"]["uid"] == "${DS_PROMETHEUS}" and panel["fieldConfig"]["defaults"]["unit"]
            assert all("[5m]" not in target["expr"] for target in panel["targets"]), "rates go with the resolution"


class Load:
    """A service under a bit of everything, watched by Prometheus."""

    def __init__(self, harness, prometheus_server):
        self.harness = harness
        # Workers of this service have the GPU of the tests' own management library, so that its panels have something to show.
        os.environ["LD_LIBRARY_PATH"] = str(harness.BUILD / "fake_nvml")
        self.service = harness.Service(harness.MODELS / "tiny-qwen3", kv_blocks=128,
                                       worker_flags=(f"--served-model-name={MODEL}", "--test-gpu=0000:e0:00.0"),
                                       router_flags=(f"--served-model-name={MODEL}", "--max-concurrent=6", "--slo-ttft=5s", "--slo-tpot=1s"))
        try:
            ports = {"router": [self.service.router.http_port], "prefill": [p.http_port for p in self.service.prefill], "decode": [p.http_port for p in self.service.decode]}
            self.prometheus = prometheus_server.Prometheus(ports)
        except BaseException:
            self.service.kill()
            raise

    def one(self, i):
        service, pb = self.service, self.harness.pb
        try:
            if i % 8 == 0:
                call = service.stub.Generate(service.request("And it came to pass", sampling={"max_tokens": 300, "ignore_eos": True}), timeout=60)
                next(call)
                call.cancel()
            elif i % 8 == 4:  # at some place of its hand-over: blocks that are being written are in quarantine for a moment
                call = service.stub.Generate(service.request(f"{i} And it came to pass" * 60, sampling={"max_tokens": 2}), timeout=60)
                time.sleep(0.001 * (i % 29))
                call.cancel()
            elif i % 8 == 1:
                service.stream(service.request("x", sampling={"top_p": 9.0}))
            elif i % 8 == 2:
                service.unary(service.request("In the beginning God created the heaven and the earth. " * 8, sampling={"max_tokens": 12, "ignore_eos": True}))
            elif i % 8 == 3:
                service.unary(service.request("one token", sampling={"max_tokens": 1}))
            else:
                service.stream(service.request(f"In the beginning {i}", sampling={"max_tokens": 40, "ignore_eos": True}))
        except grpc.RpcError:
            assert i % 8 in (0, 1), "a request failed that must not"

    def run(self, count):
        with concurrent.futures.ThreadPoolExecutor(10) as threads:
            list(threads.map(self.one, range(count)))

    def wait_scraped(self):
        """Until Prometheus knows of all requests so far."""
        before = self.service.router.metric("baton_router_requests_total")
        self.prometheus.wait(lambda: self.prometheus.query("sum(baton_router_requests_total)")[0]["value"][1] == f"{before:g}", "the last count")

    def close(self):
        self.prometheus.stop()
        self.service.kill()


@pytest.fixture(scope="module")
def load():
    import harness
    import prometheus_server
    running = Load(harness, prometheus_server)
    try:
        # Two scrapes before anything happens, and load over several more: rates have something to say.
        running.prometheus.wait(lambda: len(running.prometheus.query("count_over_time(up[1m]) >= 2")) == 3, "two scrapes")
        for _ in range(4):
            running.run(40)
            running.wait_scraped()
        yield running
    finally:
        running.close()


def fill_in(expr):
    expr = expr.replace("$__rate_interval", "15s")
    return re.sub(r"\$(namespace|model_name|role|pod)\b", ".*", expr)


def test_every_panel_has_data(load):
    empty = [where for where, expr in board_targets() if not load.prometheus.range(fill_in(expr))]
    assert not empty, "\n".join(empty)


def test_values_of_panels_are_numbers(load):
    """An expression that gives NaN all the time is as empty as one that gives nothing."""
    empty = [where for where, expr in board_targets()
             if all(value == "NaN" for series in load.prometheus.range(fill_in(expr)) for _, value in series["values"])]
    assert not empty, "\n".join(empty)


def test_every_recording_rule_and_scaling_target_has_data(load):
    wanted = [(rule["record"], rule["record"]) for rule in rules("recording")] + list(scaling_targets())
    load.prometheus.wait(lambda: all(load.prometheus.query(query) for _, query in wanted), "data for " + ", ".join(
        where for where, query in wanted if not load.prometheus.query(query)), timeout=20)


def test_everything_that_alerts_look_at_has_data(load):
    """An alert is empty while all is well; what it selects must be there all the same."""
    for rule in rules("alerts"):
        selectors = re.findall(r"\b((?:baton|up|grpc|process)[a-z0-9_:]*(?:\{[^}]*\})?)", rule["expr"])
        assert selectors
        for selector in selectors:
            assert load.prometheus.query(selector), f"{rule['alert']}: {selector}"


def test_nothing_is_alarming_about_a_healthy_service(load):
    firing = [a["labels"]["alertname"] for a in load.prometheus.get("/api/v1/alerts")["alerts"] if a["state"] == "firing"]
    assert firing == []


def written(script, path):
    run(sys.executable, script, "--out", path)
    return path.read_text()


def test_every_metric_is_documented_and_used_or_marked(load, tmp_path):
    """docs/metrics.md has a row for each metric that a process exposes; the last column says where it is used, or why it is not."""
    pages = set().union(*(exposed(process.metrics_text()) for process in load.service.processes))
    rows = dict(re.findall(r"^\| `([a-z0-9_]+)` \|.*\| ([^|]*) \|$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    assert set(rows) == pages, f"not documented: {sorted(pages - set(rows))}; not exposed: {sorted(set(rows) - pages)}"
    assert (ROOT / "docs/metrics.md").read_text() == written(ROOT / "scripts/make_metrics_doc.py", tmp_path / "metrics.md"), "run scripts/make_metrics_doc.py"
    sources = {path.stem.removeprefix("baton-"): [t for w, t in board_targets() if w.startswith(path.stem + ":")] for path in BOARDS}
    sources |= {"alerts": [r["expr"] for r in rules("alerts")], "recording": [r["expr"] for r in rules("recording")], "scaling": [q for _, q in scaling_targets()]}
    used = {name: {family(m) for expr in exprs for m in METRIC.findall(expr)} for name, exprs in sources.items()}
    for metric, where in rows.items():
        actual = sorted(name for name, metrics in used.items() if metric in metrics)
        if actual:
            assert where == ", ".join(actual), f"{metric}: used in {actual}, documented as {where}"
        else:
            assert where.startswith("not shown: "), f"{metric} is shown nowhere, and the guide does not say why"
    unknown = {m for metrics in used.values() for m in metrics if not m.startswith("baton:")} - pages
    assert not unknown, f"asked for, but not exposed: {unknown}"


def test_metrics_pages_pass_promtool(load):
    for process in load.service.processes:
        run("promtool", "check", "metrics", input=process.metrics_text())


def test_lite_page_is_small_and_agrees(load):
    import urllib.request
    for process in load.service.processes:
        with urllib.request.urlopen(f"http://127.0.0.1:{process.http_port}/metrics/lite", timeout=10) as reply:
            text = reply.read().decode()
        assert exposed(text) < exposed(process.metrics_text()) and len(text) < 2500
        assert len(exposed(text)) == (3 if process is load.service.router else 4)


def cpu_ms_of_scrapes(process, count=300, path="/metrics"):
    """What each of `count` scrapes cost the process, sorted. CPU time, because a core may be lent to others meanwhile; all of its threads, so its heartbeats too."""
    clock = (~process.popen.pid << 3) | 2  # clock_getcpuclockid(3)
    connection = http.client.HTTPConnection("127.0.0.1", process.http_port, timeout=60)
    costs = []
    for _ in range(count):
        before = time.clock_gettime(clock)
        connection.request("GET", path)
        text = connection.getresponse().read().decode()
        costs.append(1e3 * (time.clock_gettime(clock) - before))
    connection.close()
    assert "baton_" in text
    return sorted(costs)


# An endpoint picker asks 20 times a second; 1 ms is then 2 % of a core. Half of the scrapes are held to it here: the slowest are those during which
# the process sent a heartbeat or other programs had its caches. docs/measurements/metrics.md has the figures, unit_base the closer bound.
def test_a_page_of_metrics_costs_less_than_a_millisecond(load):
    harness = load.harness
    load.service.wait_idle()
    flags = ("--metrics-compat=vllm",)
    with harness.Service(harness.MODELS / "tiny-qwen3", worker_flags=flags, router_flags=flags) as compatible:
        for i in range(8):
            compatible.stream(compatible.request(f"In the beginning {i}", sampling={"max_tokens": 20, "ignore_eos": True}))
        compatible.wait_idle()
        for process in [*load.service.processes, *compatible.processes]:
            costs = cpu_ms_of_scrapes(process)
            print(f"{process.name}: {len(process.metrics_text())} bytes, p50 {costs[150]:.3f} ms, p99 {costs[297]:.3f} ms")
            assert costs[150] < 1, process.name


@pytest.mark.slow
@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_as_pictures(load, path, tmp_path):
    """Rendered in a browser from that Prometheus: no panel is empty, no text sticks out. The pictures lie in .cache/pictures."""
    from board_view import board_html
    from test_page import Browser
    load.run(40)  # of now, so that rates end in something
    load.wait_scraped()
    page = tmp_path / f"{path.stem}.html"
    page.write_text(board_html(path, lambda expr: load.prometheus.range(fill_in(expr))))
    browser = Browser(1210, False)
    try:
        browser.send("Page.navigate", url=page.as_uri())
        browser.wait("document.querySelectorAll('section').length > 5")
        assert browser.evaluate("[...document.querySelectorAll('section')].filter(s => s.dataset.series === '0').map(s => s.dataset.panel)") == []
        too_big = "s.scrollWidth > s.clientWidth + 1 || s.scrollHeight > s.clientHeight + 1"
        assert browser.evaluate(f"[...document.querySelectorAll('section')].filter(s => {too_big}).map(s => s.dataset.panel)") == []
        cut = "t.getBoundingClientRect().left < t.closest('svg').getBoundingClientRect().left"
        assert browser.evaluate(f"[...document.querySelectorAll('text')].filter(t => {cut}).map(t => t.textContent)") == []
        browser.picture(path.stem)
    finally:
        browser.close()
