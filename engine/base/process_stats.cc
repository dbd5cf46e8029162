#include "engine/base/process_stats.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

#include "engine/base/metrics_text.h"

namespace baton::base {
namespace {

using prometheus::MetricType;

void AppendStat(
    const char* name, const char* help, MetricType type, double value, std::string* out) {
  out->append(FamilyHead(name, help, type));
  out->append(LineHead(name, "", ""));
  AppendNumber(value, out);
  out->push_back('\n');
}

// Without a stream: this is read at each scrape.
std::string ReadFile(const char* path) {
  std::string text;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char piece[4096];
  for (ssize_t got; (got = read(fd, piece, sizeof(piece))) > 0;)
    text.append(piece, static_cast<size_t>(got));
  close(fd);
  return text;
}

// Fields of /proc/self/stat from the third on: the second, the program's name, may hold spaces and
// ends at the last ')'.
std::vector<absl::string_view> StatFields(absl::string_view text) {
  const size_t end = text.rfind(')');
  if (end == absl::string_view::npos || end + 2 >= text.size()) return {};
  return absl::StrSplit(text.substr(end + 2), ' ', absl::SkipEmpty());
}

// Field `number` of proc(5), counted from 1.
std::optional<double> Field(const std::vector<absl::string_view>& fields, size_t number) {
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
  // Linux says how many there are since 6.2. Else they are counted, which takes long where there
  // are thousands.
  struct stat info = {};
  if (stat("/proc/self/fd", &info) == 0 && info.st_size > 0)
    return static_cast<double>(info.st_size);
  DIR* dir = opendir("/proc/self/fd");
  if (dir == nullptr) return std::nullopt;
  int count = -3;  // ".", ".." and the directory's own
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

}  // namespace

void AppendProcessStats(std::string* out) {
  const std::string text = ReadFile("/proc/self/stat");
  const std::vector<absl::string_view> fields = StatFields(text);
  const double tick = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto user = Field(fields, 14), system = Field(fields, 15), threads = Field(fields, 20),
             start = Field(fields, 22), virtual_bytes = Field(fields, 23),
             resident_pages = Field(fields, 24);
  if (user && system) {
    AppendStat("process_cpu_seconds_total", "User and system CPU time.", MetricType::Counter,
               (*user + *system) / tick, out);
  }
  if (virtual_bytes) {
    AppendStat("process_virtual_memory_bytes", "Virtual memory size.", MetricType::Gauge,
               *virtual_bytes, out);
  }
  if (resident_pages) {
    AppendStat("process_resident_memory_bytes", "Resident memory size.", MetricType::Gauge,
               *resident_pages * static_cast<double>(sysconf(_SC_PAGESIZE)), out);
  }
  if (threads) AppendStat("process_threads", "Threads.", MetricType::Gauge, *threads, out);
  static const std::optional<double> boot_time = BootTime();
  if (start && boot_time) {
    AppendStat("process_start_time_seconds", "Start of the process since the Unix epoch.",
               MetricType::Gauge, *boot_time + *start / tick, out);
  }
  if (const auto descriptors = OpenDescriptors()) {
    AppendStat("process_open_fds", "Open file descriptors.", MetricType::Gauge, *descriptors, out);
  }
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    AppendStat("process_max_fds", "Most file descriptors that may be open.", MetricType::Gauge,
               static_cast<double>(limit.rlim_cur), out);
  }
}

}  // namespace baton::base
