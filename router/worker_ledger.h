#pragma once

// What one worker has been given and has not given back: the router's own book, which runs ahead of
// the worker's reports.

#include <cstdint>
#include <map>

#include "absl/time/time.h"

namespace baton::router {

// One leg's share of a worker.
struct Work {
  uint64_t tokens = 0;   // prefill: to be computed; decode: whole blocks of KV
  uint32_t blocks = 0;   // decode: that the request will reserve
  double compute_s = 0;  // predicted, above 0, of a prompt that is computed there; 0: none is
  bool is_long = false;
};

// Prompts are taken to be computed in the order in which they were sent. Thread-compatible.
class WorkerLedger {
 public:
  void Add(uint64_t id, const Work& work, absl::Duration now);
  // The worker has reserved the blocks: its next report counts them.
  void OnReserved(uint64_t id);
  // The prompt is computed.
  void OnComputed(uint64_t id, absl::Duration now);
  // False: it is not here (any more).
  bool Remove(uint64_t id, absl::Duration now);
  void OnReport();
  void Clear() { *this = WorkerLedger(); }

  bool empty() const { return works_.empty(); }
  size_t size() const { return works_.size(); }
  uint64_t tokens() const { return tokens_; }
  uint32_t unreported_blocks() const { return unreported_blocks_; }
  uint32_t num_long() const { return num_long_; }
  // Predicted time until the worker begins with another prompt.
  double wait_s(absl::Duration now) const;

 private:
  struct Item {
    Work work;
    bool reserved = false;
    bool reported = false;
  };
  void EndCompute(uint64_t id, Item* item, absl::Duration now);
  void EndBlocks(Item* item);

  std::map<uint64_t, Item> works_;        // ids rise with time
  std::map<uint64_t, double> computing_;  // predicted seconds of prompts not computed yet
  absl::Duration head_since_;             // when the first of them became the first
  double computing_s_ = 0;
  uint64_t tokens_ = 0;
  uint32_t unreported_blocks_ = 0;
  uint32_t num_long_ = 0;
};

}  // namespace baton::router
