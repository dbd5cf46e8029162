#include "prefill_worker/kv_shipper.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"

namespace baton::prefill {

void KvShipper::BeginStep() {
  layers_done_ = 0;
  chunks_.clear();
}

void KvShipper::AddChunk(CallId call, const runtime::Sequence& sequence, int num_tokens) {
  const int end = sequence.num_computed + num_tokens;
  BATON_CHECK(sequence.num_computed % kv::kBlockTokens == 0);
  const Chunk& chunk = chunks_.emplace_back(
      Chunk{call, &sequence, sequence.num_computed / kv::kBlockTokens, kv::BlocksFor(end)});
  const auto found = transfers_.find(call);
  if (found == transfers_.end()) return;
  PushFinished(&found->second, sequence, chunk.block_begin);
  found->second.next_block = chunk.block_end;
}

void KvShipper::OnLayerDone(int layer) {
  layers_done_ = layer + 1;
  for (const Chunk& chunk : chunks_) {
    const auto found = transfers_.find(chunk.call);
    if (found == transfers_.end()) continue;
    Push(found->second, *chunk.sequence, chunk.block_begin, chunk.block_end, layer, layer + 1);
  }
}

void KvShipper::EndStep() { chunks_.clear(); }

void KvShipper::Begin(CallId call,
                      std::shared_ptr<kvtransfer::Sender> sender,
                      kvtransfer::TransferSpec spec,
                      const runtime::Sequence& sequence) {
  const int first_missing = spec.first_missing_block;
  const kvtransfer::TransferId id = sender->Begin(std::move(spec));
  Transfer& transfer =
      transfers_.emplace(call, Transfer{std::move(sender), id, first_missing}).first->second;
  PushFinished(&transfer, sequence, kv::BlocksFor(sequence.num_computed));
  for (const Chunk& chunk : chunks_) {
    if (chunk.call != call) continue;
    Push(transfer, sequence, chunk.block_begin, chunk.block_end, 0, layers_done_);
    transfer.next_block = chunk.block_end;
  }
}

void KvShipper::PushFinished(Transfer* transfer, const runtime::Sequence& sequence, int block_end) {
  Push(*transfer, sequence, transfer->next_block, block_end, 0, num_layers_);
  transfer->next_block = block_end;
}

void KvShipper::Push(const Transfer& transfer,
                     const runtime::Sequence& sequence,
                     int block_begin,
                     int block_end,
                     int layer_begin,
                     int layer_end) {
  block_begin = std::max(block_begin, transfer.first_missing_block);
  if (transfer.ended || block_begin >= block_end || layer_begin >= layer_end) return;
  transfer.sender->Push(transfer.id, block_begin, block_end, layer_begin, layer_end,
                        sequence.blocks);
}

void KvShipper::Commit(CallId call, std::vector<worker::v1::Token> first_tokens) {
  Transfer& transfer = transfers_.at(call);
  transfer.ended = true;
  transfer.sender->Commit(transfer.id, std::move(first_tokens));
}

bool KvShipper::Abort(CallId call, absl::string_view reason) {
  const auto found = transfers_.find(call);
  if (found == transfers_.end()) return false;
  Transfer& transfer = found->second;
  transfer.ended = true;
  transfer.sender->Abort(transfer.id, reason);
  return true;
}

std::string KvShipper::Close(CallId call) {
  const auto found = transfers_.find(call);
  if (found == transfers_.end()) return "";
  const std::string transport = found->second.sender->transport_name();
  transfers_.erase(found);
  return transport;
}

}  // namespace baton::prefill
