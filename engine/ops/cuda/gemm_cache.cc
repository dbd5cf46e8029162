#include "engine/ops/cuda/gemm_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/base/log.h"

namespace baton::ops::cuda {
namespace {

constexpr size_t kLinesMax = 100000;  // of a file that we have not written

}  // namespace

GemmCache::GemmCache(std::string path) : path_(std::move(path)) {
  if (path_.empty()) return;
  std::ifstream file(path_);
  std::string line;
  for (size_t i = 0; i < kLinesMax && std::getline(file, line); ++i) Parse(line);
}

void GemmCache::Parse(absl::string_view line) {
  const size_t space = line.rfind(' ');
  if (space == absl::string_view::npos || space == 0) return;
  const absl::string_view hex = line.substr(space + 1);
  if (hex.size() != 2 * sizeof(CublasLtAlgo)) return;
  for (const char c : hex) {
    if (!absl::ascii_isxdigit(c)) return;
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  CublasLtAlgo algo;
  std::memcpy(&algo, bytes.data(), sizeof(algo));
  algos_.emplace(std::string(line.substr(0, space)), algo);
}

std::optional<CublasLtAlgo> GemmCache::Find(const std::string& key) const {
  const auto found = algos_.find(key);
  if (found == algos_.end()) return std::nullopt;
  return found->second;
}

void GemmCache::Add(const std::string& key, const CublasLtAlgo& algo) {
  algos_[key] = algo;
  if (path_.empty()) return;
  const std::string line = absl::StrCat(
      key, " ", absl::BytesToHexString({reinterpret_cast<const char*>(&algo), sizeof(algo)}), "\n");
  const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  // One write, so that lines of several processes do not mix.
  const bool written = fd >= 0 && write(fd, line.data(), line.size()) == ssize_t(line.size());
  if (!written && !warned_) {
    warned_ = true;
    BATON_LOG(Warning, "gemm cache: cannot be written", LogField("path", path_),
              LogField("error", std::strerror(errno)));
  }
  if (fd >= 0) close(fd);
}

}  // namespace baton::ops::cuda
