#include "router/worker_ledger.h"

#include <algorithm>

namespace baton::router {

void WorkerLedger::Add(uint64_t id, const Work& work, absl::Duration now) {
  works_[id] = {work};
  tokens_ += work.tokens;
  unreported_blocks_ += work.blocks;
  num_long_ += work.is_long ? 1 : 0;
  if (work.compute_s <= 0) return;
  if (computing_.empty()) head_since_ = now;
  computing_[id] = work.compute_s;
  computing_s_ += work.compute_s;
}

void WorkerLedger::OnReserved(uint64_t id) {
  const auto found = works_.find(id);
  if (found != works_.end()) found->second.reserved = true;
}

void WorkerLedger::EndBlocks(Item* item) {
  if (!item->reported) unreported_blocks_ -= item->work.blocks;
  item->reported = true;
}

void WorkerLedger::EndCompute(uint64_t id, Item* item, absl::Duration now) {
  const auto found = computing_.find(id);
  if (found == computing_.end()) return;
  if (found == computing_.begin()) head_since_ = now;
  computing_s_ -= found->second;
  computing_.erase(found);
  if (computing_.empty()) computing_s_ = 0;
  num_long_ -= item->work.is_long ? 1 : 0;
}

void WorkerLedger::OnComputed(uint64_t id, absl::Duration now) {
  const auto found = works_.find(id);
  if (found != works_.end()) EndCompute(id, &found->second, now);
}

bool WorkerLedger::Remove(uint64_t id, absl::Duration now) {
  const auto found = works_.find(id);
  if (found == works_.end()) return false;
  EndCompute(id, &found->second, now);
  EndBlocks(&found->second);
  tokens_ -= found->second.work.tokens;
  works_.erase(found);
  return true;
}

void WorkerLedger::OnReport() {
  if (unreported_blocks_ == 0) return;
  for (auto& [id, item] : works_) {
    if (item.reserved) EndBlocks(&item);
  }
}

double WorkerLedger::wait_s(absl::Duration now) const {
  if (computing_.empty()) return 0;
  const double head = computing_.begin()->second;
  const double elapsed = std::max(0.0, absl::ToDoubleSeconds(now - head_since_));
  return std::max(0.0, computing_s_ - std::min(elapsed, head));
}

}  // namespace baton::router
