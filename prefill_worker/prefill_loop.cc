#include "prefill_worker/prefill_loop.h"

#include <algorithm>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "worker/convert.h"

namespace baton::prefill {
namespace {

using worker::v1::PrefillResponse;

// Timeouts are looked at at least this often.
constexpr absl::Duration kPollInterval = absl::Milliseconds(50);

}  // namespace

struct PrefillLoop::Call {
  Call(CallId call_id,
       runtime::EngineRequest engine_request,
       bool handoff,
       std::shared_ptr<PrefillSink> call_sink)
      : id(call_id),
        request(std::move(engine_request)),
        needs_handoff(handoff),
        sink(std::move(call_sink)) {}

  const CallId id;
  const runtime::EngineRequest request;
  const bool needs_handoff;
  const std::shared_ptr<PrefillSink> sink;  // shared with the gRPC call, which may end first

  std::optional<runtime::Sequence> sequence;
  std::vector<runtime::Answer> answers;
  std::vector<worker::v1::Token> first_tokens;  // for the Commit
  std::optional<Ticket> ticket;
  worker::RequestTimes times;
  absl::Duration computed_at;  // when the prompt was complete
  absl::Duration append;
  absl::Duration ended_at;
  bool in_step = false;   // the running step reads its tokens and block table
  bool computed = false;  // first tokens have been sent
  bool ended = false;     // the sink is finished
  bool aborted = false;   // with an error
};

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
      sampler_(runner.config().vocab, static_cast<int>(tokenizer.vocab_size())),
      batch_(options.max_sequences),
      shipper_(runner.layout().num_layers),
      row_(runner.config().vocab) {
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
  commands_.Post([this, call, status = std::move(status)] { HandleCancel(call, status); });
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
  for (Call* call : open) End(call, absl::UnavailableError("prefill: worker stops"));
}

bool PrefillLoop::RunOnce(absl::Duration idle_wait) {
  if (scheduler_.empty()) {
    commands_.RunPendingFor(idle_wait);
  } else {
    commands_.RunPending();
  }
  CheckTimeouts();
  scheduler_.Plan(options_.chunk_tokens, options_.max_sequences, 0, &chunks_);
  const bool work = !chunks_.empty();
  if (work) {
    RunStep();
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
    End(call, Annotate(sender.status(), "peer"));
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
  End(call, Annotate(result.status, "kv transfer"));
}

void PrefillLoop::HandleCancel(CallId id, absl::Status status) {
  Call* call = Find(id);
  if (call != nullptr && !call->ended) End(call, std::move(status));
}

void PrefillLoop::RunStep() {
  batch_.Clear();
  shipper_.BeginStep();
  const absl::Duration start = clock_.Now();
  step_calls_.clear();
  for (const runtime::PrefillChunk& chunk : chunks_) {
    Call* call = Find(chunk.sequence->order);
    step_calls_.push_back(call);
    call->in_step = true;
    if (call->times.first_step == absl::ZeroDuration()) call->times.first_step = start;
    batch_.Add(*chunk.sequence, chunk.num_tokens, chunk.last);
    shipper_.AddChunk(call->id, *chunk.sequence, chunk.num_tokens);
  }
  if (options_.test_step_delay > absl::ZeroDuration()) absl::SleepFor(options_.test_step_delay);
  absl::Span<float> logits;
  runtime::StepTimings timings;
  in_step_ = true;
  const absl::Status status = runner_.Step(batch_.parts(), this, &logits, &timings);
  in_step_ = false;
  shipper_.EndStep();
  metrics_.OnStep(worker::StepPhase::kPrefill, batch_.num_tokens(), clock_.Now() - start);
  if (status.ok()) {
    FinishChunks(logits, timings);
  } else {
    FailStep(status);
  }
  gone_.clear();
}

void PrefillLoop::FailStep(const absl::Status& status) {
  BATON_LOG(Error, "step failed ", LogField("status", status.ToString()));
  for (Call* call : step_calls_) {
    call->in_step = false;
    if (!call->ended) End(call, absl::InternalError("prefill: step failed"));
  }
}

void PrefillLoop::FinishChunks(absl::Span<float> logits, const runtime::StepTimings& timings) {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const runtime::PrefillChunk& chunk = chunks_[i];
    Call* call = step_calls_[i];
    call->in_step = false;
    const absl::Span<float> row = chunk.last ? logits.first(row_.size()) : absl::Span<float>();
    logits.remove_prefix(row.size());
    if (call->ended) continue;
    call->append += timings.append;
    metrics_.prompt_computed.Increment(chunk.num_tokens);
    scheduler_.Finish(chunk);
    if (chunk.last) FinishPrompt(call, row);
  }
}

void PrefillLoop::FinishPrompt(Call* call, absl::Span<float> logits) {
  absl::StatusOr<PrefillResponse> response = DrawFirstTokens(call, logits);
  if (!response.ok()) {
    metrics_.nan_logits.Increment();
    BATON_LOG(Error, "first token failed ", LogField("request_id", call->request.request_id), " ",
              LogField("status", response.status().ToString()));
    End(call, response.status());
    return;
  }
  call->computed = true;
  call->computed_at = call->times.first_token = call->times.last_token = clock_.Now();
  metrics_.prompt_cached.Increment(call->sequence->num_cached);
  metrics_.generation_tokens.Increment(static_cast<double>(call->answers.size()));
  metrics_.time_to_first_token.Observe(
      absl::ToDoubleSeconds(call->times.first_token - call->times.arrived));
  metrics_.append.Observe(absl::ToDoubleSeconds(call->append));
  PrefillResponse::FirstTokens* first = response->mutable_first_tokens();
  first->set_cached_prompt_tokens(static_cast<uint32_t>(call->sequence->num_cached));
  first->set_queue_s(absl::ToDoubleSeconds(call->times.first_step - call->times.arrived));
  first->set_compute_s(absl::ToDoubleSeconds(call->times.first_token - call->times.first_step));
  first->set_append_s(absl::ToDoubleSeconds(call->append));
  call->first_tokens.assign(first->tokens().begin(), first->tokens().end());
  call->sink->Send(*std::move(response));
  const bool all_finished =
      std::all_of(call->answers.begin(), call->answers.end(),
                  [](const runtime::Answer& answer) { return answer.finished(); });
  if (all_finished || !call->needs_handoff) {
    PrefillResponse done;
    done.mutable_done();
    call->sink->Send(std::move(done));
    End(call, absl::OkStatus());
  } else if (shipper_.IsOpen(call->id)) {
    shipper_.Commit(call->id, std::move(call->first_tokens));
  }
}

absl::StatusOr<PrefillResponse> PrefillLoop::DrawFirstTokens(Call* call, absl::Span<float> logits) {
  PrefillResponse response;
  call->answers.reserve(call->request.params.n);
  for (uint32_t choice = 0; choice < call->request.params.n; ++choice) {
    runtime::Answer& answer =
        call->answers.emplace_back(call->request, choice, tokenizer_, runner_.max_model_len());
    const uint32_t position = answer.position();
    std::copy(logits.begin(), logits.end(), row_.begin());
    BATON_ASSIGN_OR_RETURN(const runtime::SampledToken token,
                           answer.Draw(&sampler_, absl::MakeSpan(row_)));
    *response.mutable_first_tokens()->add_tokens() = worker::TokenToProto(choice, position, token);
    if (answer.finished()) {
      *response.mutable_first_tokens()->add_finished() =
          worker::FinishToProto(choice, answer.finish());
    }
  }
  return response;
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
  const runtime::FinishReason reason =
      call->answers.empty() ? runtime::FinishReason::kNone : call->answers.front().finish().reason;
  // A prompt that was handed over has used up what this worker had to give: one token.
  metrics_.OnRequestEnd(
      status, reason == runtime::FinishReason::kNone ? runtime::FinishReason::kLength : reason,
      call->times, call->ended_at, call->request.prompt_tokens(),
      static_cast<int>(call->answers.size()), call->request.params.max_tokens);
  call->sink->Finish(std::move(status));
  scheduler_.Remove(&*call->sequence);
  shipper_.Abort(call->id, "request ended");
  ReleaseIfQuiet(call);
}

void PrefillLoop::ReleaseIfQuiet(Call* call) {
  if (shipper_.IsOpen(call->id)) return;
  // A running step still reads the block table, which stays as it is, and writes into the blocks.
  // They may be free in the books at once all the same: blocks are given out between steps only.
  memory_.pool().Release(call->sequence->blocks);
  if (call->aborted)
    metrics_.abort_to_free.Observe(absl::ToDoubleSeconds(clock_.Now() - call->ended_at));
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
  base::MutexLock lock(&load_mutex_);
  load_ = std::move(load);
}

worker::v1::WorkerLoad PrefillLoop::load() const {
  base::MutexLock lock(&load_mutex_);
  return load_;
}

}  // namespace baton::prefill
