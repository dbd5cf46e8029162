#include "engine/base/process_stats.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace baton::base {
namespace {

using prometheus::MetricFamily;

MetricFamily Make(const char* name, const char* help, prometheus::MetricType type, double value) {
  MetricFamily family{name, help, type, {}};
  family.metric.emplace_back();
  if (type == prometheus::MetricType::Counter) {
    family.metric.back().counter.value = value;
  } else {
    family.metric.back().gauge.value = value;
  }
  return family;
}

std::string ReadFile(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Fields of /proc/self/stat from the third on: the second, the program's name, may hold spaces and
// ends at the last ')'.
std::vector<std::string> StatFields() {
  const std::string text = ReadFile("/proc/self/stat");
  const size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 >= text.size()) return {};
  return absl::StrSplit(text.substr(end + 2), ' ', absl::SkipEmpty());
}

// Field `number` of proc(5), counted from 1.
std::optional<double> Field(const std::vector<std::string>& fields, size_t number) {
  double value = 0;
  if (number < 3 || number - 3 >= fields.size() || !absl::SimpleAtod(fields[number - 3], &value))
    return std::nullopt;
  return value;
}

// Seconds since the epoch at which the machine started.
std::optional<double> BootTime() {
  for (absl::string_view line : absl::StrSplit(ReadFile("/proc/stat"), '\n')) {
    double value = 0;
    if (absl::ConsumePrefix(&line, "btime ") && absl::SimpleAtod(line, &value)) return value;
  }
  return std::nullopt;
}

std::optional<double> OpenDescriptors() {
  DIR* dir = opendir("/proc/self/fd");
  if (dir == nullptr) return std::nullopt;
  int count = -3;  // ".", ".." and the directory's own
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

}  // namespace

std::vector<MetricFamily> CollectProcessStats() {
  using prometheus::MetricType;
  std::vector<MetricFamily> out;
  const std::vector<std::string> fields = StatFields();
  const double tick = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto user = Field(fields, 14), system = Field(fields, 15), threads = Field(fields, 20),
             start = Field(fields, 22), virtual_bytes = Field(fields, 23),
             resident_pages = Field(fields, 24);
  if (user && system) {
    out.push_back(Make("process_cpu_seconds_total", "User and system CPU time.",
                       MetricType::Counter, (*user + *system) / tick));
  }
  if (virtual_bytes) {
    out.push_back(Make("process_virtual_memory_bytes", "Virtual memory size.", MetricType::Gauge,
                       *virtual_bytes));
  }
  if (resident_pages) {
    out.push_back(Make("process_resident_memory_bytes", "Resident memory size.", MetricType::Gauge,
                       *resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE))));
  }
  if (threads) out.push_back(Make("process_threads", "Threads.", MetricType::Gauge, *threads));
  static const std::optional<double> boot_time = BootTime();
  if (start && boot_time) {
    out.push_back(Make("process_start_time_seconds", "Start of the process since the Unix epoch.",
                       MetricType::Gauge, *boot_time + *start / tick));
  }
  if (const auto open = OpenDescriptors()) {
    out.push_back(Make("process_open_fds", "Open file descriptors.", MetricType::Gauge, *open));
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    out.push_back(Make("process_max_fds", "Most file descriptors that may be open.",
                       MetricType::Gauge, static_cast<double>(limit.rlim_cur)));
  }
  return out;
}

}  // namespace baton::base
