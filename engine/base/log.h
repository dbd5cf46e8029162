#pragma once

// Log lines for people and machines: "<time> <level> <what> key=value ...", over spdlog, to stderr.
// Prompt text and generated text never enter a log line.

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace baton {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Called once, first thing in main. `process` ("router", "prefill", "decode", "baton") starts every
// line.
void InitLogging(absl::string_view process, LogLevel min_level);

// Thread-safe. Before InitLogging, goes to stderr at kInfo.
void LogLine(LogLevel level, absl::string_view message);

// One key=value field. Strings with white space or quotes are quoted.
std::string LogField(absl::string_view key, absl::string_view value);
template <typename Number>
std::string LogField(absl::string_view key, const Number& value) {
  return LogField(key, absl::string_view(absl::StrCat(value)));
}

[[noreturn]] void CheckFailed(const char* file,
                              int line,
                              const char* condition,
                              absl::string_view message);

}  // namespace baton

#define BATON_LOG(level, ...) \
  ::baton::LogLine(::baton::LogLevel::k##level, ::absl::StrCat(__VA_ARGS__))

// For our own bugs only. What came through a socket, a file or a flag is answered with a Status.
#define BATON_CHECK(condition, ...)                                                         \
  do {                                                                                      \
    if (!(condition)) [[unlikely]]                                                          \
      ::baton::CheckFailed(__FILE__, __LINE__, #condition, ::absl::StrCat("" __VA_ARGS__)); \
  } while (0)
