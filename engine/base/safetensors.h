#pragma once

// Reader of safetensors weight files: one file, or the shards that an index names.
// Nothing in them is trusted: see ParseSafetensorsHeader.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "engine/base/mapped_file.h"

namespace baton::base {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  // as in the file: "F32", "BF16", ...
  std::vector<int64_t> shape;
  absl::Span<const uint8_t> data;  // borrowed; its size is that of shape and dtype
};

// A header may take this much, as in the reference implementation.
inline constexpr uint64_t kSafetensorsHeaderBytesMax = 100'000'000;

// The tensors of a whole file `bytes`, in the order of their data. `path` is for messages.
// Errors: INVALID_ARGUMENT or RESOURCE_EXHAUSTED with the file, the tensor where there is one, and
// the reason: a header that is longer than the file or than the cap, no JSON, or with members of
// the wrong kind; an unknown dtype; sizes that overflow or disagree with shape and dtype; data that
// overlaps, has holes, or does not end where the file ends.
absl::StatusOr<std::vector<SafetensorsTensor>> ParseSafetensors(const std::string& path,
                                                                absl::Span<const uint8_t> bytes);

// All tensors of a model directory: those of model.safetensors, or of the shards that
// model.safetensors.index.json names when that file is there. Owns the mappings. Immutable,
// thread-safe.
class SafetensorsModel {
 public:
  // Shard names must be plain names of files in `directory` (see ResolveInDirectory).
  // Errors: as ParseSafetensors, MappedFile::Open and ResolveInDirectory; INVALID_ARGUMENT when a
  // tensor occurs twice, or the index and the shards disagree about which tensors there are.
  static absl::StatusOr<std::unique_ptr<SafetensorsModel>> Open(const std::string& directory);

  struct Entry {
    SafetensorsTensor tensor;
    const MappedFile* file;
  };
  const Entry* Find(absl::string_view name) const;
  const absl::flat_hash_map<std::string, Entry>& tensors() const { return tensors_; }

 private:
  SafetensorsModel() = default;
  absl::Status AddShard(const std::string& directory, absl::string_view shard_name);

  std::vector<std::unique_ptr<MappedFile>> files_;
  absl::flat_hash_map<std::string, Entry> tensors_;
};

}  // namespace baton::base
