#pragma once

// One request inside the engine: its tokens, its blocks, and the answers it grows.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/kv/block_hash.h"
#include "engine/kv/block_pool.h"
#include "engine/kv/kv_layout.h"
#include "engine/kv/prefix_cache.h"
#include "engine/runtime/sampling_params.h"

namespace baton::runtime {

// What a client asks of the engine. Immutable once accepted.
struct EngineRequest {
  std::string request_id;
  std::vector<uint32_t> prompt_ids;
  SamplingParams params;
  std::string cache_salt;
  // The last tokens of the prompt that are earlier output of the same answer: they count as output
  // for penalties, stop strings, min_tokens and max_tokens.
  int resumed_tokens = 0;
  // Higher ones are computed sooner; see PrefillScheduler.
  int priority = 0;

  int prompt_tokens() const { return static_cast<int>(prompt_ids.size()); }
};

struct RequestLimits {
  int vocab_size = 0;         // ids from here up do not exist
  int max_prompt_tokens = 0;  // what this worker computes or keeps for one request
};

// Most answers to one request.
inline constexpr uint32_t kMaxChoices = 16;
// Most stop strings, and the longest of them.
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopBytes = 256;
// Most alternatives beside a chosen token.
inline constexpr int32_t kMaxLogprobs = 20;

// What a worker cannot compute with, whoever sent it. The router has checked the client's values
// already. Errors: INVALID_ARGUMENT naming the field and the numbers.
absl::Status ValidateRequest(const EngineRequest& request, const RequestLimits& limits);

// Tokens of one choice and the blocks that hold their keys and values. Engine thread only; plain
// data, changed by the schedulers and by KvMemory.
struct Sequence {
  Sequence(std::vector<uint32_t> sequence_tokens,
           const kv::BlockHasher& block_hasher,
           uint64_t arrival)
      : tokens(std::move(sequence_tokens)), hasher(block_hasher), order(arrival) {}

  int num_tokens() const { return static_cast<int>(tokens.size()); }
  // Tokens whose keys and values are still to be computed.
  int num_pending() const { return num_tokens() - num_computed; }

  std::vector<uint32_t> tokens;  // prompt and output
  int num_computed = 0;          // tokens whose keys and values are in `blocks`
  int num_cached = 0;  // of them: found in the prefix cache when the sequence was admitted
  std::vector<kv::BlockId> blocks;
  std::vector<kv::BlockHash> hashes;  // of the full blocks; may lag behind `tokens`
  size_t num_published = 0;           // full blocks the prefix cache has been told of
  kv::BlockHasher hasher;
  // Of arrival: who came last is preempted first.
  uint64_t order = 0;
  int priority = 0;  // of its request
};

// The block pool and the prefix cache of one worker, and what a sequence does with them. Engine
// thread only.
class KvMemory {
 public:
  explicit KvMemory(int num_blocks) : pool_(num_blocks), cache_(&pool_) {}

  // Takes the longest cached beginning, at most `max_blocks` blocks. The sequence has no blocks
  // before.
  void MatchPrefix(Sequence* sequence, int max_blocks);
  // Takes blocks until `num_tokens` fit. All or nothing.
  // Errors: RESOURCE_EXHAUSTED.
  absl::Status Grow(Sequence* sequence, int num_tokens);
  // Gives back the blocks behind the first `num_tokens` tokens: those of rejected drafts.
  void Shrink(Sequence* sequence, int num_tokens);
  // Makes the full computed blocks findable. Cheap when no block has been filled since the last
  // call.
  void Publish(Sequence* sequence);
  // Gives everything back; nothing is computed any more. What was published stays cached.
  void Release(Sequence* sequence);
  // `hashes` up to date with `tokens`.
  static void ExtendHashes(Sequence* sequence);

  kv::BlockPool& pool() { return pool_; }
  const kv::BlockPool& pool() const { return pool_; }
  kv::PrefixCache& cache() { return cache_; }
  const kv::PrefixCache& cache() const { return cache_; }

 private:
  kv::BlockPool pool_;
  kv::PrefixCache cache_;
};

}  // namespace baton::runtime
