// `baton check-config`: what cannot hold in a configuration, said before anything starts.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

#include "cli/commands.h"
#include "cli/common_flags.h"
#include "cli/model_flags.h"
#include "cli/model_plan.h"
#include "engine/base/flags.h"
#include "engine/base/status_macros.h"

ABSL_FLAG(std::string,
          prefill_config,
          "",
          "A prefill worker's --config file; its keys win over the flags given here.");
ABSL_FLAG(std::string, decode_config, "", "The same of a decode worker.");
ABSL_FLAG(int64_t,
          memory_bytes,
          0,
          "Memory that a worker may use; 0: what this machine, or this container, has.");

namespace baton::cli {
namespace {

// What the container allows, else what the machine has.
int64_t MemoryHere() {
  const int64_t machine = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
  std::ifstream file("/sys/fs/cgroup/memory.max");
  std::string text;
  int64_t limit = 0;
  if (file >> text && absl::SimpleAtoi(text, &limit) && limit > 0) return std::min(limit, machine);
  return machine;
}

// The settings of one role, and its model, which a file may name.
absl::StatusOr<std::pair<std::string, WorkerSettings>> RoleSettings(const std::string& file) {
  std::pair<std::string, WorkerSettings> out{absl::GetFlag(FLAGS_model), SettingsFromFlags()};
  if (file.empty()) return out;
  BATON_ASSIGN_OR_RETURN(const auto entries, base::ReadConfigFile(file));
  for (const auto& [key, value] : entries) {
    if (key == "model") {
      out.first = value;
    } else {
      out.second[key] = value;
    }
  }
  return out;
}

// Adds what is found; the member when its model could be read.
std::optional<PairMember> CheckRole(const std::string& role,
                                    const std::string& file,
                                    int64_t memory,
                                    std::vector<Finding>* findings) {
  const auto fail = [&](const absl::Status& status) {
    findings->push_back({Finding::Level::kError, absl::StrCat(role, ": ", status.message())});
    return std::nullopt;
  };
  const auto settings = RoleSettings(file);
  if (!settings.ok()) return fail(settings.status());
  const absl::StatusOr<PlannedModel> model = PlannedModel::Open(settings->first);
  if (!model.ok()) return fail(model.status());
  const absl::StatusOr<std::string> dtype = model->WeightDtype(settings->second);
  if (!dtype.ok()) return fail(dtype.status());
  for (Finding& finding : CheckWorker(role, model->config(), *dtype, settings->second, memory))
    findings->push_back(std::move(finding));
  return PairMember{model->config(), model->fingerprint(), *dtype, settings->second};
}

int Print(const std::vector<Finding>& findings) {
  int errors = 0;
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const Finding& finding : findings) {
    const bool error = finding.level == Finding::Level::kError;
    errors += error ? 1 : 0;
    if (JsonFlag()) {
      json.push_back({{"level", error ? "error" : "warning"}, {"text", finding.text}});
    } else {
      std::printf("%s %s\n", error ? "error  " : "warning", finding.text.c_str());
    }
  }
  if (JsonFlag()) {
    std::printf("%s\n",
                json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    std::printf("%d errors, %d warnings\n", errors, static_cast<int>(findings.size()) - errors);
  }
  return errors == 0 ? 0 : 1;
}

}  // namespace

int RunCheckConfig(int argc, char** argv) {
  const base::FlagsOutcome flags = base::HandleFlags(
      argc, argv,
      "baton check-config --model PATH [--prefill-config FILE] [--decode-config FILE]: what cannot "
      "hold in a configuration.",
      {"cli/check_config", "cli/model_flags", "cli/json_flag"});
  if (!flags.go_on) return flags.exit_code;
  const int64_t given = absl::GetFlag(FLAGS_memory_bytes);
  const int64_t memory = given > 0 ? given : MemoryHere();
  std::vector<Finding> findings;
  const auto prefill = CheckRole("prefill", absl::GetFlag(FLAGS_prefill_config), memory, &findings);
  const auto decode = CheckRole("decode", absl::GetFlag(FLAGS_decode_config), memory, &findings);
  if (prefill && decode) {
    for (Finding& finding : CheckPair(*prefill, *decode)) findings.push_back(std::move(finding));
  }
  return Print(findings);
}

}  // namespace baton::cli
