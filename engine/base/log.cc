#include "engine/base/log.h"

#include <cstdlib>

#include "absl/strings/escaping.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace baton {
namespace {

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

std::shared_ptr<spdlog::logger> MakeLogger(const std::string& name) {
  auto logger =
      std::make_shared<spdlog::logger>(name, std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %n: %v", spdlog::pattern_time_type::utc);
  logger->flush_on(spdlog::level::info);
  return logger;
}

// Shared because spdlog hands loggers out only so; replaced once, by InitLogging, before any thread
// starts.
std::shared_ptr<spdlog::logger>& Logger() {
  static auto* const logger = new std::shared_ptr<spdlog::logger>(MakeLogger("baton"));
  return *logger;
}

}  // namespace

void InitLogging(absl::string_view process, LogLevel min_level) {
  Logger() = MakeLogger(std::string(process));
  Logger()->set_level(ToSpdlog(min_level));
}

void LogLine(LogLevel level, absl::string_view message) {
  Logger()->log(ToSpdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

std::string LogField(absl::string_view key, absl::string_view value) {
  if (!value.empty() && value.find_first_of(" \t\r\n\"=") == absl::string_view::npos) {
    return absl::StrCat(" ", key, "=", value);
  }
  return absl::StrCat(" ", key, "=\"", absl::CHexEscape(value), "\"");
}

void CheckFailed(const char* file, int line, const char* condition, absl::string_view message) {
  LogLine(LogLevel::kError,
          absl::StrCat("check failed: ", condition, " ", message, " at ", file, ":", line));
  std::abort();
}

}  // namespace baton
