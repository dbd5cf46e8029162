"""A dashboard as a picture, without Grafana: the JSON's panels, filled from a real Prometheus, as one HTML page with inline SVG."""
import html
import json
import math
import re

LEFT = 82  # of a chart: room for its scale
KEYS_MAX = 8
COLORS = ["#2563eb", "#0d9488", "#b45309", "#7c3aed", "#b91c1c", "#15803d", "#0891b2", "#a21caf", "#65a30d", "#475569", "#ea580c", "#4f46e5"]


def number(value, unit):
    """A value as the unit of its panel says it."""
    if unit in ("percentunit",):
        return f"{100 * value:.3g} %"
    if unit == "s":
        for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= scale:
                return f"{value / scale:.3g} {name}"
        return f"{value:.3g} s"
    if unit in ("bytes", "Bps"):
        power = 0
        while abs(value) >= 1024 and power < 4:
            value, power = value / 1024, power + 1
        return f"{value:.3g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}{'/s' if unit == 'Bps' else ''}"
    suffix = {"reqps": " req/s", "cps": " /s", "short": ""}.get(unit, " " + unit.removeprefix("suffix: "))
    for scale, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{prefix}{suffix}"
    return f"{value:.3g}{suffix}"


def legend(pattern, labels):
    return re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m[1], ""), pattern) or ", ".join(f"{k}={v}" for k, v in labels.items() if k != "__name__")


def series_of(panel, query_range):
    """[(legend, [(t, value)])]; NaN left out."""
    found = []
    for target in panel["targets"]:
        for one in query_range(target["expr"]):
            points = [(float(t), float(v)) for t, v in one["values"] if v not in ("NaN", "+Inf", "-Inf")]
            if points:
                found.append((legend(target["legendFormat"], one["metric"]), points))
    return found


def round_up(value, unit):
    """The top of a scale: a number that reads easily, halved too."""
    step = 1024.0 if unit in ("bytes", "Bps") else 1000.0
    base = step ** math.floor(math.log(value, step))
    return next(n * base for n in (1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 800, step) if n * base >= value * 0.999999)


def ago(seconds):
    return "now" if seconds < 1 else f"-{seconds:.0f} s" if seconds < 120 else f"-{seconds / 60:.0f} min"


def chart(series, unit, width, height, stacked, most=None):
    start = min(p[0][0] for _, p in series)
    end = max(max(p[-1][0] for _, p in series), start + 1)
    at = sorted({t for _, points in series for t, _ in points})
    base = dict.fromkeys(at, 0.0)
    lines = []
    for name, points in series:
        if stacked:
            values = dict(points)
            base = {t: base[t] + values.get(t, 0.0) for t in at}
            lines.append((name, list(base.items())))
        else:
            lines.append((name, points))
    top = most or round_up(max((v for _, points in lines for _, v in points), default=0) or 1.0, unit)
    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    for x, t, anchor in ((LEFT, start, "start"), ((LEFT + width) / 2, (start + end) / 2, "middle"), (width - 2, end, "end")):
        out.append(f'<text x="{x:.1f}" y="{height - 2}" text-anchor="{anchor}">{ago(end - t)}</text>')
    for share in (0, 0.5, 1):
        y = height - 14 - share * (height - 24)
        out.append(f'<line x1="{LEFT}" x2="{width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/><text x="{LEFT - 4}" y="{y + 3:.1f}" text-anchor="end">{html.escape(number(top * share, unit))}</text>')
    for i, (_, points) in enumerate(lines):
        path = " ".join(f"{LEFT + (t - start) / (end - start) * (width - LEFT - 2):.1f},{height - 14 - v / top * (height - 24):.1f}" for t, v in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[i % len(COLORS)]}" stroke-width="1.4"/>')
    return "".join(out) + "</svg>"


def heat(series, unit, width, height):
    buckets = sorted(((float(name), dict(points)) for name, points in series if name not in ("+Inf", "")), key=lambda b: b[0])
    at = sorted({t for _, values in buckets for t in values})
    rows, before = [], dict.fromkeys(at, 0.0)
    for bound, values in buckets:
        rows.append((bound, {t: max(0.0, values.get(t, 0.0) - before[t]) for t in at}))
        before = {t: values.get(t, 0.0) for t in at}
    top = max((v for _, row in rows for v in row.values()), default=0) or 1.0
    w, h = (width - LEFT - 2) / max(1, len(at)), (height - 10) / max(1, len(rows))
    out = [f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}">']
    for i, (bound, row) in enumerate(rows):
        y = height - 5 - (i + 1) * h
        if i % max(1, len(rows) // 6) == 0:
            out.append(f'<text x="{LEFT - 4}" y="{y + h:.1f}" text-anchor="end">{html.escape(number(bound, unit))}</text>')
        out += [f'<rect x="{LEFT + j * w:.1f}" y="{y:.1f}" width="{w + .3:.1f}" height="{h:.1f}" fill="#2563eb" fill-opacity="{row[t] / top:.2f}"/>' for j, t in enumerate(at) if row[t] > 0]
    return "".join(out) + "</svg>"


def table(series, unit):
    rows = sorted((name, number(points[-1][1], unit)) for name, points in series)
    return "<div class=rows>" + "".join(f"<div>{html.escape(name)} <b>{html.escape(value)}</b></div>" for name, value in rows) + "</div>"


def legend_html(series, unit, width):
    """The series that reach highest, with their last values, and how many rows of text that takes."""
    highest = sorted(range(len(series)), key=lambda i: -max(v for _, v in series[i][1]))[:KEYS_MAX]
    keys, rows, used = [], 1, 0
    for i in sorted(highest):
        name, points = series[i]
        last = number(points[-1][1], unit)
        size = 26 + 5.7 * len(f"{name} {last}")
        rows, used = (rows + 1, size) if used + size > width else (rows, used + size)
        keys.append(f'<span><i style="background:{COLORS[i % len(COLORS)]}"></i>{html.escape(name)} <b>{html.escape(last)}</b></span>')
    if len(series) > KEYS_MAX:
        keys.append(f"<span>and {len(series) - KEYS_MAX} more</span>")
        rows += used + 70 > width
    return f"<div class=keys>{''.join(keys)}</div>", rows


def panel_html(panel, query_range):
    unit = panel["fieldConfig"]["defaults"]["unit"]
    series = series_of(panel, query_range)
    width, height = panel["gridPos"]["w"] * 50 - 24, panel["gridPos"]["h"] * 30 - 34
    if not series:
        body, count = "<p class=empty>no data</p>", 0
    else:
        count = len(series)
        if panel["type"] == "stat":
            body = f"<p class=stat>{html.escape(number(series[0][1][-1][1], unit))}</p>"
        elif panel["type"] == "heatmap":
            body = heat(series, unit, width, height - 8)
        elif panel["type"] == "table":
            body = table(series, unit)
        else:
            stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
            keys, rows = legend_html(series, unit, width)
            body = chart(series, unit, width, height - 6 - 13 * rows, stacked, panel["fieldConfig"]["defaults"].get("max")) + keys
    at = panel["gridPos"]
    style = f"left:{at['x'] * 50}px;top:{at['y'] * 30 + 40}px;width:{at['w'] * 50 - 6}px;height:{at['h'] * 30 - 6}px"
    return f'<section data-panel="{html.escape(panel["title"])}" data-series="{count}" style="{style}"><h3>{html.escape(panel["title"])}</h3>{body}</section>'


def board_html(path, query_range):
    board = json.loads(path.read_text())
    parts, bottom = [], 0
    for panel in board["panels"]:
        at = panel["gridPos"]
        bottom = max(bottom, (at["y"] + at["h"]) * 30 + 60)
        if panel["type"] == "row":
            parts.append(f'<h2 style="top:{at["y"] * 30 + 42}px">{html.escape(panel["title"])}</h2>')
        else:
            parts.append(panel_html(panel, query_range))
    return f"""<!doctype html><meta charset=utf-8><title>{html.escape(board['title'])}</title><style>
body{{font:11px "DejaVu Sans",sans-serif;margin:0;position:relative;width:1200px;height:{bottom}px;background:#f1f5f9;color:#0f172a}}h1{{font-size:16px;margin:8px}}h2{{position:absolute;left:6px;margin:0;font-size:13px}}
section{{position:absolute;background:#fff;border:1px solid #cbd5e1;border-radius:4px;padding:4px 8px;box-sizing:border-box;overflow:hidden}}h3{{margin:2px 0 4px;font-size:12px}}text{{font-size:9px;fill:#475569}}
.stat{{font-size:24px;margin:8px 0}}.keys{{display:flex;flex-wrap:wrap;gap:1px 10px;font-size:9px}}.keys i{{display:inline-block;width:8px;height:8px;margin-right:3px}}.empty{{color:#b91c1c}}.rows div{{border-top:1px solid #e2e8f0;padding:2px 0;overflow-wrap:anywhere}}
</style><h1>{html.escape(board['title'])}</h1>{''.join(parts)}"""
