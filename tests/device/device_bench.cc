// device_bench --part=NAME --out=FILE: one part of tests/device_check.sh. With --merge=FOLDER: one
// report of the parts' files.

#include "tests/device/device_bench.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/clock.h"
#include "engine/base/status_macros.h"
#include "engine/base/version.h"

ABSL_FLAG(std::string, part, "", "info, ceilings, products, attention, ids, model or probes.");
ABSL_FLAG(std::string, out, "", "File for the result.");
ABSL_FLAG(std::string, merge, "", "Folder of results to be made one report.");
ABSL_FLAG(bool, tiny, false, "Sizes for the emulated device.");
ABSL_FLAG(std::string, models, "", "Folder of the test models.");
ABSL_FLAG(std::string, shape, "", "Part model: qwen3-4b, qwen3-8b or tiny.");
ABSL_FLAG(std::string, weight_dtype, "fp8", "Part model: fp8 or bf16.");
ABSL_FLAG(std::string, prefill_attention, "auto", "Part model: auto, own or flashinfer.");

namespace baton::device {

absl::StatusOr<double> MedianSeconds(int count, const std::function<absl::Status()>& run) {
  BATON_RETURN_IF_ERROR(run());
  std::vector<double> seconds;
  for (int i = 0; i < count; ++i) {
    const absl::Duration start = base::Clock::Real().Now();
    BATON_RETURN_IF_ERROR(run());
    seconds.push_back(absl::ToDoubleSeconds(base::Clock::Real().Now() - start));
  }
  std::nth_element(seconds.begin(), seconds.begin() + count / 2, seconds.end());
  return seconds[count / 2];
}

namespace {

using Part = absl::StatusOr<Json> (*)(const BenchOptions&);

const std::map<std::string, Part>& Parts() {
  static const auto* const parts = new std::map<std::string, Part>{
      {"info", Info}, {"ceilings", Ceilings}, {"products", Products}, {"attention", Attention},
      {"ids", Ids},   {"model", Model},       {"probes", Probes}};
  return *parts;
}

int Write(const std::string& path, const Json& json) {
  std::ofstream file(path);
  file << json.dump(1) << "\n";
  file.close();
  if (!file) std::cerr << "cannot write " << path << "\n";
  return file ? 0 : 1;
}

Json ReadJson(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  Json json = Json::parse(text.str(), nullptr, /*allow_exceptions=*/false);
  return json.is_discarded() ? Json{{"ok", false}, {"error", "no result: it crashed or hung"}}
                             : json;
}

// gtest's own report, made short.
Json ShortTests(const Json& report) {
  Json failures = Json::array();
  for (const Json& suite : report.value("testsuites", Json::array())) {
    for (const Json& test : suite.value("testsuite", Json::array())) {
      if (!test.contains("failures")) continue;
      failures.push_back(absl::StrCat(test.value("classname", ""), ".", test.value("name", ""),
                                      ": ",
                                      test["failures"][0].value("failure", "").substr(0, 400)));
    }
  }
  const int count = report.value("tests", 0);
  return {{"ok", count > 0 && failures.empty()}, {"tests", count}, {"failures", failures}};
}

// Files are NAME.json; NAME.code holds the exit code of one that did not end with 0.
int Merge(const std::string& folder, const std::string& out) {
  Json report = {
      {"version", base::kVersion},
      {"commit", base::kCommit},
      {"made_at", absl::FormatTime(absl::RFC3339_sec, absl::Now(), absl::UTCTimeZone())}};
  Json& parts = report["parts"] = Json::object();
  bool all_ok = true;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    const std::string name = path.stem().string();
    if (path.extension() == ".code" && !parts.contains(name)) {
      parts[name] = {{"ok", false}, {"error", "no result: it crashed or hung"}};
    }
    if (path.extension() == ".json") {
      const Json json = ReadJson(path);
      parts[name] = json.contains("testsuites") ? ShortTests(json) : json;
    }
  }
  for (const auto& path : files) {
    if (path.extension() != ".code") continue;
    std::ifstream file(path);
    std::string code;
    file >> code;
    parts[path.stem().string()]["exit_code"] = code;
    parts[path.stem().string()]["ok"] = false;
  }
  for (const Json& part : parts) all_ok = all_ok && part.value("ok", false);
  report["ok"] = all_ok;
  if (Write(out, report) != 0) return 1;
  for (const auto& [name, part] : parts.items())
    std::cout << (part.value("ok", false) ? "ok      " : "FAILED  ") << name << "  "
              << part.value("error", "") << "\n";
  return all_ok ? 0 : 1;
}

int Run(const char* self) {
  const std::string out = absl::GetFlag(FLAGS_out);
  if (!absl::GetFlag(FLAGS_merge).empty()) return Merge(absl::GetFlag(FLAGS_merge), out);
  const auto part = Parts().find(absl::GetFlag(FLAGS_part));
  if (part == Parts().end()) {
    std::cerr << "--part: accepted:";
    for (const auto& [name, run] : Parts()) std::cerr << " " << name;
    std::cerr << "\n";
    return 2;
  }
  BenchOptions options;
  options.self = self;
  options.tiny = absl::GetFlag(FLAGS_tiny);
  options.models = absl::GetFlag(FLAGS_models);
  options.shape = absl::GetFlag(FLAGS_shape);
  options.weight_dtype = absl::GetFlag(FLAGS_weight_dtype);
  options.prefill_attention = absl::GetFlag(FLAGS_prefill_attention);
  const absl::Duration start = base::Clock::Real().Now();
  absl::StatusOr<Json> result = part->second(options);
  Json json = result.ok() ? *result : Json{{"ok", false}, {"error", result.status().ToString()}};
  if (!json.contains("ok")) json["ok"] = true;
  json["seconds"] = absl::ToDoubleSeconds(base::Clock::Real().Now() - start);
  const int written = Write(out, json);
  return written != 0 ? written : json["ok"].get<bool>() ? 0 : 1;
}

}  // namespace
}  // namespace baton::device

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return baton::device::Run(argv[0]);
}
