#!/usr/bin/env python3
"""Writes the Grafana dashboards of deploy/helm/baton/dashboards. Panels stand here, in order, one a line where that fits.

Usage: scripts/make_dashboards.py [--out DIR]; without it the committed files are written.
"""
import argparse
import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "deploy/helm/baton/dashboards"

ROUTER = 'namespace=~"$namespace", model_name=~"$model_name"'
WORKER = ROUTER + ', role=~"$role", pod=~"$pod"'
RATE = "$__rate_interval"


def quantiles(metric, by="", select=ROUTER, values=(0.5, 0.95, 0.99), legend=""):
    """One line a quantile."""
    group = f"le, {by}" if by else "le"
    return [(f"histogram_quantile({q}, sum by ({group}) (rate({metric}_bucket{{{select}}}[{RATE}])))", f"p{q * 100:g}{legend}") for q in values]


def mean(metric, by, select=ROUTER, legend=""):
    return (f"sum by ({by}) (rate({metric}_sum{{{select}}}[{RATE}])) / (sum by ({by}) (rate({metric}_count{{{select}}}[{RATE}])) > 0)", legend)


def rate(metric, by, select=ROUTER, legend=None):
    return (f"sum by ({by}) (rate({metric}{{{select}}}[{RATE}]))", legend if legend is not None else "{{" + by.split(", ")[0] + "}}")


def total(metric, by, select=ROUTER, legend=None, how="sum"):
    return (f"{how} by ({by}) ({metric}{{{select}}})", legend if legend is not None else "{{" + by.split(", ")[0] + "}}")


class Panel:
    def __init__(self, title, targets, unit="short", kind="timeseries", width=8, height=7, help="", stack=False, min=0, max=None):
        self.title, self.unit, self.kind, self.width, self.height, self.help, self.stack = title, unit, kind, width, height, help, stack
        self.targets = targets if isinstance(targets, list) else [targets]
        self.min, self.max = min, max

    def json(self, panel_id, x, y):
        defaults = {"unit": self.unit, "min": self.min, "custom": {}}
        if self.max is not None:
            defaults["max"] = self.max
        options = {}
        if self.kind == "timeseries":
            defaults["custom"] = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if self.stack else 8, "showPoints": "never", "spanNulls": True,
                                  "stacking": {"mode": "normal" if self.stack else "none", "group": "A"}}
            options = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}, "tooltip": {"mode": "multi", "sort": "desc"}}
        elif self.kind == "stat":
            options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value", "graphMode": "area"}
        elif self.kind == "heatmap":
            options = {"calculate": False, "color": {"mode": "scheme", "scheme": "Blues", "steps": 64}, "yAxis": {"unit": self.unit}, "cellGap": 1}
        elif self.kind == "table":
            options = {"showHeader": True}
        targets = []
        for i, (expr, legend) in enumerate(self.targets):
            target = {"refId": chr(ord("A") + i), "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}, "expr": expr, "legendFormat": legend}
            if self.kind == "heatmap":
                target["format"] = "heatmap"
            if self.kind == "table":
                target.update({"format": "table", "instant": True})
            targets.append(target)
        return {"id": panel_id, "type": self.kind, "title": self.title, "description": self.help,
                "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"},
                "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
                "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options, "targets": targets}


def stat(title, expr, unit="short", help="", max=None):
    return Panel(title, [(expr, "")], unit, "stat", width=4, height=4, help=help, max=max)


def heatmap(title, metric, unit, select=WORKER, help=""):
    return Panel(title, [(f"sum by (le) (increase({metric}_bucket{{{select}}}[{RATE}]))", "{{le}}")], unit, "heatmap", help=help)


OVERVIEW = [
    ("Now", [
        stat("Ready workers", f'sum(max by (worker_role) (baton_router_workers{{{ROUTER}, state="ready"}}))', help="As the routers see them."),
        stat("Requests in flight", f"sum(baton_router_requests_in_flight{{{ROUTER}}})"),
        stat("Error ratio", f'sum(rate(baton_router_requests_total{{{ROUTER}, code=~"INTERNAL|UNAVAILABLE|DATA_LOSS|UNKNOWN"}}[{RATE}])) / sum(rate(baton_router_requests_total{{{ROUTER}}}[{RATE}]))',
             "percentunit", "Failures of ours; what clients do wrong does not count."),
        stat("TTFT p95", quantiles("baton_router_time_to_first_token_seconds", values=(0.95,))[0][0], "s", "From reception by the router until the first token is there for the client."),
        stat("ITL p95", quantiles("baton_router_inter_token_latency_seconds", values=(0.95,))[0][0], "s"),
        stat("Fullest KV cache", f"max(baton_kv_cache_usage_ratio{{{ROUTER}}})", "percentunit", max=1),
    ]),
    ("Traffic", [
        Panel("Requests by status", rate("baton_router_requests_total", "code"), "reqps", stack=True),
        Panel("Tokens", [rate("baton_prompt_tokens_total", "source", legend="prompt, {{source}}"),
                         (f'sum(rate(baton_generation_tokens_total{{{ROUTER}, role="router"}}[{RATE}]))', "generated")], "suffix: tok/s",
              help="Prompt tokens by where their KV came from: computed, cached, or transferred to the decode worker."),
        Panel("Waiting and running", [total("baton_router_queue_depth", "priority", legend="queue of the routers, {{priority}}"),
                                      total("baton_requests_running", "role", legend="running, {{role}}"),
                                      total("baton_requests_waiting", "role", legend="waiting, {{role}}")]),
    ]),
    ("Latency", [
        Panel("Time to first token", quantiles("baton_router_time_to_first_token_seconds"), "s", help="The true one, measured in the router."),
        Panel("Time between tokens", quantiles("baton_router_inter_token_latency_seconds"), "s"),
        Panel("Whole request", quantiles("baton_router_request_duration_seconds"), "s"),
    ]),
    ("Workers", [
        Panel("KV cache in use", (f"max by (role, instance) (baton_kv_cache_usage_ratio{{{ROUTER}}})", "{{role}} {{instance}}"), "percentunit", max=1),
        Panel("Prefix hits", (f"sum by (role) (rate(baton_prefix_cache_hits_total{{{ROUTER}}}[{RATE}])) / (sum by (role) (rate(baton_prefix_cache_queries_total{{{ROUTER}}}[{RATE}])) > 0)", "{{role}}"),
              "percentunit", max=1, help="Prompt tokens found in the cache, of those looked up."),
        Panel("Ends of requests in workers", rate("baton_requests_finished_total", "finished_reason, role", legend="{{role}}: {{finished_reason}}"), "reqps", stack=True),
    ]),
]

DISAGGREGATION = [
    ("Time to first token", [
        Panel("True TTFT", quantiles("baton_router_time_to_first_token_seconds"), "s", help="Measured in the router; a worker's own time leaves out what is before and behind it."),
        Panel("Mean TTFT by phase", mean("baton_router_ttft_stage_seconds", "stage", ROUTER + ', stage=~"tokenize|queue|prefill|forward"', "{{stage}}"), "s", stack=True,
              help="Adds up to the mean TTFT. Reserving blocks on decode runs beside prefill."),
        Panel("Inside prefill, and beside it", mean("baton_router_ttft_stage_seconds", "stage", ROUTER + ', stage=~"prefill_queue|prefill_compute|append|reserve"', "{{stage}}"), "s"),
    ]),
    ("Hand-over", [
        Panel("Exposed time", quantiles("baton_kv_transfer_exposed_seconds"), "s", help="How long decode waited for KV that compute did not hide."),
        Panel("Behind the first token", mean("baton_router_ttft_stage_seconds", "stage", ROUTER + ', stage=~"handover|first_decode"', "{{stage}}"), "s", help="The client has its first token already."),
        Panel("First byte to last", quantiles("baton_kv_transfer_duration_seconds", "transport, direction", values=(0.95,), legend=" {{transport}} {{direction}}"), "s"),
        Panel("Bytes received", (f'sum by (transport) (rate(baton_kv_transfer_bytes_sum{{{ROUTER}, direction="recv"}}[{RATE}]))', "{{transport}}"), "Bps"),
        heatmap("Size of a hand-over", "baton_kv_transfer_bytes", "bytes", ROUTER + ', direction="recv"'),
        Panel("Blocks not sent", rate("baton_kv_transfer_units_skipped_total", "reason"), "suffix: blocks/s", help="The decode worker held them already."),
        Panel("Hand-overs in progress", total("baton_kv_transfer_requests", "stage, role", legend="{{role}}: {{stage}}")),
        Panel("Failures", [rate("baton_kv_transfer_failures_total", "transport, reason", legend="{{transport}} {{reason}}"),
                           (f"sum(rate(baton_kv_reservation_expired_total{{{ROUTER}}}[{RATE}]))", "reservation expired")], "cps"),
        Panel("Abort until blocks are free", quantiles("baton_kv_abort_to_free_seconds", "role", values=(0.5, 0.99), legend=" {{role}}")
              + quantiles("baton_kv_quarantine_seconds", values=(0.99,), legend=" quarantine"), "s"),
    ]),
    ("Transports", [
        Panel("Transport in use", (f"sum by (transport, role, instance, peer) (baton_kv_transport_selected{{{ROUTER}}})", "{{role}} {{instance}} {{transport}}"), kind="table"),
        Panel("Speed of the probe copy", (f"max by (transport, instance, role) (baton_kv_transport_probe_bytes_per_second{{{ROUTER}}})", "{{role}} {{instance}} {{transport}}"), "Bps"),
        Panel("Not over the best transport", (f"sum by (from, to, reason, instance) (baton_kv_transport_fallback_total{{{ROUTER}}})", "{{instance}} {{from}} to {{to}}: {{reason}}"), kind="table",
              help="Meetings of two workers, since the prefill worker's start, that took another transport than the best one both might have."),
        Panel("Where requests go", rate("baton_router_decisions_total", "decision"), "reqps", stack=True),
    ]),
    ("Prefill against decode", [
        Panel("Running", total("baton_requests_running", "role"), width=6),
        Panel("Waiting", total("baton_requests_waiting", "role"), width=6),
        Panel("Prompt tokens waiting", total("baton_queue_tokens", "role"), "suffix: tok", width=6),
        Panel("KV cache in use", total("baton_kv_cache_usage_ratio", "role", how="avg"), "percentunit", width=6, max=1),
    ]),
]

ENGINE = [
    ("Scheduler", [
        Panel("Requests", [total("baton_requests_running", "role, instance", WORKER, "running {{role}} {{instance}}"), total("baton_requests_waiting", "role, instance", WORKER, "waiting {{role}} {{instance}}")]),
        Panel("Waiting, by reason", total("baton_requests_waiting_by_reason", "reason, role", WORKER, "{{role}}: {{reason}}"), stack=True),
        Panel("Prompt tokens waiting", total("baton_queue_tokens", "role, instance", WORKER, "{{role}} {{instance}}")),
        Panel("Duration of a step", quantiles("baton_iteration_duration_seconds", "phase, role", WORKER, (0.5, 0.95), " {{role}} {{phase}}"), "s"),
        Panel("Tokens in a step", quantiles("baton_iteration_tokens", "role", WORKER, (0.5, 0.95), " {{role}}"), "suffix: tok"),
        Panel("Between two steps", quantiles("baton_step_gap_seconds", "role", WORKER, (0.5, 0.95), " {{role}}"), "s"),
        Panel("Tokens drawn, by where", rate("baton_sampled_rows_total", "place, role", WORKER, "{{role}}: {{place}}"), "cps", stack=True, help="Rows of logits. With a device, rows on the host are steps that it cannot draw: several choices of one prompt, or very many penalties."),
        Panel("Put back for want of blocks", rate("baton_preemptions_total", "role, instance", WORKER, "{{role}} {{instance}}"), "cps"),
    ]),
    ("KV cache", [
        Panel("Blocks by state", total("baton_kv_blocks", "state, role", WORKER, "{{role}}: {{state}}"), stack=True),
        Panel("In use", total("baton_kv_cache_usage_ratio", "role, instance", WORKER, "{{role}} {{instance}}"), "percentunit", max=1),
        Panel("Prefix cache", [rate("baton_prefix_cache_queries_total", "role", WORKER, "looked up, {{role}}"), rate("baton_prefix_cache_hits_total", "role", WORKER, "found, {{role}}")], "suffix: tok/s"),
        Panel("Evicted", rate("baton_prefix_cache_evictions_total", "role, instance", WORKER, "{{role}} {{instance}}"), "suffix: blocks/s", help="Cached prefixes that made room."),
        Panel("Shape", (f"max by (role, instance, block_size, num_blocks, kv_dtype, block_bytes) (baton_kv_cache_info{{{WORKER}}})", ""), kind="table"),
        Panel("Append kernel, a request", quantiles("baton_kv_append_seconds", "role", WORKER, (0.5, 0.95), " {{role}}"), "s", help="Where the backend measures it."),
        Panel("Numbers out of range", [rate("baton_kv_fp8_saturated_total", "tensor, role", WORKER, "saturated {{role}} {{tensor}}"), rate("baton_nan_logits_total", "role", WORKER, "not finite {{role}}")], "cps"),
    ]),
    ("Speculation", [
        Panel("Drafts accepted", (f"sum by (instance) (rate(baton_spec_decode_accepted_tokens_total{{{WORKER}}}[{RATE}])) / (sum by (instance) (rate(baton_spec_decode_draft_tokens_total{{{WORKER}}}[{RATE}])) > 0)", "{{instance}}"), "percentunit", max=1),
        Panel("Tokens a verified step", mean("baton_spec_decode_accept_length", "instance", WORKER, "{{instance}}"), "suffix: tok"),
        Panel("Rows verified", rate("baton_spec_decode_drafts_total", "instance", WORKER), "cps"),
        Panel("The draft model's prompts", rate("baton_spec_decode_draft_prompt_tokens_total", "source", WORKER), "suffix: tok/s", stack=True, help="Where the KV of what it did not draft came from."),
        Panel("Accepted, by place", rate("baton_spec_decode_accepted_tokens_per_pos_total", "position", WORKER, "place {{position}}"), "suffix: tok/s", stack=True),
    ]),
    ("Requests", [
        Panel("Time to first token in the worker", quantiles("baton_time_to_first_token_seconds", "role", WORKER, (0.5, 0.95), " {{role}}"), "s"),
        Panel("Time between tokens in the worker", quantiles("baton_inter_token_latency_seconds", "role", WORKER, (0.5, 0.95), " {{role}}")
              + quantiles("baton_request_time_per_output_token_seconds", "role", WORKER, (0.95,), " {{role}}, mean of a request"), "s"),
        Panel("Whole request in the worker", quantiles("baton_e2e_request_latency_seconds", "role", WORKER, (0.5, 0.95), " {{role}}"), "s"),
        Panel("Parts of it, p95", [q for m in ("queue", "prefill", "decode", "inference")
                                   for q in quantiles(f"baton_request_{m}_time_seconds", "role", WORKER, (0.95,), f" {m} {{{{role}}}}")], "s"),
        heatmap("Prompt length", "baton_request_prompt_tokens", "suffix: tok"),
        heatmap("Answer length", "baton_request_generation_tokens", "suffix: tok"),
        Panel("Answer length asked for", quantiles("baton_request_params_max_tokens", "role", WORKER, (0.5, 0.95), " {{role}}"), "suffix: tok"),
        Panel("Ends", rate("baton_requests_finished_total", "finished_reason, role", WORKER, "{{role}}: {{finished_reason}}"), "reqps", stack=True),
        Panel("Prompt tokens by source", rate("baton_prompt_tokens_total", "source, role", WORKER, "{{role}}: {{source}}"), "suffix: tok/s", stack=True),
    ]),
    ("GPU", [
        Panel("Memory in use", (f"max by (role, instance, gpu) (baton_gpu_memory_used_bytes{{{WORKER}}})", "{{role}} {{instance}} gpu {{gpu}}"), "bytes", width=6, help="By all processes on it. Workers without a GPU have none of these."),
        Panel("Kernels running", (f"max by (role, instance, gpu) (baton_gpu_utilization_ratio{{{WORKER}}})", "{{role}} {{instance}} gpu {{gpu}}"), "percentunit", width=6, max=1, help="Share of time in which any kernel ran; it says nothing of how well."),
        Panel("Memory busy", (f"max by (role, instance, gpu) (baton_gpu_memory_bandwidth_ratio{{{WORKER}}})", "{{role}} {{instance}} gpu {{gpu}}"), "percentunit", width=6, max=1, help="Share of time in which its memory was read or written."),
        Panel("Power", (f"max by (role, instance, gpu) (baton_gpu_power_watts{{{WORKER}}})", "{{role}} {{instance}} gpu {{gpu}}"), "watt", width=6),
    ]),
    ("Process", [
        Panel("State", (f"max by (role, instance, state) (baton_worker_state{{{WORKER}}}) == 1", "{{role}} {{instance}} {{state}}")),
        Panel("Model load", total("baton_model_load_seconds", "role, instance", WORKER, "{{role}} {{instance}}"), "s"),
        Panel("Versions", (f'max by (role, instance, version, commit, backend) (baton_build_info{{{ROUTER}}})', ""), kind="table"),
        Panel("CPU", ('sum by (instance, component) (rate(process_cpu_seconds_total{job="baton", namespace=~"$namespace"}[$__rate_interval]))', "{{component}} {{instance}}"), "suffix: cores"),
        Panel("Memory", ('max by (instance, component) (process_resident_memory_bytes{job="baton", namespace=~"$namespace"})', "{{component}} {{instance}}"), "bytes"),
        Panel("File descriptors in use", [('max by (instance, component) (process_open_fds{job="baton", namespace=~"$namespace"} / process_max_fds)', "{{component}} {{instance}}")], "percentunit"),
    ]),
]

ROUTER_BOARD = [
    ("Requests", [
        Panel("By status", rate("baton_router_requests_total", "code, method", legend="{{method}} {{code}}"), "reqps", stack=True),
        Panel("Refused", rate("baton_router_rejected_total", "reason"), "reqps", stack=True),
        Panel("Tried again", rate("baton_router_retries_total", "reason"), "reqps"),
        Panel("In flight", total("baton_router_requests_in_flight", "instance")),
        Panel("Queue", total("baton_router_queue_depth", "priority, instance", legend="{{instance}} {{priority}}")),
        Panel("Time in the queue", quantiles("baton_router_queue_time_seconds"), "s"),
    ]),
    ("Its own work", [
        Panel("Choosing workers", quantiles("baton_router_decision_duration_seconds"), "s"),
        Panel("Text to tokens", quantiles("baton_router_tokenize_seconds"), "s"),
        Panel("Tokens to text, a whole answer", quantiles("baton_router_detokenize_seconds"), "s"),
        Panel("First token on its way out", quantiles("baton_router_ttft_stage_seconds", "", ROUTER + ', stage="forward"'), "s", help="From its arrival in the router until it was given to the client."),
        Panel("Decisions", rate("baton_router_decisions_total", "decision"), "reqps", stack=True),
        Panel("Its own time, p99", quantiles("baton_router_overhead_seconds", "stage", values=(0.99,), legend=" {{stage}}"), "s", help="Without waits for room: until the workers are called, and from their messages to the client's stream."),
        Panel("Workers", total("baton_router_workers", "worker_role, state", legend="{{worker_role}} {{state}}", how="max")),
    ]),
    ("How well it chooses", [
        Panel("Prompt blocks found where sent", (f"avg by (instance) (baton_router_prefix_hit_ratio{{{ROUTER}}})", "{{instance}}"), "percentunit", max=1),
        Panel("TTFT missed its prediction by", quantiles("baton_router_ttft_prediction_error_seconds"), "s"),
        Panel("Objectives missed", (f"sum by (slo) (rate(baton_router_slo_missed_total{{{ROUTER}}}[{RATE}])) / ((sum by (slo) (rate(baton_router_slo_met_total{{{ROUTER}}}[{RATE}])) + sum by (slo) (rate(baton_router_slo_missed_total{{{ROUTER}}}[{RATE}]))) > 0)", "{{slo}}"), "percentunit", max=1,
              help="Of finished requests, against --slo-ttft and --slo-tpot."),
        Panel("Breakers", (f"max by (worker) (baton_router_worker_breaker_state{{{ROUTER}}})", "{{worker}}"), max=2, help="0 closed, 1 half-open, 2 open: a worker that failed gets no requests for a while."),
    ]),
    ("gRPC", [
        Panel("Calls started", rate("grpc_server_started_total", "grpc_method, role", legend="{{role}} {{grpc_method}}"), "reqps"),
        Panel("Calls ended", rate("grpc_server_handled_total", "grpc_method, grpc_code", legend="{{grpc_method}} {{grpc_code}}"), "reqps"),
        Panel("Duration p95", quantiles("grpc_server_handling_seconds", "grpc_method", values=(0.95,), legend=" {{grpc_method}}"), "s"),
        Panel("Messages", [rate("grpc_server_msg_received_total", "grpc_method", legend="received {{grpc_method}}"), rate("grpc_server_msg_sent_total", "grpc_method", legend="sent {{grpc_method}}")], "cps"),
    ]),
]

BOARDS = {
    "baton-overview": ("Baton / Overview", OVERVIEW),
    "baton-disaggregation": ("Baton / Disaggregation", DISAGGREGATION),
    "baton-engine": ("Baton / Engine", ENGINE),
    "baton-router": ("Baton / Router", ROUTER_BOARD),
}


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "datasource": {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}, "query": {"query": query, "refId": name},
            "definition": query, "includeAll": True, "multi": True, "allValue": ".*", "refresh": 2, "sort": 1,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}


def fill_lines(content):
    """Three panels to a line; where one would be left alone in the last, the last four go two by two, and where two would be, these share it."""
    if any(panel.width != 8 for panel in content):
        return
    alone = len(content) % 3
    for panel in content[len(content) - (0, 4, 2)[alone]:] if alone else []:
        panel.width = 12 if len(content) > 1 else 24


def board(uid, title, rows):
    panels, panel_id, y = [], 1, 0
    for row, content in rows:
        panels.append({"id": panel_id, "type": "row", "title": row, "collapsed": False, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        panel_id, y, x, height = panel_id + 1, y + 1, 0, 0
        fill_lines(content)
        for panel in content:
            if x + panel.width > 24:
                x, y, height = 0, y + height, 0
            panels.append(panel.json(panel_id, x, y))
            panel_id, x, height = panel_id + 1, x + panel.width, max(height, panel.height)
        y += height
    return {"uid": uid, "title": title, "tags": ["baton"], "schemaVersion": 39, "version": 1, "editable": True, "graphTooltip": 1, "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"}, "timezone": "", "annotations": {"list": []},
            "links": [{"type": "dashboards", "tags": ["baton"], "title": "Baton", "asDropdown": True, "includeVars": True, "keepTime": True}],
            "templating": {"list": [
                {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}, "hide": 0},
                variable("namespace", "Namespace", "label_values(baton_build_info, namespace)"),
                variable("model_name", "Model", 'label_values(baton_build_info{namespace=~"$namespace"}, model_name)'),
                variable("role", "Role", 'label_values(baton_build_info{namespace=~"$namespace"}, role)'),
                variable("pod", "Pod", 'label_values(baton_build_info{namespace=~"$namespace", role=~"$role"}, pod)')]},
            "panels": panels}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for uid, (title, rows) in BOARDS.items():
        (out / f"{uid}.json").write_text(json.dumps(board(uid, title, rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
