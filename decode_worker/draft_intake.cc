#include "decode_worker/draft_intake.h"

#include <utility>
#include <vector>

#include "engine/base/log.h"

namespace baton::decode {

using kvtransfer::ReceiverEvent;

namespace {

// How long a sequence that could draft goes without, for KV that may be on its way. A prefill
// worker computes it after the prompt itself, in a fraction of that time, or not at all.
constexpr absl::Duration kPatience = absl::Milliseconds(500);

}  // namespace

DraftIntake::DraftIntake(runtime::KvMemory* memory,
                         runtime::ModelRunner* runner,
                         kvtransfer::Receiver* receiver,
                         const base::Clock* clock)
    : memory_(*memory), clock_(*clock), reservations_(memory, runner, receiver, clock) {}

std::optional<worker::v1::DraftHandoff> DraftIntake::Reserve(CallId call,
                                                             const runtime::Sequence& prompt) {
  const int full = prompt.num_tokens() / kv::kBlockTokens * kv::kBlockTokens;
  if (full == 0) return std::nullopt;
  auto coming = std::make_unique<Coming>();
  coming->prompt.emplace(std::vector<uint32_t>(prompt.tokens.begin(), prompt.tokens.begin() + full),
                         prompt.hasher, prompt.order);
  runtime::KvMemory::ExtendHashes(&*coming->prompt);
  const int blocks_wanted = full / kv::kBlockTokens;
  if (memory_.cache().MatchLength(coming->prompt->tokens, coming->prompt->hashes, blocks_wanted) ==
      blocks_wanted) {
    return std::nullopt;
  }
  const absl::StatusOr<worker::v1::Handoff> handoff =
      reservations_.Reserve(call, &*coming->prompt, /*headroom=*/0, /*keep_available=*/0);
  if (!handoff.ok()) return std::nullopt;
  coming->reservation_id = handoff->reservation_id();
  worker::v1::DraftHandoff draft;
  *draft.mutable_handoff() = *handoff;
  draft.set_first_missing_block(static_cast<uint32_t>(coming->prompt->blocks.size()));
  for (const kv::BlockId block : reservations_.blocks(coming->reservation_id))
    draft.add_block_table(static_cast<uint32_t>(block));
  coming_[call] = std::move(coming);
  return draft;
}

bool DraftIntake::IsComing(CallId call) const {
  const auto found = coming_.find(call);
  if (found == coming_.end()) return false;
  Coming& coming = *found->second;
  const absl::Duration now = clock_.Now();
  if (coming.first_asked == absl::ZeroDuration()) coming.first_asked = now;
  return now - coming.first_asked < kPatience;
}

void DraftIntake::OnReceiverEvent(const ReceiverEvent& event) {
  if (reservations_.EndQuarantine(event.reservation_id)) return;
  const std::optional<CallId> call = reservations_.Find(event.reservation_id);
  if (!call) return;
  const std::unique_ptr<Coming> coming = std::move(coming_.at(*call));
  coming_.erase(*call);
  if (event.kind == ReceiverEvent::Kind::kLanded) {
    const absl::Status landed = reservations_.Land(event, &*coming->prompt);
    if (landed.ok()) {
      landed_tokens_ += coming->prompt->num_tokens() - coming->prompt->num_cached;
      ++num_landed_;
    } else {
      BATON_LOG(Error, "draft kv to the device", LogField("status", landed.ToString()));
    }
  } else {
    reservations_.Drop(event.reservation_id);
  }
  memory_.Release(&*coming->prompt);
}

void DraftIntake::Cancel(CallId call) {
  const auto found = coming_.find(call);
  if (found == coming_.end()) return;
  reservations_.Revoke(found->second->reservation_id, "request ended", clock_.Now());
  memory_.Release(&*found->second->prompt);
  coming_.erase(found);
}

}  // namespace baton::decode
