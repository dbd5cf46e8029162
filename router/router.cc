#include "router/router.h"

#include <atomic>
#include <random>
#include <utility>

#include <openssl/rand.h>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/version.h"
#include "router/discovery.h"
#include "router/grpc_legs.h"
#include "router/live_page.h"
#include "router/router_service.h"

namespace baton::router {
namespace {

uint64_t DrawSeed() {
  uint64_t seed = 0;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(&seed), sizeof(seed)) == 1) return seed;
  return std::random_device()();
}

WorkerTableOptions TableOptions(const RouterOptions& options,
                                const ResolvedOptions& resolved,
                                const ModelFacts& facts,
                                base::Metrics* metrics) {
  WorkerTableOptions out;
  out.topology = resolved.topology;
  out.prefill = resolved.prefill;
  out.decode = resolved.decode;
  out.heartbeat_timeout = options.heartbeat_timeout;
  out.down_timeout = options.down_timeout;
  out.prefill_queue_tokens = static_cast<uint64_t>(options.prefill_queue_tokens);
  out.tokenizer_fingerprint = facts.tokenizer->fingerprint();
  out.metrics = metrics;
  return out;
}

AdmissionOptions AdmissionOptionsOf(const RouterOptions& options, base::Metrics* metrics) {
  AdmissionOptions out;
  out.max_running = options.max_concurrent;
  out.max_queue = options.max_queue;
  out.long_prompt_tokens = static_cast<uint32_t>(options.long_prompt_tokens);
  out.refuse_late = options.refuse_late;
  out.queue_depth = {metrics->gauge(base::GaugeId::kRouterQueueDepth, "high"),
                     metrics->gauge(base::GaugeId::kRouterQueueDepth, "normal"),
                     metrics->gauge(base::GaugeId::kRouterQueueDepth, "low")};
  return out;
}

absl::Duration OrNever(absl::Duration limit) {
  return limit > absl::ZeroDuration() ? limit : absl::InfiniteDuration();
}

}  // namespace

// Members are used by those below them, and go in the reverse order.
struct Router::Impl {
  Impl(const RouterOptions& options,
       const ResolvedOptions& resolved,
       ModelFacts model,
       std::unique_ptr<RoutePolicy> route_policy,
       std::unique_ptr<TokenGate> token_gate,
       std::string page_token)
      : facts(std::move(model)),
        metrics(base::Metrics::Create(base::Role::kRouter, facts.name)),
        router_metrics(metrics.get()),
        tokens(std::move(token_gate)),
        page({.read_only = options.page != "full",
              .token = std::move(page_token),
              .tokens = tokens.get()}),
        table(TableOptions(options, resolved, facts, metrics.get())),
        channels(process::MakeChannelSecurity(options.tls.client)),
        policy(std::move(route_policy)),
        admission(
            AdmissionOptionsOf(options, metrics.get()), policy.get(), &table, &timers, &clock),
        encoder(&facts,
                options.encoder_threads,
                static_cast<size_t>(options.max_concurrent + options.max_queue)),
        legs(&channels, &clock),
        service(ServiceOptions(options, resolved)) {
    metrics->gauge(base::GaugeId::kBuildInfo, {base::kVersion, base::kCommit, "none", "none"})
        .Set(1);
  }

  RouterServiceOptions ServiceOptions(const RouterOptions& options,
                                      const ResolvedOptions& resolved) {
    RouterServiceOptions out;
    out.deps.facts = &facts;
    out.deps.table = &table;
    out.deps.legs = &legs;
    out.deps.encoder = &encoder;
    out.deps.admission = &admission;
    out.deps.timers = &timers;
    out.deps.clock = &clock;
    out.deps.metrics = &router_metrics;
    out.deps.draw_seed = &DrawSeed;
    out.deps.topology = resolved.topology;
    out.deps.on_end = [this](const RequestReport& report) { page.Note(report); };
    out.deps.max_model_len = static_cast<uint32_t>(options.max_model_len);
    out.deps.ttft_max = OrNever(options.ttft_max);
    out.deps.slo_ttft = OrNever(options.slo_ttft);
    out.deps.slo_tpot = OrNever(options.slo_tpot);
    out.encoder_pool = &encoder;
    out.request_timeout_max = options.request_timeout_max;
    out.client_buffer_tokens = static_cast<size_t>(options.client_buffer);
    out.tokens = tokens.get();
    out.draining = [this] {
      const process::ServerProcess* server = server_ptr.load();
      return server != nullptr && server->draining();
    };
    return out;
  }

  void UpdateReady() {
    base::MutexLock lock(&ready_mutex);  // the last change decides, whichever thread reports it
    server->SetReady(table.Usable().ok());
  }

  void StartDiscovery(const std::vector<ServiceName>& names, absl::Duration interval) {
    if (names.empty()) return;
    Discovery::Callbacks callbacks;
    callbacks.found = [this](WorkerRole role, const std::string& address) {
      watch->Watch(role, address);
    };
    callbacks.gone = [this](const std::string& address) { watch->Unwatch(address); };
    callbacks.alive = [this](const std::string& address) { return table.IsAlive(address); };
    discovery = std::make_unique<DiscoveryThread>(
        Discovery(names, &ResolveByDns, std::move(callbacks)), interval);
  }

  const base::Clock& clock = base::Clock::Real();
  const ModelFacts facts;
  const std::unique_ptr<base::Metrics> metrics;
  const RouterMetrics router_metrics;
  const std::unique_ptr<TokenGate> tokens;  // null: everybody may call
  LivePage page;
  WorkerTable table;
  WorkerChannels channels;
  const std::unique_ptr<RoutePolicy> policy;
  ThreadTimers timers;
  Admission admission;
  EncoderPool encoder;
  GrpcLegFactory legs;
  std::atomic<process::ServerProcess*> server_ptr{
      nullptr};  // calls may come before Start has returned it
  RouterService service;
  base::Mutex ready_mutex;
  std::unique_ptr<process::ServerProcess> server;
  std::unique_ptr<WorkerWatch> watch;
  std::unique_ptr<DiscoveryThread> discovery;
};

absl::StatusOr<std::unique_ptr<Router>> Router::Start(const RouterOptions& options,
                                                      bool handle_signals) {
  BATON_ASSIGN_OR_RETURN(ResolvedOptions resolved, ResolveOptions(options));
  resolved.server.handle_signals = handle_signals;
  BATON_ASSIGN_OR_RETURN(ModelFacts facts, LoadModelFacts(options.model, options.served_model_name,
                                                          options.chat_template));
  BATON_LOG(Info, "model", LogField("name", facts.name),
            LogField("vocab_size", facts.config.vocab_size),
            LogField("chat_template", facts.chat.has_value() ? facts.chat->name() : "none"));
  BATON_ASSIGN_OR_RETURN(std::string page_token, ReadPageToken(options.page_token_file));
  std::unique_ptr<TokenGate> tokens;
  if (!options.token_file.empty()) {
    BATON_ASSIGN_OR_RETURN(tokens, TokenGate::Create({.path = options.token_file}));
  }
  RoutePolicyOptions policy_options;
  policy_options.local_prefill_tokens = static_cast<uint32_t>(options.local_prefill_tokens);
  policy_options.long_prompt_share = options.long_prompt_share;
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<RoutePolicy> policy,
                         MakeRoutePolicy(options.policy, policy_options));
  auto impl = std::make_unique<Impl>(options, resolved, std::move(facts), std::move(policy),
                                     std::move(tokens), std::move(page_token));
  if (options.page != "off") {
    resolved.server.routes = impl->page.Routes(
        [impl = impl.get()](v1::GetStatusResponse* status) { impl->service.FillStatus(status); });
  }
  BATON_ASSIGN_OR_RETURN(impl->server,
                         process::ServerProcess::Start(resolved.server, impl->metrics.get(),
                                                       {impl->service.service()}));
  impl->server_ptr.store(impl->server.get());
  impl->page.SetChannel(impl->server->InProcessChannel());
  impl->table.set_on_change([impl = impl.get()] { impl->UpdateReady(); });
  impl->table.set_on_capacity([impl = impl.get()] { impl->admission.Pump(); });
  impl->watch =
      std::make_unique<WorkerWatch>(&impl->channels, &impl->timers, &impl->clock, &impl->table);
  for (const std::string& address : resolved.prefill)
    impl->watch->Watch(WorkerRole::kPrefill, address);
  for (const std::string& address : resolved.decode)
    impl->watch->Watch(WorkerRole::kDecode, address);
  impl->StartDiscovery(resolved.names, options.dns_interval);
  return std::unique_ptr<Router>(new Router(std::move(impl)));
}

Router::Router(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Router::~Router() { Stop(); }

process::ServerProcess& Router::server() { return *impl_->server; }
base::Metrics& Router::metrics() { return *impl_->metrics; }

void Router::RunUntilTerminated() {
  impl_->server->WaitForTermination();
  impl_->server->Drain(nullptr);
  Stop();
}

void Router::Stop() {
  impl_->server->Stop();
  impl_->discovery.reset();
  impl_->watch.reset();
}

}  // namespace baton::router
