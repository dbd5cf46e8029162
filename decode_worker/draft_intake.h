#pragma once

// The decode side of hand-overs of a draft model's keys and values.

#include <memory>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "baton/worker/v1/common.pb.h"
#include "decode_worker/reservation_table.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/sequence.h"
#include "kvtransfer/receiver.h"

namespace baton::decode {

// A prompt that lands is in the draft model's prefix cache, where whoever drafts finds it; one that
// does not is computed here when it is wanted. So nothing depends on it: a prompt is refused a
// place in silence, and a failure is only counted. Whole blocks only. Engine thread only.
class DraftIntake {
 public:
  // All outlive it. `memory` and `runner` are the draft model's, into whose pool `receiver` writes.
  DraftIntake(runtime::KvMemory* memory,
              runtime::ModelRunner* runner,
              kvtransfer::Receiver* receiver,
              const base::Clock* clock);

  // A place for the full blocks of `prompt`. Nothing when there is no full block, no room, or
  // nothing that is missing.
  std::optional<worker::v1::DraftHandoff> Reserve(CallId call, const runtime::Sequence& prompt);
  void OnReceiverEvent(const kvtransfer::ReceiverEvent& event);
  // The call has ended: nobody will draft for it. Unknown calls are left alone.
  void Cancel(CallId call);

  // Worth waiting for: it has a place, and the first such question about it is no longer ago than a
  // prefill worker with a draft model takes.
  bool IsComing(CallId call) const;
  // Counts prompts that have landed, and their tokens.
  int num_landed() const { return num_landed_; }
  int64_t landed_tokens() const { return landed_tokens_; }

 private:
  struct Coming {
    uint64_t reservation_id = 0;
    std::optional<runtime::Sequence> prompt;
    absl::Duration first_asked;  // for, zero: not yet
  };

  runtime::KvMemory& memory_;
  const base::Clock& clock_;
  ReservationTable reservations_;
  absl::flat_hash_map<CallId, std::unique_ptr<Coming>> coming_;
  int num_landed_ = 0;
  int64_t landed_tokens_ = 0;
};

}  // namespace baton::decode
