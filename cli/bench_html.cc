// The report of `baton bench` as one HTML file: figures and SVG, no scripts, no outside resources.

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

#include "cli/bench_summary.h"

namespace baton::cli {
namespace {

using Point = std::pair<double, double>;

struct Series {
  std::string name;
  std::vector<Point> points;
};

struct Plot {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  bool dots = false;  // else lines
};

constexpr size_t kMaxPoints = 600;  // of a series: more cannot be seen
constexpr double kWidth = 560, kHeight = 300, kLeft = 64, kRight = 12, kTop = 30, kBottom = 46;
constexpr const char* kColors[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd"};

constexpr char kStyle[] =
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1180px;padding:0 1rem;"
    "color:#222;background:#fff}h1{font-size:1.4rem}table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}svg{margin:.5rem;max-width:100%}"
    "text{font:12px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:14px}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}text{fill:#ccc}"
    "td,th{border-color:#444}}";

std::string Escape(const std::string& text) {
  return absl::StrReplaceAll(text,
                             {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

// A round number of the form 1, 2 or 5 times a power of ten, so that about five fit.
double TickStep(double span) {
  const double raw = span / 5, power = std::pow(10, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (raw <= factor * power) return factor * power;
  }
  return 10 * power;
}

std::vector<Point> Thinned(const std::vector<Point>& points) {
  if (points.size() <= kMaxPoints) return points;
  std::vector<Point> out;
  for (size_t i = 0; i < kMaxPoints; ++i)
    out.push_back(points[i * (points.size() - 1) / (kMaxPoints - 1)]);
  return out;
}

// From (0, 0) to the largest values.
struct Scale {
  double x_max = 0, y_max = 0;
  explicit Scale(const Plot& plot) {
    for (const Series& series : plot.series) {
      for (const auto& [x, y] : series.points) {
        x_max = std::max(x_max, x);
        y_max = std::max(y_max, y);
      }
    }
    if (x_max <= 0) x_max = 1;
    if (y_max <= 0) y_max = 1;
  }
  double X(double x) const { return kLeft + x / x_max * (kWidth - kLeft - kRight); }
  double Y(double y) const { return kHeight - kBottom - y / y_max * (kHeight - kTop - kBottom); }
};

std::string Axes(const Plot& plot, const Scale& scale) {
  std::string out;
  constexpr char kLine[] =
      "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#8884\"/>"
      "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%.4g</text>";
  const double x_step = TickStep(scale.x_max), y_step = TickStep(scale.y_max);
  for (int i = 0; i * x_step <= scale.x_max * 1.0001; ++i) {
    const double at = scale.X(i * x_step);
    absl::StrAppendFormat(&out, kLine, at, kTop, at, kHeight - kBottom, at, kHeight - kBottom + 16,
                          "middle", i * x_step);
  }
  for (int i = 0; i * y_step <= scale.y_max * 1.0001; ++i) {
    const double at = scale.Y(i * y_step);
    absl::StrAppendFormat(&out, kLine, kLeft, at, kWidth - kRight, at, kLeft - 6, at + 4, "end",
                          i * y_step);
  }
  absl::StrAppendFormat(&out,
                        "<text class=\"t\" x=\"%.1f\" y=\"18\">%s</text>"
                        "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>"
                        "<text x=\"4\" y=\"%.1f\">%s</text>",
                        kLeft, Escape(plot.title), (kLeft + kWidth) / 2, kHeight - 8,
                        Escape(plot.x_label), kTop - 2, Escape(plot.y_label));
  return out;
}

std::string Svg(const Plot& plot) {
  const Scale scale(plot);
  std::string out = absl::StrFormat(
      "<svg viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" role=\"img\" "
      "aria-label=\"%s\">",
      kWidth, kHeight, kWidth, kHeight, Escape(plot.title));
  absl::StrAppend(&out, Axes(plot, scale));
  for (size_t i = 0; i < plot.series.size(); ++i) {
    const char* const color = kColors[i % std::size(kColors)];
    std::string line;
    for (const auto& [x, y] : Thinned(plot.series[i].points)) {
      if (plot.dots) {
        absl::StrAppendFormat(&out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2\" fill=\"%s\"/>",
                              scale.X(x), scale.Y(y), color);
      } else {
        absl::StrAppendFormat(&line, "%.1f,%.1f ", scale.X(x), scale.Y(y));
      }
    }
    if (!line.empty()) {
      absl::StrAppendFormat(
          &out, "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.6\"/>", line,
          color);
    }
    absl::StrAppendFormat(
        &out, "<text x=\"%.1f\" y=\"18\" text-anchor=\"end\" style=\"fill:%s\">%s</text>",
        kWidth - kRight - 70 * static_cast<double>(i), color, Escape(plot.series[i].name));
  }
  return absl::StrCat(out, "</svg>\n");
}

// Share of values that are at most x.
Series Cumulative(std::string name, const Sample& sample) {
  Series out{std::move(name), {}};
  const std::vector<double>& values = sample.sorted();
  for (size_t i = 0; i < values.size(); ++i) {
    out.points.emplace_back(values[i],
                            100 * static_cast<double>(i + 1) / static_cast<double>(values.size()));
  }
  return out;
}

Plot TtftOverTime(const std::vector<BenchRecord>& records) {
  Plot plot{"TTFT over time", "due at (s)", "s", {{"", {}}}, /*dots=*/true};
  for (const BenchRecord& record : records) {
    if (record.ok() && record.tokens > 0)
      plot.series[0].points.emplace_back(record.due, record.ttft());
  }
  std::sort(plot.series[0].points.begin(), plot.series[0].points.end());
  return plot;
}

// A request's tokens are spread evenly from its first to its last.
Plot TokensOverTime(const BenchSummary& summary, const std::vector<BenchRecord>& records) {
  constexpr size_t kBins = 100;
  const double width = std::max(summary.duration_s, 1e-9) / kBins;
  std::vector<double> bins(kBins);
  const auto bin_of = [&](double at) {
    return std::clamp<size_t>(static_cast<size_t>(std::max(0.0, at) / width), 0, kBins - 1);
  };
  for (const BenchRecord& record : records) {
    for (uint32_t i = 0; i < record.tokens; ++i) {
      const double share = record.tokens > 1 ? static_cast<double>(i) / (record.tokens - 1) : 0;
      bins[bin_of(record.first + share * (record.last - record.first))] += 1 / width;
    }
  }
  Plot plot{"Output tokens a second", "time (s)", "tokens/s", {{"", {}}}, false};
  for (size_t i = 0; i < kBins; ++i)
    plot.series[0].points.emplace_back((static_cast<double>(i) + 0.5) * width, bins[i]);
  return plot;
}

std::string TimesTable(const BenchSummary& s) {
  std::string out =
      "<table><tr><th>seconds</th><th>mean</th><th>p50</th><th>p90</th><th>p95</th><th>p99</th>"
      "<th>max</th></tr>";
  const std::pair<const char*, const Sample*> rows[] = {{"time to first token", &s.ttft},
                                                        {"between two tokens", &s.itl},
                                                        {"mean of a request's", &s.tpot},
                                                        {"end to end", &s.e2e},
                                                        {"client's own delay", &s.lag}};
  for (const auto& [name, sample] : rows) {
    absl::StrAppendFormat(&out,
                          "<tr><td>%s</td><td>%.4f</td><td>%.4f</td><td>%.4f</td><td>%.4f</td>"
                          "<td>%.4f</td><td>%.4f</td></tr>",
                          name, sample->mean(), sample->Percentile(50), sample->Percentile(90),
                          sample->Percentile(95), sample->Percentile(99), sample->max());
  }
  return absl::StrCat(out, "</table>\n");
}

std::string FiguresTable(const BenchSetting& setting, const BenchSummary& s) {
  std::string codes;
  for (const auto& [code, count] : s.codes) absl::StrAppend(&codes, code, " ", count, "  ");
  std::string out = "<table>";
  const std::pair<const char*, std::string> rows[] = {
      {"model", setting.model},
      {"router", setting.address},
      {"load", setting.load},
      {"seed", absl::StrCat(setting.seed)},
      {"requests", absl::StrCat(s.requests, ", by status: ", codes)},
      {"duration", absl::StrFormat("%.2f s", s.duration_s)},
      {"completed", absl::StrFormat("%.3f requests/s", s.PerSecond(s.completed))},
      {"output",
       absl::StrFormat("%u tokens, %.1f tokens/s", s.output_tokens, s.PerSecond(s.output_tokens))},
      {"prompts",
       absl::StrFormat("%u tokens, %u of them cached", s.prompt_tokens, s.cached_tokens)},
      {"objectives", absl::StrFormat("TTFT %.4g s, time per output token %.4g s (0: any)",
                                     s.objectives.ttft_s, s.objectives.tpot_s)},
      {"goodput", absl::StrFormat("%.3f requests/s, %.1f %% of all", s.PerSecond(s.good),
                                  100 * s.good_share())}};
  for (const auto& [name, value] : rows)
    absl::StrAppend(&out, "<tr><td>", name, "</td><td>", Escape(value), "</td></tr>");
  return absl::StrCat(out, "</table>\n");
}

}  // namespace

std::string BenchHtml(const BenchSetting& setting,
                      const BenchSummary& summary,
                      const std::vector<BenchRecord>& records) {
  std::string out = absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>baton bench</title><style>",
      kStyle, "</style></head><body>\n<h1>baton bench</h1>\n", FiguresTable(setting, summary),
      TimesTable(summary));
  absl::StrAppend(
      &out, Svg({"Time to first token", "s", "% of requests", {Cumulative("", summary.ttft)}}),
      Svg({"Between two tokens",
           "s",
           "%",
           {Cumulative("each gap", summary.itl), Cumulative("mean", summary.tpot)}}),
      Svg({"End to end", "s", "% of requests", {Cumulative("", summary.e2e)}}),
      Svg(TtftOverTime(records)), Svg(TokensOverTime(summary, records)));
  return absl::StrCat(out, "</body></html>\n");
}

}  // namespace baton::cli
