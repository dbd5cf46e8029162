#include "engine/process/port_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "absl/strings/str_cat.h"

namespace baton::process {
namespace {

std::string PortText(int port) { return port < 0 ? "null" : absl::StrCat(port); }

}  // namespace

absl::Status WritePortFile(const std::string& path, int grpc, int http, int health) {
  if (path.empty()) return absl::OkStatus();
  const std::string text = absl::StrCat("{\"grpc\":", grpc, ",\"http\":", PortText(http),
                                        ",\"health\":", PortText(health), "}\n");
  const std::string temporary = absl::StrCat(path, ".", getpid());
  FILE* file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr) return absl::ErrnoToStatus(errno, absl::StrCat("port file ", temporary));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("port file ", path));
    std::remove(temporary.c_str());
    return status;
  }
  return absl::OkStatus();
}

void RemovePortFile(const std::string& path) {
  if (!path.empty()) std::remove(path.c_str());
}

}  // namespace baton::process
