#include "decode_worker/decode_loop.h"

#include <algorithm>
#include <utility>

#include "decode_worker/decode_call.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"
#include "worker/poison.h"

namespace baton::decode {
namespace {

using kvtransfer::ReceiverEvent;
using worker::v1::DecodeResponse;

constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

// Blocks for the tokens that follow a prompt: what every choice needs for its first one. Choices
// share the prompt's last block if it is partly filled, but for its copies.
int HeadroomBlocks(const runtime::EngineRequest& request, int pool_blocks) {
  const auto n = static_cast<int>(request.params.n);
  const int wanted = request.prompt_tokens() % kv::kBlockTokens == 0 ? n : n - 1;
  // A request that fills the pool goes on by preempting its own choices.
  return std::clamp(pool_blocks - kv::BlocksFor(request.prompt_tokens()), 0, wanted);
}

}  // namespace

DecodeLoop::DecodeLoop(const DecodeLoopOptions& options,
                       runtime::ModelRunner& runner,
                       const text::Tokenizer& tokenizer,
                       const worker::WorkerMetrics& metrics)
    : options_(options),
      runner_(runner),
      tokenizer_(tokenizer),
      metrics_(metrics),
      clock_(*options.clock),
      limits_{runner.config().vocab,
              std::min(runner.max_model_len(), runner.layout().num_blocks * kv::kBlockTokens)},
      commands_(options.max_calls),
      memory_(runner.layout().num_blocks),
      scheduler_(options.scheduler, &memory_),
      speculator_(options.speculation, options.scheduler.max_batch, metrics),
      sampler_(runner, static_cast<int>(tokenizer.vocab_size())),
      batch_(options.scheduler.max_batch + options.scheduler.max_prefill_sequences, kMaxDrafts) {
  parts_.reserve(options.scheduler.max_batch + options.scheduler.max_prefill_sequences);
  speculator_.set_reads_chains(runner.reads_draw_chains());
  if (options_.test_poison_freed) worker::PoisonFreedBlocks(&memory_, &runner_);
  memory_.cache().set_listener(
      [this](const kv::BlockHash& hash, bool stored) { kv_events_.Add(hash, stored); });
  PublishLoad();
}

DecodeLoop::~DecodeLoop() { Stop(); }

void DecodeLoop::set_receiver(kvtransfer::Receiver* receiver) {
  receiver_ = receiver;
  reservations_ = std::make_unique<ReservationTable>(&memory_, &runner_, receiver, &clock_);
}

absl::StatusOr<CallId> DecodeLoop::Open(runtime::EngineRequest request,
                                        bool prefill_locally,
                                        std::shared_ptr<DecodeSink> sink) {
  const int calls = num_calls_.fetch_add(1) + 1;
  if (calls > options_.max_calls || stopping_.load()) {
    num_calls_.fetch_sub(1);
    if (stopping_.load()) return absl::UnavailableError("decode: stopping");
    return absl::ResourceExhaustedError(
        absl::StrCat("decode: queue is full: max_calls=", options_.max_calls));
  }
  const CallId id = next_call_.fetch_add(1);
  // std::function wants a copyable closure, hence the raw pointer.
  auto* call = new Call(id, std::move(request), prefill_locally, std::move(sink));
  call->times.arrived = clock_.Now();
  commands_.Post([this, call] { HandleOpen(std::unique_ptr<Call>(call)); });
  return id;
}

void DecodeLoop::Cancel(CallId call, absl::Status status) {
  commands_.Post([this, call, status = std::move(status), asked_at = clock_.Now()] {
    HandleCancel(call, status, asked_at);
  });
}

void DecodeLoop::OnReceiverEvent(ReceiverEvent event) {
  commands_.Post([this, event = std::move(event)] { HandleReceiverEvent(event); });
}

void DecodeLoop::OnDraftReceiverEvent(ReceiverEvent event) {
  commands_.Post([this, event = std::move(event)] { draft_intake_->OnReceiverEvent(event); });
}

void DecodeLoop::Start() {
  thread_ = std::thread([this] {
    while (!stopping_.load()) RunOnce(kPollInterval);
  });
}

void DecodeLoop::Stop() {
  stopping_.store(true);
  commands_.Close();
  if (thread_.joinable()) thread_.join();
  commands_.RunPending();
  std::vector<Call*> open;
  for (const auto& [id, call] : calls_) {
    if (!call->ended) open.push_back(call.get());
  }
  // In a fixed order, whatever that of the table.
  std::sort(open.begin(), open.end(), [](const Call* a, const Call* b) { return a->id < b->id; });
  for (Call* call : open) End(call, absl::UnavailableError("decode: worker stops"));
}

bool DecodeLoop::RunOnce(absl::Duration idle_wait) {
  if (scheduler_.empty()) {
    commands_.RunPendingFor(idle_wait);
  } else {
    commands_.RunPending();
  }
  const bool work = !scheduler_.MakePlan().empty();
  if (!work) last_step_end_ = absl::ZeroDuration();
  if (work) {
    RunStep();
  } else if (!scheduler_.empty()) {
    // Everyone waits for blocks that are promised or in quarantine.
    commands_.RunPendingFor(std::min(idle_wait, kPollInterval));
  }
  PublishLoad();
  return work;
}

void DecodeLoop::OnLayerDone(int layer) {
  if (commands_.RunPending()) PublishLoad();
}

DecodeLoop::Call* DecodeLoop::Find(CallId id) {
  const auto found = calls_.find(id);
  return found == calls_.end() ? nullptr : found->second.get();
}

void DecodeLoop::HandleOpen(std::unique_ptr<Call> owned) {
  Call* call = owned.get();
  calls_.emplace(call->id, std::move(owned));
  for (uint32_t index = 0; index < call->request.params.n; ++index) {
    call->choices.push_back(
        std::make_unique<Choice>(call->request, index, tokenizer_, limits_.max_prompt_tokens));
  }
  const kv::BlockHasher hasher(options_.model_fingerprint, runner_.layout().format,
                               call->request.cache_salt, options_.block_hash_bits);
  call->prompt.emplace(call->request.prompt_ids, hasher, call->OrderOf(0));
  call->prompt->priority = call->request.priority;
  if (call->prefill_locally) {
    scheduler_.AddPrompt(&*call->prompt);
  } else {
    Reserve(call);
  }
}

void DecodeLoop::Reserve(Call* call) {
  if (reservations_ == nullptr)
    return End(call, absl::FailedPreconditionError("decode: no hand-over is set up"));
  if (const int waiting = scheduler_.num_preempted_waiting(); waiting > 0) {
    return End(call, absl::ResourceExhaustedError(absl::StrCat(
                         "kv reserve: preempted_sequences=", waiting, " wait for blocks")));
  }
  const int headroom = HeadroomBlocks(call->request, memory_.pool().num_blocks());
  const absl::StatusOr<worker::v1::Handoff> handoff =
      reservations_->Reserve(call->id, &*call->prompt, headroom, scheduler_.num_running());
  if (!handoff.ok()) return End(call, handoff.status());
  call->reservation = handoff->reservation_id();
  DecodeResponse response;
  DecodeResponse::Reserved* reserved = response.mutable_reserved();
  *reserved->mutable_handoff() = *handoff;
  reserved->set_first_missing_block(static_cast<uint32_t>(call->prompt->blocks.size()));
  for (const kv::BlockId block : reservations_->blocks(*call->reservation)) {
    reserved->add_block_table(static_cast<uint32_t>(block));
  }
  call->done.set_cached_prompt_tokens(static_cast<uint32_t>(call->prompt->num_cached));
  if (draft_intake_ != nullptr) {
    if (std::optional<worker::v1::DraftHandoff> draft =
            draft_intake_->Reserve(call->id, *call->prompt)) {
      *reserved->mutable_draft() = *std::move(draft);
    }
  }
  call->sink->Send(std::move(response));
}

void DecodeLoop::HandleCancel(CallId id, absl::Status status, absl::Duration asked_at) {
  Call* call = Find(id);
  if (call == nullptr || call->ended) return;
  call->abort_asked_at = asked_at;
  if (call->reservation && absl::IsDeadlineExceeded(status))
    metrics_.reservations_expired.Increment();
  End(call, std::move(status));
}

void DecodeLoop::HandleReceiverEvent(const ReceiverEvent& event) {
  if (const std::optional<ReservationTable::Quiet> quiet =
          reservations_->EndQuarantine(event.reservation_id)) {
    metrics_.quarantine.Observe(absl::ToDoubleSeconds(quiet->quarantined));
    metrics_.abort_to_free.Observe(absl::ToDoubleSeconds(quiet->since_asked));
    return;
  }
  const std::optional<CallId> id = reservations_->Find(event.reservation_id);
  if (!id) return;
  Call* call = Find(*id);
  if (event.kind == ReceiverEvent::Kind::kLanded) {
    HandleLanded(call, event);
    return;
  }
  metrics_.OnTransferFailed(event.transport, event.status);
  reservations_->Drop(event.reservation_id);
  call->reservation.reset();
  End(call, process::WithErrorInfo(event.status.ok()
                                       ? absl::UnavailableError("kv transfer: ended by the peer")
                                       : Annotate(event.status, "kv transfer"),
                                   process::kPeerFailed, {}));
}

void DecodeLoop::HandleLanded(Call* call, const ReceiverEvent& event) {
  metrics_.OnTransfer(event.transport, /*send=*/false, event.arrival, event.bytes);
  metrics_.exposed.Observe(absl::ToDoubleSeconds(event.exposed));
  metrics_.prompt_cached.Increment(call->prompt->num_cached);
  metrics_.prompt_transferred.Increment(call->prompt->num_tokens() - call->prompt->num_cached);
  const absl::Status landed = reservations_->Land(event, &*call->prompt);
  call->reservation.reset();
  if (!landed.ok()) return End(call, Annotate(landed, "kv to the device"));
  call->done.set_kv_bytes(event.bytes);
  call->done.set_kv_transport(event.transport);
  call->done.set_handover_exposed_s(absl::ToDoubleSeconds(event.exposed));
  call->running_since = call->times.first_step = call->times.first_token = clock_.Now();
  if (event.first_tokens.size() != call->choices.size()) {
    return End(call,
               absl::DataLossError(absl::StrCat("commit: first_tokens=", event.first_tokens.size(),
                                                " choices=", call->choices.size())));
  }
  for (const worker::v1::Token& token : event.first_tokens) {
    Choice* choice =
        token.choice() < call->choices.size() ? call->choices[token.choice()].get() : nullptr;
    if (choice == nullptr || token.position() != choice->answer.position() ||
        choice->last_token != absl::ZeroDuration() ||
        token.id() >= static_cast<uint32_t>(limits_.vocab_size)) {
      return End(call,
                 absl::DataLossError("commit: a first token has a wrong choice, position or id"));
    }
    // The prefill worker has sent it to the router already.
    choice->first_id = token.id();
    choice->answer.Accept(token.id());
    choice->last_token = call->running_since;
  }
  Fork(call);
  Flush(call);
}

void DecodeLoop::End(Call* call, absl::Status status) {
  BATON_CHECK(!call->ended);
  call->ended = true;
  call->aborted = !status.ok();
  call->ended_at = clock_.Now();
  if (call->abort_asked_at == absl::ZeroDuration()) call->abort_asked_at = call->ended_at;
  int generated = 0;
  for (const auto& choice : call->choices) {
    generated += static_cast<int>(choice->answer.num_output()) - call->request.resumed_tokens;
  }
  metrics_.OnRequestEnd(status, call->choices.front()->answer.finish().reason, call->times,
                        call->ended_at, call->request.prompt_tokens(), generated,
                        call->request.params.max_tokens);
  call->sink->Finish(std::move(status));
  Release(call);
}

void DecodeLoop::ReleaseSequence(runtime::Sequence* sequence) {
  scheduler_.Remove(sequence);
  speculator_.Forget(sequence->order);
  memory_.Release(sequence);
}

void DecodeLoop::Release(Call* call) {
  if (draft_intake_ != nullptr) draft_intake_->Cancel(call->id);
  bool quarantined = false;  // then EndQuarantine is the end of it
  if (call->reservation) {
    quarantined = reservations_->Revoke(*call->reservation, "request ended", call->abort_asked_at);
    call->reservation.reset();
  }
  bool in_step = call->prompt_in_step;
  if (call->prompt && !call->prompt_in_step) {
    ReleaseSequence(&*call->prompt);
    call->prompt.reset();
  }
  for (const auto& choice : call->choices) {
    in_step |= choice->in_step;
    if (!choice->sequence || choice->in_step) continue;
    ReleaseSequence(&*choice->sequence);
    choice->sequence.reset();
  }
  if (in_step) return;  // FinishStep comes back to it
  if (call->aborted && !quarantined)
    metrics_.abort_to_free.Observe(absl::ToDoubleSeconds(clock_.Now() - call->abort_asked_at));
  calls_.erase(call->id);
  num_calls_.fetch_sub(1);
}

void DecodeLoop::PublishLoad() {
  worker::v1::WorkerLoad load = worker::LoadOf(memory_.pool());
  const int promised = reservations_ == nullptr ? 0 : reservations_->num_promised();
  const int running_calls =
      static_cast<int>(std::count_if(calls_.begin(), calls_.end(), [](const auto& entry) {
        return !entry.second->ended && entry.second->times.first_step != absl::ZeroDuration();
      }));
  const int open_calls = static_cast<int>(std::count_if(
      calls_.begin(), calls_.end(), [](const auto& entry) { return !entry.second->ended; }));
  load.set_requests_running(static_cast<uint32_t>(running_calls));
  load.set_requests_waiting(static_cast<uint32_t>(open_calls - running_calls));
  load.set_queue_tokens(static_cast<uint64_t>(scheduler_.queue_tokens()));
  metrics_.SetLoad(load, 0, static_cast<uint32_t>(scheduler_.num_waiting()),
                   static_cast<uint32_t>(promised));
  metrics_.SetTransfers(promised, 0, promised);
  const kv::PrefixCache& cache = memory_.cache();
  metrics_.cache_queries.Increment(static_cast<double>(
      cache.query_tokens() - std::exchange(counted_queries_, cache.query_tokens())));
  metrics_.cache_hits.Increment(
      static_cast<double>(cache.hit_tokens() - std::exchange(counted_hits_, cache.hit_tokens())));
  metrics_.cache_evictions.Increment(static_cast<double>(
      cache.evictions() - std::exchange(counted_evictions_, cache.evictions())));
  if (draft_intake_ != nullptr) {
    const int64_t landed = draft_intake_->landed_tokens();
    metrics_.draft_prompt_transferred.Increment(
        static_cast<double>(landed - std::exchange(counted_draft_tokens_, landed)));
  }
  metrics_.preemptions.Increment(static_cast<double>(
      scheduler_.preemptions() - std::exchange(counted_preemptions_, scheduler_.preemptions())));
  metrics_.CountSaturated(runner_.saturated_samples(), &counted_saturated_);
  base::MutexLock lock(&load_mutex_);
  load_ = std::move(load);
}

worker::v1::WorkerLoad DecodeLoop::load() const {
  base::MutexLock lock(&load_mutex_);
  return load_;
}

}  // namespace baton::decode
