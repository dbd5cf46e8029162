#pragma once

// Which algorithm of cuBLASLt was the fastest for a shape, kept in a file over starts.

#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "engine/ops/cuda/cublaslt.h"

namespace baton::ops::cuda {

// A file of lines "key 128-hex-digits", which several processes append to; the first line of a key
// counts. What is no such line is passed over: the file is a cache, and everything in it is checked
// by cuBLASLt before it is used. Engine thread only.
class GemmCache {
 public:
  // An empty path: nothing is kept beyond this process.
  explicit GemmCache(std::string path);

  std::optional<CublasLtAlgo> Find(const std::string& key) const;
  // Where the file cannot be written, the algorithm counts for this process.
  void Add(const std::string& key, const CublasLtAlgo& algo);

 private:
  void Parse(absl::string_view line);

  const std::string path_;
  bool warned_ = false;
  absl::flat_hash_map<std::string, CublasLtAlgo> algos_;
};

}  // namespace baton::ops::cuda
