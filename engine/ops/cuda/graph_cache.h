#pragma once

// CUDA graphs of small passes, by what they depend on.

#include <cuda_runtime.h>

#include <cstdint>
#include <list>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "engine/ops/cuda/pass_arrays.h"

namespace baton::ops::cuda {

// Most graphs kept; the one that was not used for longest leaves.
inline constexpr int kGraphsMax = 128;

// Owns the graphs. Engine thread only.
class GraphCache {
 public:
  GraphCache() = default;
  ~GraphCache() { Clear(); }
  GraphCache(const GraphCache&) = delete;
  GraphCache& operator=(const GraphCache&) = delete;

  struct Key {
    const void* model = nullptr;  // whose pass
    PassShape shape;
    bool operator==(const Key&) const = default;
  };

  // Puts a pass into `stream`. The first time `issue` does it; so all that is made only once
  // (plans, constants, scratch memory) is there when it is captured, which is the second time.
  // From then on the graph is launched. A capture that fails is told in the log, `issue` does it
  // once more, and no graph is made any more. Errors: those of `issue`; INTERNAL of the launch.
  absl::Status Run(const Key& key, absl::FunctionRef<absl::Status()> issue, cudaStream_t stream);

  // What graphs point to has moved or will go.
  void Clear();

 private:
  struct Entry {
    Key key;
    cudaGraphExec_t graph = nullptr;  // null: seen once
  };

  // Entry of `key`, the first of the list; null: it is new there.
  Entry* Find(const Key& key);
  absl::Status Capture(Entry* entry, absl::FunctionRef<absl::Status()> issue, cudaStream_t stream);

  std::list<Entry> entries_;  // the last used first
  bool off_ = false;
};

}  // namespace baton::ops::cuda
