#pragma once

// What simulated workers do with their time and their blocks.

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "cli/sim_clock.h"
#include "router/worker_table.h"

namespace baton::cli {

// Times of one worker of either role: what its steps take. To be measured on a real one.
struct WorkerSpeed {
  // A step that computes prompts: step_s + token_s for each token + pair_s for each pair of a token
  // and one that it attends to.
  double prefill_step_s = 0.002;
  double prefill_token_s = 20e-6;
  double prefill_pair_s = 0.5e-9;
  uint32_t chunk_tokens = 512;
  // A step that generates: step_s + sequence_s for each sequence + kv_token_s for each token of KV
  // that it reads.
  double decode_step_s = 0.005;
  double decode_sequence_s = 50e-6;
  double decode_kv_token_s = 5e-9;
  double accept_length = 1;  // tokens a step, with speculation
  uint32_t max_batch = 64;
  // What generation still waits for when the prompt is computed.
  double transfer_s = 0.001;
  double transfer_token_s = 0;
  double rpc_s = 0.0003;  // one way between router and worker
  uint32_t prefill_blocks = 4096;
  uint32_t decode_blocks = 4096;
  uint32_t max_model_len = 40960;
};

inline constexpr uint32_t kSimBlockTokens = 64;

// Blocks by content, least recently used out first. Thread-compatible.
class SimCache {
 public:
  // Leading keys that are here; they become the most recently used.
  uint32_t Match(const std::vector<router::BlockKey>& keys);
  // Also tells what it told the router of before.
  void Insert(const std::vector<router::BlockKey>& keys, uint32_t num_keys);
  // Keeps at most this many.
  void Shrink(uint32_t max_blocks);
  uint32_t size() const { return static_cast<uint32_t>(index_.size()); }
  // Changes since the last call.
  void TakeEvents(std::vector<router::BlockKey>* stored, std::vector<router::BlockKey>* removed);

 private:
  std::list<router::BlockKey> order_;  // most recent first
  absl::flat_hash_map<router::BlockKey, std::list<router::BlockKey>::iterator> index_;
  absl::flat_hash_map<router::BlockKey, bool> changed_;  // key -> stored
};

// One request inside a worker.
struct SimSequence {
  uint64_t order = 0;
  uint32_t prompt_tokens = 0;
  uint32_t cached_tokens = 0;
  uint32_t computed_tokens = 0;
  uint32_t output_tokens = 1;  // wanted
  double generated = 0;
  std::vector<router::BlockKey> keys;  // of the prompt, then of the answer
  uint32_t num_prompt_keys = 0;
  double first_step_s = -1;
  std::function<void()> on_computed;        // prompt: first token; compute_s()
  std::function<void(uint32_t)> on_tokens;  // generating: that many more
  double compute_s = 0;

  uint32_t kv_tokens() const { return prompt_tokens + static_cast<uint32_t>(generated); }
  uint32_t blocks() const { return (kv_tokens() + kSimBlockTokens) / kSimBlockTokens; }
};

// A worker of either role: chunks of prompts in order of arrival, as many prompts in a step as its
// tokens allow; a batch that generates beside them. Thread-compatible.
class SimWorker {
 public:
  SimWorker(std::string address,
            router::WorkerRole role,
            const WorkerSpeed& speed,
            SimClock* clock);

  const std::string& address() const { return address_; }
  // A prompt to be computed here. Prompts that do not fit in the free blocks wait for some.
  void Compute(std::shared_ptr<SimSequence> sequence);
  // Promises blocks. False: too few are free.
  bool Reserve(const std::shared_ptr<SimSequence>& sequence);
  // A computed prompt with blocks goes on generating.
  void Generate(std::shared_ptr<SimSequence> sequence);
  // Its blocks are free; what they hold stays cached.
  void Release(const std::shared_ptr<SimSequence>& sequence);

  worker::v1::WorkerStatus Status() const;
  SimCache& cache() { return cache_; }
  double busy_s() const { return busy_s_; }

 private:
  uint32_t num_blocks() const;
  uint32_t available() const { return num_blocks() - std::min(num_blocks(), used_blocks_); }
  void Start();
  void Step();
  double PlanPrompts();
  double PlanDecode();
  void FinishStep();

  const std::string address_;
  const router::WorkerRole role_;
  const WorkerSpeed& speed_;
  SimClock* const clock_;
  SimCache cache_;
  bool running_ = false;
  double busy_s_ = 0;
  uint32_t used_blocks_ = 0;
  std::deque<std::shared_ptr<SimSequence>> prompts_;  // the first num_admitted_ have blocks
  size_t num_admitted_ = 0;
  std::vector<std::pair<std::shared_ptr<SimSequence>, uint32_t>> chunks_;  // of this step
  std::deque<std::shared_ptr<SimSequence>> generating_;     // by age; above max_batch they wait
  std::vector<std::shared_ptr<SimSequence>> batch_;         // of this step
  absl::flat_hash_map<const SimSequence*, uint32_t> held_;  // blocks of each
};

}  // namespace baton::cli
