#pragma once

// Files that came from outside, opened without trust and read through memory mappings.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace baton::base {

// A whole regular file, mapped read-only. The size is taken from the open descriptor, so a mapping
// never reaches past the end of the file. A file that another process cuts short afterwards still
// faults; model files must not change while they are served. Immutable, thread-safe.
class MappedFile {
 public:
  // Follows symbolic links: `path` is the operator's own choice.
  // Errors: NOT_FOUND, INVALID_ARGUMENT (not a regular file, empty), RESOURCE_EXHAUSTED (cannot be
  // mapped).
  static absl::StatusOr<std::unique_ptr<MappedFile>> Open(const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  absl::Span<const uint8_t> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

 private:
  MappedFile(std::string path, const uint8_t* data, size_t size)
      : path_(std::move(path)), data_(data), size_(size) {}

  std::string path_;
  const uint8_t* data_;
  size_t size_;
};

// The real path of `name`, a file that some other file of the model directory `directory` names.
// `name` must be a plain file name: no slash, no NUL, not "." or "..". A symbolic link may point to
// a file in the same directory, or, when the directory is a snapshot of the Hugging Face cache
// (<repository>/snapshots/<revision>), to <repository>/blobs; every other link is refused. Errors:
// INVALID_ARGUMENT with the name and reason, NOT_FOUND.
absl::StatusOr<std::string> ResolveInDirectory(const std::string& directory,
                                               absl::string_view name);

// Reads a small regular file whole (config.json and its like).
// Errors: as MappedFile::Open, and RESOURCE_EXHAUSTED above `max_bytes`.
absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes);

}  // namespace baton::base
