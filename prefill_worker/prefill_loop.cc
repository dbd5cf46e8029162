#include "prefill_worker/prefill_loop.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"
#include "prefill_worker/prefill_call.h"
#include "worker/poison.h"

namespace baton::prefill {
namespace {

using worker::v1::PrefillResponse;

// Timeouts are looked at at least this often.
constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

// What is done to several calls is done in a fixed order, whatever that of the table.
template <typename Call>
void SortByArrival(std::vector<Call*>* calls) {
  std::sort(calls->begin(), calls->end(),
            [](const Call* a, const Call* b) { return a->id < b->id; });
}

}  // namespace

PrefillLoop::PrefillLoop(const PrefillLoopOptions& options,
                         runtime::ModelRunner& runner,
                         const text::Tokenizer& tokenizer,
                         PeerConnector& peers,
                         const worker::WorkerMetrics& metrics)
    : options_(options),
      runner_(runner),
      tokenizer_(tokenizer),
      peers_(peers),
      metrics_(metrics),
      clock_(*options.clock),
      limits_{runner.config().vocab,
              std::min(runner.max_model_len(), runner.layout().num_blocks * kv::kBlockTokens)},
      commands_(options.max_calls),
      memory_(runner.layout().num_blocks),
      scheduler_(&memory_),
      sampler_(runner, static_cast<int>(tokenizer.vocab_size())),
      batch_(options.max_sequences),
      shipper_(runner.layout().num_layers) {
  if (options_.test_poison_freed) worker::PoisonFreedBlocks(&memory_, &runner_);
  memory_.cache().set_listener(
      [this](const kv::BlockHash& hash, bool stored) { kv_events_.Add(hash, stored); });
  PublishLoad();
}

PrefillLoop::~PrefillLoop() { Stop(); }

absl::StatusOr<CallId> PrefillLoop::Open(runtime::EngineRequest request,
                                         bool needs_handoff,
                                         std::shared_ptr<PrefillSink> sink) {
  const int calls = num_calls_.fetch_add(1) + 1;
  if (calls > options_.max_calls || stopping_.load()) {
    num_calls_.fetch_sub(1);
    if (stopping_.load()) return absl::UnavailableError("prefill: stopping");
    return absl::ResourceExhaustedError(
        absl::StrCat("prefill: queue is full: max_calls=", options_.max_calls));
  }
  const CallId id = next_call_.fetch_add(1);
  // std::function wants a copyable closure, hence the raw pointer; a dropped command is followed by
  // Stop only.
  auto* call = new Call(id, std::move(request), needs_handoff, std::move(sink));
  call->times.arrived = clock_.Now();
  commands_.Post([this, call] { HandleOpen(std::unique_ptr<Call>(call)); });
  return id;
}

void PrefillLoop::GiveTicket(CallId call, Ticket ticket) {
  commands_.Post([this, call, ticket = std::move(ticket)]() mutable {
    HandleTicket(call, std::move(ticket));
  });
}

void PrefillLoop::Cancel(CallId call, absl::Status status) {
  commands_.Post([this, call, status = std::move(status), asked_at = clock_.Now()] {
    HandleCancel(call, status, asked_at);
  });
}

void PrefillLoop::SetDraftModel(runtime::ModelRunner& runner, PeerConnector& peers) {
  draft_ = std::make_unique<DraftPrefill>(runner, peers, commands_, options_.chunk_tokens,
                                          options_.max_calls);
}

void PrefillLoop::Start() {
  thread_ = std::thread([this] {
    while (!stopping_.load()) RunOnce(kPollInterval);
  });
}

void PrefillLoop::Stop() {
  stopping_.store(true);
  commands_.Close();
  if (thread_.joinable()) thread_.join();
  commands_.RunPending();
  std::vector<Call*> open;
  for (const auto& [id, call] : calls_) {
    if (!call->ended) open.push_back(call.get());
  }
  SortByArrival(&open);
  for (Call* call : open) End(call, absl::UnavailableError("prefill: worker stops"));
}

bool PrefillLoop::RunOnce(absl::Duration idle_wait) {
  const bool idle = scheduler_.empty() && (draft_ == nullptr || !draft_->has_work());
  if (idle) {
    commands_.RunPendingFor(idle_wait);
  } else {
    commands_.RunPending();
  }
  CheckTimeouts();
  scheduler_.Plan(options_.chunk_tokens, options_.max_sequences, 0, &chunks_);
  bool work = !chunks_.empty();
  if (work) {
    RunStep();
  } else if (draft_ != nullptr && draft_->RunOnce()) {
    work = true;
  } else if (!scheduler_.empty()) {
    // Everyone waits for blocks that transfers still hold.
    commands_.RunPendingFor(std::min(idle_wait, kPollInterval));
  }
  PublishLoad();
  return work;
}

void PrefillLoop::OnLayerDone(int layer) {
  shipper_.OnLayerDone(layer);
  if (commands_.RunPending()) PublishLoad();
}

PrefillLoop::Call* PrefillLoop::Find(CallId id) {
  const auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second.get();
}

void PrefillLoop::HandleOpen(std::unique_ptr<Call> owned) {
  Call* call = owned.get();
  calls_.emplace(call->id, std::move(owned));
  const kv::BlockHasher hasher(options_.model_fingerprint, runner_.layout().format,
                               call->request.cache_salt, options_.block_hash_bits);
  call->sequence.emplace(call->request.prompt_ids, hasher, call->id);
  call->sequence->priority = call->request.priority;
  scheduler_.Enqueue(&*call->sequence);
}

void PrefillLoop::HandleTicket(CallId id, Ticket ticket) {
  Call* call = Find(id);
  if (call == nullptr || call->ended || call->ticket || !call->needs_handoff) return;
  const int blocks = kv::BlocksFor(call->request.prompt_tokens());
  if (ticket.block_table_size() < blocks ||
      ticket.first_missing_block() > static_cast<uint32_t>(blocks)) {
    End(call, absl::InvalidArgumentError(absl::StrCat(
                  "ticket: block_table=", ticket.block_table_size(), " first_missing_block=",
                  ticket.first_missing_block(), " prompt_blocks=", blocks)));
    return;
  }
  call->ticket = std::move(ticket);
  if (draft_ != nullptr && call->ticket->has_draft()) {
    draft_->Begin(id, *call->sequence, std::move(*call->ticket->mutable_draft()),
                  call->ticket->decode_address());
  }
  peers_.Connect(
      call->ticket->decode_address(), call->ticket->handoff().decode_incarnation(),
      [this, id](absl::StatusOr<std::shared_ptr<kvtransfer::Sender>> sender) {
        commands_.Post([this, id, sender = std::move(sender)] { HandleSender(id, sender); });
      });
}

void PrefillLoop::HandleSender(CallId id,
                               absl::StatusOr<std::shared_ptr<kvtransfer::Sender>> sender) {
  Call* call = Find(id);
  if (call == nullptr || call->ended) return;
  if (!sender.ok()) {
    End(call, process::WithErrorInfo(Annotate(sender.status(), "peer"), process::kPeerFailed, {}));
    return;
  }
  kvtransfer::TransferSpec spec;
  spec.handoff = call->ticket->handoff();
  spec.prompt_tokens = call->request.prompt_tokens();
  spec.first_missing_block = static_cast<int>(call->ticket->first_missing_block());
  const int blocks = kv::BlocksFor(spec.prompt_tokens);
  spec.peer_blocks.assign(call->ticket->block_table().begin(),
                          call->ticket->block_table().begin() + blocks);
  spec.on_done = [this, id](kvtransfer::TransferResult result) {
    commands_.Post([this, id, result = std::move(result)] { HandleTransferDone(id, result); });
  };
  metrics_.units_skipped.Increment(spec.first_missing_block);
  shipper_.Begin(id, *std::move(sender), std::move(spec), *call->sequence);
  if (call->computed) shipper_.Commit(id, std::move(call->first_tokens));
}

void PrefillLoop::HandleTransferDone(CallId id, const kvtransfer::TransferResult& result) {
  Call* call = Find(id);
  if (call == nullptr) return;
  const std::string transport = shipper_.Close(id);
  if (result.status.ok()) {
    metrics_.OnTransfer(transport, /*send=*/true, result.busy, result.bytes);
  } else {
    metrics_.OnTransferFailed(transport, result.status);
  }
  if (call->ended) {
    ReleaseIfQuiet(call);
    return;
  }
  if (result.status.ok()) {
    PrefillResponse response;
    PrefillResponse::Done* done = response.mutable_done();
    done->set_kv_bytes(result.bytes);
    done->set_units_sent(result.units_sent);
    done->set_transfer_s(absl::ToDoubleSeconds(result.busy));
    done->set_transport(transport);
    call->sink->Send(std::move(response));
  }
  End(call, result.status.ok() ? absl::OkStatus()
                               : process::WithErrorInfo(Annotate(result.status, "kv transfer"),
                                                        process::kPeerFailed, {}));
}

void PrefillLoop::HandleCancel(CallId id, absl::Status status, absl::Duration asked_at) {
  Call* call = Find(id);
  if (call == nullptr || call->ended) return;
  call->abort_asked_at = asked_at;
  End(call, std::move(status));
}

void PrefillLoop::CheckTimeouts() {
  const absl::Duration now = clock_.Now();
  std::vector<Call*> late;
  for (const auto& [id, call] : calls_) {
    if (call->computed && !call->ended && !call->ticket &&
        now - call->computed_at > options_.ticket_timeout) {
      late.push_back(call.get());
    }
  }
  SortByArrival(&late);
  for (Call* call : late) {
    End(call, absl::UnavailableError(absl::StrCat("prefill: no ticket within ",
                                                  absl::FormatDuration(options_.ticket_timeout))));
  }
}

void PrefillLoop::End(Call* call, absl::Status status) {
  BATON_CHECK(!call->ended);
  call->ended = true;
  call->aborted = !status.ok();
  call->ended_at = clock_.Now();
  if (call->abort_asked_at == absl::ZeroDuration()) call->abort_asked_at = call->ended_at;
  const runtime::FinishReason reason =
      call->answers.empty() ? runtime::FinishReason::kNone : call->answers.front().finish().reason;
  // A prompt that was handed over has used up what this worker had to give: one token.
  metrics_.OnRequestEnd(
      status, reason == runtime::FinishReason::kNone ? runtime::FinishReason::kLength : reason,
      call->times, call->ended_at, call->request.prompt_tokens(),
      call->computed ? static_cast<int>(call->answers.size()) : 0, call->request.params.max_tokens);
  call->sink->Finish(std::move(status));
  scheduler_.Remove(&*call->sequence);
  shipper_.Abort(call->id, "request ended");
  if (draft_ != nullptr && call->aborted) draft_->Cancel(call->id);
  ReleaseIfQuiet(call);
}

void PrefillLoop::ReleaseIfQuiet(Call* call) {
  if (shipper_.IsOpen(call->id)) return;
  // A running step still reads the block table, which stays as it is, and writes into the blocks.
  // They may be free in the books at once all the same: blocks are given out between steps only.
  memory_.pool().Release(call->sequence->blocks);
  if (call->aborted)
    metrics_.abort_to_free.Observe(absl::ToDoubleSeconds(clock_.Now() - call->abort_asked_at));
  const auto found = calls_.find(call->id);
  if (in_step_) gone_.push_back(std::move(found->second));
  calls_.erase(found);
  num_calls_.fetch_sub(1);
}

void PrefillLoop::PublishLoad() {
  worker::v1::WorkerLoad load = worker::LoadOf(memory_.pool());
  uint32_t waiting_transfer = 0;
  int waiting_ticket = 0;
  for (const auto& [id, call] : calls_) {
    if (!call->computed || call->ended) continue;
    ++waiting_transfer;
    if (!shipper_.IsOpen(id)) ++waiting_ticket;
  }
  const auto waiting = static_cast<uint32_t>(scheduler_.num_waiting());
  load.set_requests_running(static_cast<uint32_t>(scheduler_.num_admitted()) + waiting_transfer);
  load.set_requests_waiting(waiting);
  load.set_queue_tokens(static_cast<uint64_t>(scheduler_.queue_tokens()));
  metrics_.SetLoad(load, waiting, 0, 0);
  metrics_.SetTransfers(waiting_ticket, shipper_.num_open(), 0);
  const kv::PrefixCache& cache = memory_.cache();
  metrics_.cache_queries.Increment(static_cast<double>(
      cache.query_tokens() - std::exchange(counted_queries_, cache.query_tokens())));
  metrics_.cache_hits.Increment(
      static_cast<double>(cache.hit_tokens() - std::exchange(counted_hits_, cache.hit_tokens())));
  metrics_.cache_evictions.Increment(static_cast<double>(
      cache.evictions() - std::exchange(counted_evictions_, cache.evictions())));
  metrics_.CountSaturated(runner_.saturated_samples(), &counted_saturated_);
  base::MutexLock lock(&load_mutex_);
  load_ = std::move(load);
}

worker::v1::WorkerLoad PrefillLoop::load() const {
  base::MutexLock lock(&load_mutex_);
  return load_;
}

}  // namespace baton::prefill
