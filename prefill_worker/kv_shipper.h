#pragma once

// Feeds finished blocks to the senders: layer by layer while a step runs, all at once what was
// finished before.

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "kvtransfer/sender.h"
#include "engine/runtime/sequence.h"

namespace baton::prefill {

using CallId = uint64_t;

// Knows which part of which prompt the running step computes, and the open transfers. Engine thread
// only.
class KvShipper {
 public:
  explicit KvShipper(int num_layers) : num_layers_(num_layers) {}

  // A step computes the next `num_tokens` tokens of `sequence`, which outlives the step. What it
  // has found in the prefix cache since its transfer was opened is pushed first.
  void BeginStep();
  void AddChunk(CallId call, const runtime::Sequence& sequence, int num_tokens);
  // Layers end in order. Pushes the blocks of this layer for every chunk whose transfer is open.
  void OnLayerDone(int layer);
  // After the step its blocks count as computed: the caller has advanced num_computed.
  void EndStep();

  // Opens the transfer of `call` and pushes what is finished: first the blocks computed before this
  // step (cached ones are the first of them), then those of the running step in the layers that are
  // done. Works during a step and between steps.
  void Begin(CallId call,
             std::shared_ptr<kvtransfer::Sender> sender,
             kvtransfer::TransferSpec spec,
             const runtime::Sequence& sequence);
  void Commit(CallId call, std::vector<worker::v1::Token> first_tokens);
  // Gives up; TransferSpec::on_done still comes. False when no transfer is open.
  bool Abort(CallId call, absl::string_view reason);
  // on_done has come. The name of the transport; empty if there was no transfer.
  std::string Close(CallId call);

  bool IsOpen(CallId call) const { return transfers_.contains(call); }
  int num_open() const { return static_cast<int>(transfers_.size()); }

 private:
  struct Chunk {
    CallId call;
    const runtime::Sequence* sequence;
    int block_begin;
    int block_end;
  };
  struct Transfer {
    // Shared: a reconnect may replace the peer's sender while this transfer still ends on the old
    // one.
    std::shared_ptr<kvtransfer::Sender> sender;
    kvtransfer::TransferId id;
    int first_missing_block;
    int next_block = 0;  // earlier ones have been pushed, or their layers are as they end
    bool ended = false;  // committed or aborted: nothing more is pushed
  };

  // Everything before `block_end` that is complete and has not been pushed.
  void PushFinished(Transfer* transfer, const runtime::Sequence& sequence, int block_end);
  void Push(const Transfer& transfer,
            const runtime::Sequence& sequence,
            int block_begin,
            int block_end,
            int layer_begin,
            int layer_end);

  const int num_layers_;
  int layers_done_ = 0;  // of the running step
  std::vector<Chunk> chunks_;
  absl::flat_hash_map<CallId, Transfer> transfers_;
};

}  // namespace baton::prefill
