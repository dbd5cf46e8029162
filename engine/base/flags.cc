#include "engine/base/flags.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "yaml-cpp/yaml.h"

#include "engine/base/status_macros.h"
#include "engine/base/version.h"

namespace baton::base {
namespace {

using FlagMap = std::map<std::string, absl::CommandLineFlag*>;

FlagMap OurFlags(const std::vector<std::string>& sources) {
  FlagMap ours;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    const std::string file = flag->Filename();
    if (absl::StrContains(file, "absl/")) continue;
    const bool wanted = sources.empty() ||
                        std::any_of(sources.begin(), sources.end(), [&](const std::string& source) {
                          return absl::StrContains(file, source);
                        });
    if (wanted) ours[std::string(name)] = flag;
  }
  return ours;
}

std::string ToName(absl::string_view dashed) { return absl::StrReplaceAll(dashed, {{"-", "_"}}); }
std::string ToDashed(absl::string_view name) { return absl::StrReplaceAll(name, {{"_", "-"}}); }

bool IsBool(const absl::CommandLineFlag& flag) { return flag.IsOfType<bool>(); }

absl::Status Set(absl::CommandLineFlag* flag, absl::string_view value, absl::string_view where) {
  std::string error;
  if (flag->ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(where, "\"", value, "\": ", error.empty() ? "not a value of this flag" : error,
                   error.empty() ? absl::StrCat(" (", flag->Help(), ")") : ""));
}

absl::Status SetFromEnvironment(const FlagMap& flags) {
  for (const auto& [name, flag] : flags) {
    const std::string variable = absl::StrCat("BATON_", absl::AsciiStrToUpper(name));
    if (const char* value = std::getenv(variable.c_str())) {
      BATON_RETURN_IF_ERROR(Set(flag, value, absl::StrCat(variable, "=")));
    }
  }
  return absl::OkStatus();
}

// Reads the whole file first: yaml-cpp throws, and nothing may be half applied.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ReadYaml(const std::string& path) {
  std::vector<std::pair<std::string, std::string>> entries;
  try {
    const YAML::Node root = YAML::LoadFile(path);
    if (!root.IsMap())
      return absl::InvalidArgumentError(absl::StrCat(path, ": must be a map of flag names"));
    for (const auto& item : root) {
      std::string value;
      if (item.second.IsSequence()) {
        for (const auto& element : item.second)
          absl::StrAppend(&value, value.empty() ? "" : ",", element.as<std::string>());
      } else {
        value = item.second.as<std::string>();
      }
      entries.emplace_back(item.first.as<std::string>(), value);
    }
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.what()));
  }
  return entries;
}

absl::Status SetFromFile(const FlagMap& flags, const std::string& path) {
  BATON_ASSIGN_OR_RETURN(const auto entries, ReadYaml(path));
  for (const auto& [key, value] : entries) {
    const auto found = flags.find(ToName(key));
    if (found == flags.end())
      return absl::InvalidArgumentError(absl::StrCat(path, ": unknown key \"", key, "\""));
    BATON_RETURN_IF_ERROR(Set(found->second, value, absl::StrCat(path, ": ", key, ": ")));
  }
  return absl::OkStatus();
}

struct Assignment {
  absl::CommandLineFlag* flag;
  std::string name;
  std::string value;
};

// Splits the command line into assignments.
class CommandLine {
 public:
  CommandLine(const FlagMap& flags, int argc, const char* const* argv)
      : flags_(flags), argc_(argc), argv_(argv) {}

  absl::Status Read(ParsedFlags* parsed) {
    for (int i = 1; i < argc_; ++i) {
      absl::string_view word = argv_[i];
      if (!absl::ConsumePrefix(&word, "--") || word.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("unexpected \"", argv_[i],
                         "\": all that is said is a flag; a switch is turned off by --no-NAME"));
      }
      if (word == "help") {
        parsed->help = true;
      } else if (word == "version") {
        parsed->version = true;
      } else {
        BATON_RETURN_IF_ERROR(ReadFlag(word, &i));
      }
    }
    return absl::OkStatus();
  }

  const std::vector<Assignment>& assignments() const { return assignments_; }
  const std::string& config() const { return config_; }

 private:
  absl::Status ReadFlag(absl::string_view word, int* i) {
    const size_t equals = word.find('=');
    const std::string name = ToName(word.substr(0, equals));
    const bool has_value = equals != absl::string_view::npos;
    if (name == "config") {
      if (!has_value && *i + 1 >= argc_)
        return absl::InvalidArgumentError("--config: needs a file");
      config_ = has_value ? std::string(word.substr(equals + 1)) : argv_[++*i];
      return absl::OkStatus();
    }
    const auto found = flags_.find(name);
    if (found != flags_.end()) {
      if (has_value) return Add(found->second, name, word.substr(equals + 1));
      if (IsBool(*found->second)) return Add(found->second, name, "true");
      if (*i + 1 >= argc_)
        return absl::InvalidArgumentError(absl::StrCat("--", word, ": needs a value"));
      return Add(found->second, name, argv_[++*i]);
    }
    absl::string_view positive = name;
    if (!has_value && absl::ConsumePrefix(&positive, "no")) {
      positive = absl::StripPrefix(positive, "_");
      const auto negated = flags_.find(std::string(positive));
      if (negated != flags_.end() && IsBool(*negated->second))
        return Add(negated->second, std::string(positive), "false");
    }
    return absl::InvalidArgumentError(
        absl::StrCat("unknown flag --", word.substr(0, equals), " (--help lists them)"));
  }

  absl::Status Add(absl::CommandLineFlag* flag, std::string name, absl::string_view value) {
    assignments_.push_back({flag, std::move(name), std::string(value)});
    return absl::OkStatus();
  }

  const FlagMap& flags_;
  const int argc_;
  const char* const* const argv_;
  std::vector<Assignment> assignments_;
  std::string config_;
};

}  // namespace

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ReadConfigFile(
    const std::string& path) {
  BATON_ASSIGN_OR_RETURN(auto entries, ReadYaml(path));
  for (auto& [key, value] : entries) key = ToName(key);
  return entries;
}

absl::StatusOr<ParsedFlags> ParseFlags(int argc,
                                       const char* const* argv,
                                       const std::vector<std::string>& sources) {
  const FlagMap flags = OurFlags(sources);
  ParsedFlags parsed;
  CommandLine line(flags, argc, argv);
  BATON_RETURN_IF_ERROR(line.Read(&parsed));
  std::string config = line.config();
  if (const char* variable = std::getenv("BATON_CONFIG"); config.empty() && variable != nullptr)
    config = variable;
  // Lowest authority first: what is set later wins.
  if (!config.empty()) BATON_RETURN_IF_ERROR(SetFromFile(flags, config));
  BATON_RETURN_IF_ERROR(SetFromEnvironment(flags));
  for (const Assignment& assignment : line.assignments()) {
    BATON_RETURN_IF_ERROR(
        Set(assignment.flag, assignment.value, absl::StrCat("--", ToDashed(assignment.name), "=")));
  }
  return parsed;
}

std::string FlagsHelp(absl::string_view usage, const std::vector<std::string>& sources) {
  std::string text = absl::StrCat(usage,
                                  "\n\nFlags (each also as BATON_<NAME> in the environment, or in "
                                  "the YAML file of --config):\n");
  for (const auto& [name, flag] : OurFlags(sources)) {
    if (absl::StartsWith(name, "test_")) continue;
    const std::string value = flag->DefaultValue();
    absl::StrAppend(&text, "  --", ToDashed(name), "\n      ", flag->Help(),
                    value.empty() ? "" : absl::StrCat(" Default: ", value, "."), "\n");
  }
  return text;
}

FlagsOutcome HandleFlags(int argc,
                         const char* const* argv,
                         absl::string_view usage,
                         const std::vector<std::string>& sources) {
  absl::StatusOr<ParsedFlags> parsed = ParseFlags(argc, argv, sources);
  if (!parsed.ok()) {
    std::fprintf(stderr, "%s\n", std::string(parsed.status().message()).c_str());
    return {.exit_code = 2};
  }
  if (parsed->help) {
    std::fputs(FlagsHelp(usage, sources).c_str(), stdout);
    return {};
  }
  if (parsed->version) {
    std::printf("baton %s\n", kVersion);
    return {};
  }
  return {.go_on = true};
}

}  // namespace baton::base
