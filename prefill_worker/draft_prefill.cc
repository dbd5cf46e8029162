#include "prefill_worker/draft_prefill.h"

#include <utility>

#include "engine/base/log.h"

namespace baton::prefill {
namespace {

constexpr int kMaxSequences = 16;  // in one step

}  // namespace

DraftPrefill::DraftPrefill(runtime::ModelRunner& runner,
                           PeerConnector& peers,
                           worker::CommandQueue& commands,
                           int chunk_tokens,
                           int max_calls)
    : runner_(runner),
      peers_(peers),
      commands_(commands),
      chunk_tokens_(chunk_tokens),
      max_calls_(max_calls),
      memory_(runner.layout().num_blocks),
      scheduler_(&memory_),
      batch_(kMaxSequences),
      shipper_(runner.layout().num_layers) {}

void DraftPrefill::Begin(CallId id,
                         const runtime::Sequence& prompt,
                         worker::v1::DraftHandoff handoff,
                         const std::string& decode_address) {
  const int blocks = prompt.num_tokens() / kv::kBlockTokens;
  const int tokens = blocks * kv::kBlockTokens;
  if (num_open() >= max_calls_ || tokens > runner_.max_model_len() || calls_.contains(id) ||
      blocks == 0 || handoff.block_table_size() != blocks ||
      handoff.first_missing_block() >= static_cast<uint32_t>(blocks)) {
    return;
  }
  const std::string incarnation = handoff.handoff().decode_incarnation();
  auto call = std::make_unique<Call>();
  call->sequence.emplace(
      std::vector<uint32_t>(prompt.tokens.begin(), prompt.tokens.begin() + tokens), prompt.hasher,
      prompt.order);
  call->handoff = std::move(handoff);
  scheduler_.Enqueue(&*call->sequence);
  calls_.emplace(id, std::move(call));
  peers_.Connect(
      decode_address, incarnation,
      [this, id](absl::StatusOr<std::shared_ptr<kvtransfer::Sender>> sender) {
        commands_.Post([this, id, sender = std::move(sender)] { HandleSender(id, sender); });
      });
}

void DraftPrefill::HandleSender(CallId id,
                                absl::StatusOr<std::shared_ptr<kvtransfer::Sender>> sender) {
  const auto found = calls_.find(id);
  if (found == calls_.end() || found->second->ended) return;
  if (!sender.ok()) return End(id, sender.status().message());
  Call& call = *found->second;
  kvtransfer::TransferSpec spec;
  spec.handoff = call.handoff.handoff();
  spec.prompt_tokens = call.sequence->num_tokens();
  spec.first_missing_block = static_cast<int>(call.handoff.first_missing_block());
  spec.peer_blocks.assign(call.handoff.block_table().begin(), call.handoff.block_table().end());
  spec.on_done = [this, id](kvtransfer::TransferResult) {
    commands_.Post([this, id] { HandleTransferDone(id); });
  };
  shipper_.Begin(id, *std::move(sender), std::move(spec), *call.sequence);
  if (call.computed) shipper_.Commit(id, {});
}

void DraftPrefill::HandleTransferDone(CallId id) {
  shipper_.Close(id);
  End(id, "transfer ended");
}

void DraftPrefill::Cancel(CallId id) {
  if (calls_.contains(id)) End(id, "request ended");
}

void DraftPrefill::End(CallId id, absl::string_view reason) {
  Call& call = *calls_.at(id);
  if (!call.ended) {
    call.ended = true;
    scheduler_.Remove(&*call.sequence);
    shipper_.Abort(id, reason);
  }
  ReleaseIfQuiet(id);
}

void DraftPrefill::ReleaseIfQuiet(CallId id) {
  // A running step still reads the sequence: its end comes back to it.
  for (const runtime::PrefillChunk& chunk : chunks_) {
    if (chunk.sequence == &*calls_.at(id)->sequence) return;
  }
  if (shipper_.IsOpen(id)) return;
  memory_.Release(&*calls_.at(id)->sequence);
  calls_.erase(id);
}

void DraftPrefill::OnLayerDone(int layer) {
  shipper_.OnLayerDone(layer);
  commands_.RunPending();
}

bool DraftPrefill::RunOnce() {
  scheduler_.Plan(chunk_tokens_, kMaxSequences, /*keep_available=*/0, &chunks_);
  if (chunks_.empty()) return false;
  batch_.Clear();
  shipper_.BeginStep();
  for (const runtime::PrefillChunk& chunk : chunks_) {
    batch_.Add(*chunk.sequence, chunk.num_tokens, /*want_logits=*/false);
    shipper_.AddChunk(chunk.sequence->order, *chunk.sequence, chunk.num_tokens);
  }
  const absl::Status status = runner_.Step(batch_.parts(), this, nullptr, nullptr);
  shipper_.EndStep();
  if (!status.ok()) BATON_LOG(Error, "draft step failed", LogField("status", status.ToString()));
  FinishChunks(status.ok());
  return true;
}

void DraftPrefill::FinishChunks(bool computed) {
  const std::vector<runtime::PrefillChunk> chunks = std::exchange(chunks_, {});
  for (const runtime::PrefillChunk& chunk : chunks) {
    const CallId id = chunk.sequence->order;
    Call& call = *calls_.at(id);
    if (call.ended || !computed) {
      End(id, "draft step failed");
      continue;
    }
    scheduler_.Finish(chunk);
    if (!chunk.last) continue;
    call.computed = true;
    if (shipper_.IsOpen(id)) shipper_.Commit(id, {});
  }
}

}  // namespace baton::prefill
