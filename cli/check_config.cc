// `baton check-config`: what cannot hold in a configuration, said before anything starts.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

#include "cli/child_process.h"
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

struct Role {
  std::string name;
  std::string file;  // of --config; may be empty
  WorkerSettings from_file;
  WorkerSettings settings;  // those, and what the command line says besides
  std::string model;
};

absl::StatusOr<Role> ReadRole(const std::string& name, const std::string& file) {
  Role role{name, file, {}, SettingsFromFlags(), absl::GetFlag(FLAGS_model)};
  if (file.empty()) return role;
  BATON_ASSIGN_OR_RETURN(const auto entries, base::ReadConfigFile(file));
  for (const auto& [key, value] : entries) {
    role.from_file[key] = value;
    role.settings[key] = value;
  }
  if (const auto model = role.from_file.find("model"); model != role.from_file.end())
    role.model = model->second;
  return role;
}

// What the worker itself says of its flags, of which this program knows a few only.
absl::Status AskWorker(const Role& role) {
  std::vector<std::string> argv = {absl::StrCat(BinaryDir(), "/baton-", role.name), "--check-flags",
                                   absl::StrCat("--model=", role.model)};
  if (access(argv[0].c_str(), X_OK) != 0) return absl::NotFoundError(argv[0]);
  if (!role.file.empty()) argv.push_back(absl::StrCat("--config=", role.file));
  for (const auto& [key, value] : role.settings) {
    if (!role.from_file.contains(key)) argv.push_back(absl::StrCat("--", key, "=", value));
  }
  BATON_ASSIGN_OR_RETURN(const ChildAnswer answer, AskChild(argv));
  if (answer.exit_code == 0) return absl::OkStatus();
  // Its last line: `TIME error decode: cannot serve: --flag...`, or the reason alone.
  absl::string_view line = absl::StripTrailingAsciiWhitespace(answer.errors);
  if (const size_t end = line.rfind('\n'); end != absl::string_view::npos)
    line.remove_prefix(end + 1);
  constexpr absl::string_view kPrefix = "cannot serve: ";
  if (const size_t at = line.find(kPrefix); at != absl::string_view::npos)
    line.remove_prefix(at + kPrefix.size());
  return absl::InvalidArgumentError(
      line.empty() ? absl::StrCat(argv[0], " ends with exit code ", answer.exit_code)
                   : std::string(line));
}

// Nothing where `found` says already that the role cannot start: the reasons would be the same.
std::optional<Finding> AskedOf(const Role& role, const std::vector<Finding>& found) {
  if (std::any_of(found.begin(), found.end(),
                  [](const Finding& f) { return f.level == Finding::Level::kError; }))
    return std::nullopt;
  const absl::Status answer = AskWorker(role);
  if (answer.ok()) return std::nullopt;
  if (absl::IsNotFound(answer)) {
    return Finding{Finding::Level::kWarning,
                   absl::StrCat(role.name, ": ", answer.message(),
                                " is not there: not all of the worker's flags are checked")};
  }
  return Finding{Finding::Level::kError, absl::StrCat(role.name, ": ", answer.message())};
}

// Adds what is found; the member when its model could be read.
std::optional<PairMember> CheckRole(const std::string& name,
                                    const std::string& file,
                                    int64_t memory,
                                    std::vector<Finding>* findings) {
  const auto fail = [&](const absl::Status& status) {
    findings->push_back({Finding::Level::kError, absl::StrCat(name, ": ", status.message())});
    return std::nullopt;
  };
  const absl::StatusOr<Role> role = ReadRole(name, file);
  if (!role.ok()) return fail(role.status());
  const absl::StatusOr<PlannedModel> model = PlannedModel::Open(role->model);
  if (!model.ok()) return fail(model.status());
  const absl::StatusOr<std::string> dtype = model->WeightDtype(role->settings);
  if (!dtype.ok()) return fail(dtype.status());
  std::vector<Finding> found = CheckWorker(name, model->config(), *dtype, role->settings, memory);
  if (std::optional<Finding> asked = AskedOf(*role, found)) found.push_back(*std::move(asked));
  std::move(found.begin(), found.end(), std::back_inserter(*findings));
  return PairMember{model->config(), model->fingerprint(), *dtype, role->settings};
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
