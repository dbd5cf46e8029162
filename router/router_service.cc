#include "router/router_service.h"

#include <algorithm>
#include <utility>

#include <openssl/rand.h>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "baton/v1/generation.grpc.pb.h"

#include "engine/base/log.h"
#include "engine/base/version.h"
#include "engine/process/grpc_status.h"
#include "router/client_sinks.h"
#include "router/request_check.h"

namespace baton::router {
namespace {

constexpr char kRequestIdKey[] = "x-request-id";
constexpr char kRequestLabelKey[] = "x-request-label";
constexpr char kAuthorizationKey[] = "authorization";
constexpr char kTraceKey[] = "traceparent";
constexpr char kFairnessKey[] = "x-llm-d-inference-fairness-id";  // who shares fairly with whom
constexpr size_t kMaxEchoBytes = 256;
// Longest text that Tokenize takes. It is encoded within seconds, off gRPC's threads.
constexpr size_t kMaxTokenizeBytes = size_t{4} << 20;
// A client whose deadline passes cancels by itself, a little before the server's clock says so (the
// deadline travels as what is left of it): up to this much, and never more than half of its time.
constexpr absl::Duration kDeadlineSlack = absl::Seconds(1);

// Unguessable and unique: what identifies a request, whatever its client calls it.
std::string NewRequestId() {
  unsigned char bytes[16];
  if (RAND_bytes(bytes, sizeof(bytes)) != 1)
    return absl::StrCat("req-", absl::ToUnixNanos(absl::Now()));
  return absl::StrCat("req-", absl::BytesToHexString(absl::string_view(
                                  reinterpret_cast<const char*>(bytes), sizeof(bytes))));
}

bool IsEchoable(absl::string_view value) {
  return !value.empty() && value.size() <= kMaxEchoBytes &&
         std::all_of(value.begin(), value.end(), [](char c) { return absl::ascii_isprint(c); });
}

// The client's x-request-id and label go back to it; without an id it gets ours.
void EchoNames(grpc::CallbackServerContext* context,
               const std::string& label,
               const std::string& request_id) {
  const auto found = context->client_metadata().find(kRequestIdKey);
  std::string echoed = request_id;
  if (found != context->client_metadata().end()) {
    const absl::string_view value(found->second.data(), found->second.size());
    if (IsEchoable(value)) echoed = std::string(value);
  }
  context->AddInitialMetadata(kRequestIdKey, echoed);
  if (IsEchoable(label)) context->AddInitialMetadata(kRequestLabelKey, label);
}

// The client's trace, with a span of ours in it.
TraceContext TraceOf(grpc::CallbackServerContext* context) {
  const auto found = context->client_metadata().find(kTraceKey);
  if (found == context->client_metadata().end()) return {};
  unsigned char span[8] = {1};
  RAND_bytes(span, sizeof(span));
  return ParseTraceparent(
      absl::string_view(found->second.data(), found->second.size()),
      absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(span), sizeof(span))));
}

// Without a name of its own a client is told from others by the salt of its prefix cache.
std::string TenantOf(const grpc::CallbackServerContext& context,
                     const v1::GenerateRequest& request) {
  const auto found = context.client_metadata().find(kFairnessKey);
  if (found == context.client_metadata().end()) return request.cache_salt();
  return std::string(found->second.data(), std::min(found->second.size(), kMaxEchoBytes));
}

std::string StateName(WorkerHealth health) { return std::string(WorkerHealthName(health)); }

const char* BreakerName(BreakerState state) {
  switch (state) {
    case BreakerState::kClosed:
      return "closed";
    case BreakerState::kHalfOpen:
      return "half_open";
    case BreakerState::kOpen:
      return "open";
  }
  return "closed";
}

void CopyWorker(const WorkerTable::Row& row, v1::GetStatusResponse::Worker* out) {
  const worker::v1::WorkerStatus& status = row.status;
  out->set_address(row.address);
  out->set_role(std::string(WorkerRoleName(row.role)));
  out->set_state(StateName(row.health));
  out->set_requests_running(status.load().requests_running());
  out->set_requests_waiting(status.load().requests_waiting());
  out->set_queue_tokens(status.load().queue_tokens());
  out->set_kv_blocks_total(status.load().kv_blocks_total());
  out->set_kv_blocks_free(status.load().kv_blocks_free());
  out->set_kv_blocks_cached(status.load().kv_blocks_cached());
  out->set_kv_blocks_reserved(status.load().kv_blocks_reserved());
  out->set_kv_blocks_quarantined(status.load().kv_blocks_quarantined());
  out->set_kv_dtype(status.fingerprint().kv_dtype());
  out->set_weight_dtype(status.fingerprint().weight_dtype());
  out->set_device(status.device());
  out->set_incarnation(absl::BytesToHexString(status.incarnation()));
  out->set_breaker(BreakerName(row.breaker));
  out->set_requests_sent(row.requests_sent);
  out->set_predicted_wait_s(row.wait_s);
  if (row.ttft.num_samples() > 0) {
    const TtftCoefficients& ttft = row.ttft.coefficients();
    out->set_ttft_base_s(ttft.base_s);
    out->set_ttft_per_token_s(ttft.per_token_s);
    out->set_ttft_per_token2_s(ttft.per_token2_s);
    out->set_ttft_samples(row.ttft.num_samples());
    out->set_ttft_error_s(row.ttft.mean_abs_error_s());
  }
  out->set_prefix_blocks(row.blocks_known);
  for (const worker::v1::WorkerStatus::Peer& peer : status.peers()) {
    v1::GetStatusResponse::Peer* copy = out->add_peers();
    copy->set_address(peer.address());
    copy->set_transport(peer.transport());
    copy->set_probe_bytes_per_second(peer.probe_bytes_per_second());
  }
}

}  // namespace

struct RouterService::Impl : public v1::Generation::CallbackService {
 public:
  explicit Impl(RouterServiceOptions options) : options_(std::move(options)) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override {
    auto reactor = std::make_shared<StreamReactor>(context, options_.client_buffer_tokens);
    const std::string id = NewRequestId();
    StartCall(context, *request, "generate", id, reactor.get(),
              std::make_unique<StreamSink>(reactor));
    return reactor.get();
  }

  grpc::ServerUnaryReactor* GenerateUnary(grpc::CallbackServerContext* context,
                                          const v1::GenerateRequest* request,
                                          v1::GenerateUnaryResponse* response) override {
    auto reactor = std::make_shared<UnaryReactor>(context);
    const std::string id = NewRequestId();
    StartCall(context, *request, "generate_unary", id, reactor.get(),
              std::make_unique<UnarySink>(reactor, id, response));
    return reactor.get();
  }

  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override {
    if (auto* const refused = Refuse(context, CallCost::kRequest)) return refused;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    auto wanted = std::make_shared<v1::GenerateRequest>();
    if (request->has_chat()) {
      *wanted->mutable_chat() = request->chat();
    } else {
      wanted->set_text(request->text());
      wanted->set_parse_special(request->parse_special());
    }
    options_.deps.encoder->Encode(
        wanted, kMaxTokenizeBytes, [reactor, response](absl::StatusOr<EncodedPrompt> prompt) {
          if (prompt.ok()) {
            response->mutable_ids()->Add(prompt->ids.begin(), prompt->ids.end());
            response->set_prompt(std::move(prompt->text));
          }
          reactor->Finish(process::ToGrpcStatus(prompt.status()));
        });
    return reactor;
  }

  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override {
    if (auto* const refused = Refuse(context, CallCost::kRequest)) return refused;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const text::Tokenizer* tokenizer = options_.deps.facts->tokenizer.get();
    const uint32_t vocab_size = options_.deps.facts->config.vocab_size;
    const bool queued =
        options_.encoder_pool->Run([reactor, request, response, tokenizer, vocab_size] {
          const auto bad = std::find_if(request->ids().begin(), request->ids().end(),
                                        [vocab_size](uint32_t id) { return id >= vocab_size; });
          if (bad != request->ids().end()) {
            reactor->Finish(process::ToGrpcStatus(process::FieldViolation(
                "ids", absl::StrCat(*bad, " is not below vocab_size=", vocab_size))));
            return;
          }
          const std::vector<uint32_t> ids(request->ids().begin(), request->ids().end());
          response->set_text(tokenizer->Decode(ids, request->skip_special()));
          reactor->Finish(grpc::Status::OK);
        });
    if (!queued)
      reactor->Finish(
          process::ToGrpcStatus(absl::ResourceExhaustedError("too much waits to be decoded")));
    return reactor;
  }

  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* context,
                                         const v1::GetModelInfoRequest*,
                                         v1::GetModelInfoResponse* response) override {
    if (auto* const refused = Refuse(context, CallCost::kNothing)) return refused;
    const ModelFacts& facts = *options_.deps.facts;
    response->set_name(facts.name);
    response->set_architecture(facts.config.architecture);
    response->set_vocab_size(facts.config.vocab_size);
    uint32_t max_model_len = options_.deps.table->max_model_len();
    if (options_.deps.max_model_len > 0)
      max_model_len = std::min(max_model_len, options_.deps.max_model_len);
    response->set_max_model_len(max_model_len);
    for (const uint32_t id : facts.config.eos_ids) response->add_eos_token_ids(id);
    if (facts.chat.has_value()) response->set_chat_template(std::string(facts.chat->name()));
    for (const WorkerTable::Row& row : options_.deps.table->Rows()) {
      if (row.health != WorkerHealth::kReady) continue;
      response->set_weight_dtype(row.status.fingerprint().weight_dtype());
      response->set_kv_dtype(row.status.fingerprint().kv_dtype());
    }
    *response->mutable_defaults() = DefaultSampling(facts.config);
    return FinishOk(context);
  }

  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest*,
                                       v1::ListModelsResponse* response) override {
    if (auto* const refused = Refuse(context, CallCost::kNothing)) return refused;
    response->add_names(options_.deps.facts->name);
    return FinishOk(context);
  }

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    if (auto* const refused = Refuse(context, CallCost::kNothing)) return refused;
    FillStatus(response);
    return FinishOk(context);
  }

  void FillStatus(v1::GetStatusResponse* response) const {
    response->set_version(base::kVersion);
    response->set_topology(options_.deps.topology == Topology::kPd ? "pd" : "single");
    response->set_requests_in_flight(
        static_cast<uint32_t>(options_.deps.metrics->in_flight.value()));
    response->set_requests_queued(static_cast<uint32_t>(options_.deps.admission->num_waiting()));
    response->set_serving(!options_.draining() && options_.deps.table->Usable().ok());
    for (const WorkerTable::Row& row : options_.deps.table->Rows())
      CopyWorker(row, response->add_workers());
  }

 private:
  static grpc::ServerUnaryReactor* FinishOk(grpc::CallbackServerContext* context) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  // Without tokens everybody is one nameless caller.
  absl::StatusOr<TokenGate::Caller> Enter(const grpc::CallbackServerContext& context,
                                          CallCost cost) {
    if (options_.tokens == nullptr) return TokenGate::Caller();
    const auto found = context.client_metadata().find(kAuthorizationKey);
    if (found == context.client_metadata().end()) return options_.tokens->Enter("", cost);
    return options_.tokens->Enter(absl::string_view(found->second.data(), found->second.size()),
                                  cost);
  }

  // The reactor of a call whose token does not let it pass, finished; null when it may.
  grpc::ServerUnaryReactor* Refuse(grpc::CallbackServerContext* context, CallCost cost) {
    const absl::Status status = Enter(*context, cost).status();
    if (status.ok()) return nullptr;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(process::ToGrpcStatus(status));
    return reactor;
  }

  // Why a request is not even looked at, and what metrics call that; OK and "" otherwise.
  std::pair<absl::Status, const char*> Refusal(const v1::GenerateRequest& request,
                                               const absl::Status& entered) const {
    if (!entered.ok())
      return {entered, absl::IsUnauthenticated(entered) ? "unauthenticated" : "token_limit"};
    if (options_.draining()) {
      return {process::WithRetryInfo(absl::UnavailableError("this router is shutting down"),
                                     kRetryDelay),
              "draining"};
    }
    if (!request.model().empty() && request.model() != options_.deps.facts->name) {
      return {absl::NotFoundError(absl::StrCat(
                  "model \"", absl::CHexEscape(request.model().substr(0, kMaxEchoBytes)),
                  "\" is not served here; \"", options_.deps.facts->name, "\" is")),
              "unknown_model"};
    }
    return {absl::OkStatus(), ""};
  }

  template <typename Reactor>
  void StartCall(grpc::CallbackServerContext* context,
                 const v1::GenerateRequest& request,
                 std::string method,
                 const std::string& id,
                 Reactor* reactor,
                 std::unique_ptr<ClientSink> sink) {
    EchoNames(context, request.request_label(), id);
    const absl::Time now = absl::Now();
    const absl::Time client_deadline = absl::FromChrono(context->deadline());
    const absl::Duration budget = std::min(client_deadline - now, options_.request_timeout_max);
    CallRequest call_request;
    call_request.request = std::make_shared<const v1::GenerateRequest>(request);
    call_request.request_id = id;
    call_request.method = std::move(method);
    absl::StatusOr<TokenGate::Caller> caller = Enter(*context, CallCost::kAnswer);
    if (options_.tokens == nullptr) {
      call_request.tenant = TenantOf(*context, request);
    } else if (caller.ok()) {
      call_request.tenant = caller->tenant;  // not what the client says it is
      call_request.cache_salt = TenantSalt(caller->tenant, request.cache_salt());
    }
    call_request.received = options_.deps.clock->Now();
    call_request.deadline = call_request.received + budget;
    call_request.trace = TraceOf(context);
    if (!call_request.trace.trace_id.empty())
      context->AddInitialMetadata(kTraceKey, call_request.trace.Header());
    auto call =
        std::make_shared<GenerateCall>(options_.deps, std::move(call_request), std::move(sink));
    reactor->Bind(call, client_deadline, std::min(kDeadlineSlack, (client_deadline - now) / 2),
                  caller.ok() ? std::move(caller->place) : nullptr);
    auto [refusal, reason] = Refusal(request, caller.status());
    call->Start(std::move(refusal), reason);
  }

  const RouterServiceOptions options_;
};

RouterService::RouterService(RouterServiceOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
RouterService::~RouterService() = default;
grpc::Service* RouterService::service() { return impl_.get(); }
void RouterService::FillStatus(v1::GetStatusResponse* response) const {
  impl_->FillStatus(response);
}

}  // namespace baton::router
