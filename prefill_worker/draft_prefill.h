#pragma once

// Computes prompts with the draft model, after the model itself, and hands its KV over.

#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "baton/worker/v1/common.pb.h"
#include "engine/runtime/batch.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/prefill_scheduler.h"
#include "kvtransfer/sender.h"
#include "prefill_worker/kv_shipper.h"
#include "prefill_worker/peer_connector.h"
#include "worker/command_queue.h"

namespace baton::prefill {

// Nobody waits for it: it works when the model has nothing to do, and whatever goes wrong only
// means that the decode worker computes the draft model's KV itself. The loop that owns the engine
// thread drives it. Engine thread only.
class DraftPrefill : private runtime::LayerObserver {
 public:
  // All outlive it. `commands` is the loop's queue: events of peers come back through it.
  DraftPrefill(runtime::ModelRunner& runner,
               PeerConnector& peers,
               worker::CommandQueue& commands,
               int chunk_tokens,
               int max_calls);

  // `prompt` is that of the call; its full blocks are computed and sent to the place in `handoff`.
  // What does not fit the prompt, or is too much at a time, is left.
  void Begin(CallId call,
             const runtime::Sequence& prompt,
             worker::v1::DraftHandoff handoff,
             const std::string& decode_address);
  // The request has failed or was cancelled.
  void Cancel(CallId call);
  // One step, if there is work. True if a step ran.
  bool RunOnce();

  bool has_work() const { return !scheduler_.empty(); }
  int num_open() const { return static_cast<int>(calls_.size()); }
  const runtime::KvMemory& memory() const { return memory_; }

 private:
  struct Call {
    std::optional<runtime::Sequence> sequence;
    worker::v1::DraftHandoff handoff;
    bool computed = false;
    bool ended = false;  // only the transfer's end is waited for
  };

  void OnLayerDone(int layer) override;
  void HandleSender(CallId id, absl::StatusOr<std::shared_ptr<kvtransfer::Sender>> sender);
  void HandleTransferDone(CallId id);
  void End(CallId id, absl::string_view reason);
  void ReleaseIfQuiet(CallId id);
  void FinishChunks(bool computed);

  runtime::ModelRunner& runner_;
  PeerConnector& peers_;
  worker::CommandQueue& commands_;
  const int chunk_tokens_;
  const int max_calls_;
  runtime::KvMemory memory_;
  runtime::PrefillScheduler scheduler_;
  runtime::Batch batch_;
  KvShipper shipper_;
  std::vector<runtime::PrefillChunk> chunks_;
  absl::flat_hash_map<CallId, std::unique_ptr<Call>> calls_;
};

}  // namespace baton::prefill
