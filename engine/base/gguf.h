#pragma once

// Reader of GGUF model files (versions 2 and 3, little-endian): metadata and the table of tensors.
// Nothing in the file is trusted: every length is checked against what is left of the file before
// it is used.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "engine/base/dequant.h"
#include "engine/base/mapped_file.h"

namespace baton::base {

// One tensor. `shape` is in GGUF's order: the length of a row comes first.
struct GgufTensor {
  std::string name;
  std::vector<int64_t> shape;
  WeightFormat format;
  absl::Span<const uint8_t> data;  // borrowed from the file
};

// Owns the mapping of one file; everything it hands out is borrowed from it. Immutable,
// thread-safe.
class GgufFile {
 public:
  // Errors: as MappedFile::Open; INVALID_ARGUMENT with the file and what is wrong with it: no GGUF,
  // a version or tensor type that is not supported, names or keys that occur twice, lengths or
  // offsets past the end of the file.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);
  // The same for a file already in memory; `bytes` must outlive the result. `path` is for messages.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Parse(const std::string& path,
                                                         absl::Span<const uint8_t> bytes);

  const std::string& path() const { return path_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  const GgufTensor* FindTensor(absl::string_view name) const;

  // Metadata. Empty when the key is absent or its value is of another kind.
  bool HasKey(absl::string_view key) const { return metadata_.contains(key); }
  std::optional<absl::string_view> FindString(absl::string_view key) const;
  std::optional<int64_t> FindInt(absl::string_view key) const;  // any integer type that fits
  std::optional<uint32_t> FindU32(absl::string_view key) const;
  std::optional<double> FindFloat(absl::string_view key) const;  // f32 or f64
  std::optional<bool> FindBool(absl::string_view key) const;
  // Arrays are decoded at each call: keep the result.
  std::optional<std::vector<absl::string_view>> FindStringArray(absl::string_view key) const;
  std::optional<std::vector<int64_t>> FindIntArray(absl::string_view key) const;
  std::optional<std::vector<float>> FindFloatArray(absl::string_view key) const;

 private:
  friend class GgufParser;
  // Where a value lies in the file; its extent was checked when the file was parsed.
  struct Value {
    uint32_t type;
    uint32_t element_type;  // of an array
    uint64_t count;         // of an array
    const uint8_t* data;
  };

  GgufFile() = default;
  const Value* Find(absl::string_view key, uint32_t type) const;
  const Value* FindArray(absl::string_view key) const;

  std::string path_;
  std::unique_ptr<MappedFile> file_;  // null when parsed from memory
  absl::flat_hash_map<std::string, Value> metadata_;
  std::vector<GgufTensor> tensors_;
  absl::flat_hash_map<std::string, size_t> tensor_index_;
};

}  // namespace baton::base
