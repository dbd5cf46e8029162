#include "engine/process/server_process.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <limits>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "grpcpp/channel.h"
#include "grpcpp/ext/channelz_service_plugin.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

#include "engine/base/log.h"
#include "engine/base/mutex.h"
#include "engine/base/status_macros.h"
#include "engine/base/version.h"
#include "engine/process/port_file.h"
#include "engine/process/server_interceptor.h"

namespace baton::process {
namespace {

// What is still to be written when everything has ended gets this long to leave.
constexpr absl::Duration kStopGrace = absl::Milliseconds(200);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);
constexpr absl::Duration kSignalPoll = absl::Milliseconds(50);

struct HostPort {
  std::string host;
  int port = 0;
};

absl::StatusOr<HostPort> ParseAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  HostPort out;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &out.port) || out.port < 0 || out.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("listen address \"", address, "\": want HOST:PORT"));
  }
  out.host = address.substr(0, colon);
  return out;
}

sigset_t TerminationSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

int Milliseconds(absl::Duration duration) {
  const int64_t ms = absl::ToInt64Milliseconds(duration);
  return ms > std::numeric_limits<int>::max() ? std::numeric_limits<int>::max()
                                              : static_cast<int>(ms);
}

// Limits and keepalive. gRPC's own default punishes a client that pings more often than each 5 min;
// proxies and balancers ping each 10 to 30 s, also while nothing is sent.
void SetChannelArguments(const ServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(options.max_message_bytes);
  builder->SetMaxSendMessageSize(options.max_message_bytes);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_concurrent_streams);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(options.keepalive_time));
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                              Milliseconds(options.keepalive_timeout));
  // Two servers must never share a port: half of the calls would go to the wrong one.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  if (options.max_connection_age != absl::InfiniteDuration()) {
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                                Milliseconds(options.max_connection_age));
    builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                                Milliseconds(options.max_connection_age_grace));
  }
  if (options.channelz) builder->AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 1);
}

}  // namespace

void BlockTerminationSignals() {
  const sigset_t set = TerminationSignals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

struct ServerProcess::Impl {
  ServerOptions options;
  base::Metrics* metrics = nullptr;
  std::string host;
  int grpc_port = 0;
  std::atomic<int> calls_in_flight{0};
  int health_port = -1;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<grpc::Server> health_server;  // null: none was asked for
  std::unique_ptr<Exposer> exposer;
  std::thread signal_thread;
  std::atomic<bool> stopping{false};

  base::Mutex mutex;
  base::CondVar changed;
  bool ready ABSL_GUARDED_BY(mutex) = false;
  bool was_ready ABSL_GUARDED_BY(mutex) = false;
  bool drained ABSL_GUARDED_BY(mutex) = false;  // health stays down from here on
  int terminations ABSL_GUARDED_BY(mutex) = 0;
  bool stopped ABSL_GUARDED_BY(mutex) = false;

  absl::Status StartGrpc(const std::vector<grpc::Service*>& services);
  absl::Status StartHealth();
  absl::Status StartHttp();
  void StartSignalThread();
  void OnSignal();
  // `open`: not draining.
  void PublishHealth(bool open, bool serving) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void SetHealth(const std::string& name, bool serving);
};

absl::Status ServerProcess::Impl::StartGrpc(const std::vector<grpc::Service*>& services) {
  BATON_ASSIGN_OR_RETURN(const HostPort address, ParseAddress(options.listen));
  BATON_RETURN_IF_ERROR(CheckTls(options.tls, options.listen));
  host = address.host;
  grpc::EnableDefaultHealthCheckService(true);
  if (options.reflection) grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  if (options.channelz) grpc::channelz::experimental::InitChannelzService();
  grpc::ServerBuilder builder;
  SetChannelArguments(options, &builder);
  builder.AddListeningPort(options.listen, MakeServerCredentials(options.tls), &grpc_port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(MakeServerInterceptorFactory(metrics, &calls_in_flight));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server = builder.BuildAndStart();
  if (server == nullptr || grpc_port == 0) {
    return absl::UnavailableError(absl::StrCat("grpc: cannot listen on ", options.listen));
  }
  return absl::OkStatus();
}

// Its only service is the health service that gRPC adds to every server.
absl::Status ServerProcess::Impl::StartHealth() {
  if (options.health_port >= 0) {
    grpc::ServerBuilder builder;
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.AddListeningPort(absl::StrCat(host, ":", options.health_port),
                             grpc::InsecureServerCredentials(), &health_port);
    health_server = builder.BuildAndStart();
    if (health_server == nullptr || health_port == 0) {
      return absl::UnavailableError(
          absl::StrCat("health: cannot listen on ", host, ":", options.health_port));
    }
  }
  base::MutexLock lock(&mutex);
  SetHealth("liveness", true);
  PublishHealth(true, false);
  return absl::OkStatus();
}

absl::Status ServerProcess::Impl::StartHttp() {
  if (options.http_port < 0) return absl::OkStatus();
  const std::string line = absl::StrCat(
      "baton ", base::RoleName(metrics->role()), " ", base::kVersion, ": gRPC on port ", grpc_port,
      "; see /metrics, /health (alive), /ready (serves requests)\n");
  Exposer::Pages pages;
  pages["/"] = [line] { return HttpPage{200, "text/plain; charset=utf-8", line}; };
  pages["/metrics"] = [this] {
    return HttpPage{200, "text/plain; version=0.0.4; charset=utf-8", metrics->Scrape()};
  };
  pages["/metrics/lite"] = [this] {
    return HttpPage{200, "text/plain; version=0.0.4; charset=utf-8", metrics->ScrapeLite()};
  };
  pages["/health"] = [] { return HttpPage{200, "text/plain; charset=utf-8", "ok\n"}; };
  pages["/ready"] = [this] {
    base::MutexLock lock(&mutex);
    return ready ? HttpPage{200, "text/plain; charset=utf-8", "ready\n"}
                 : HttpPage{503, "text/plain; charset=utf-8", "not ready\n"};
  };
  BATON_ASSIGN_OR_RETURN(exposer,
                         Exposer::Start(host, options.http_port, std::move(pages), options.routes));
  return absl::OkStatus();
}

void ServerProcess::Impl::PublishHealth(bool open, bool serving) {
  SetHealth("", open);
  SetHealth("readiness", serving);
  for (const std::string& name : options.health_services) SetHealth(name, serving);
}

void ServerProcess::Impl::SetHealth(const std::string& name, bool serving) {
  server->GetHealthCheckService()->SetServingStatus(name, serving);
  if (health_server != nullptr)
    health_server->GetHealthCheckService()->SetServingStatus(name, serving);
}

void ServerProcess::Impl::StartSignalThread() {
  signal_thread = std::thread([this] {
    const sigset_t set = TerminationSignals();
    const timespec poll = absl::ToTimespec(kSignalPoll);
    while (!stopping.load()) {
      if (sigtimedwait(&set, nullptr, &poll) > 0) OnSignal();
    }
  });
}

void ServerProcess::Impl::OnSignal() {
  base::MutexLock lock(&mutex);
  if (!was_ready && options.exit_while_loading) {
    BATON_LOG(Info, "terminated before it was ready");
    RemovePortFile(options.port_file);
    _exit(0);
  }
  ++terminations;
  changed.NotifyAll();
}

absl::StatusOr<std::unique_ptr<ServerProcess>> ServerProcess::Start(
    const ServerOptions& options,
    base::Metrics* metrics,
    const std::vector<grpc::Service*>& services) {
  // Debian's packages are built with it on: every lock inside gRPC would be entered into one graph.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  impl->metrics = metrics;
  std::unique_ptr<ServerProcess> process(new ServerProcess(std::move(impl)));
  BATON_RETURN_IF_ERROR(process->impl_->StartGrpc(services));
  BATON_RETURN_IF_ERROR(process->impl_->StartHealth());
  if (options.metrics_compat == "vllm") metrics->EnableVllmAliases();
  BATON_RETURN_IF_ERROR(process->impl_->StartHttp());
  BATON_RETURN_IF_ERROR(WritePortFile(options.port_file, process->grpc_port(), process->http_port(),
                                      process->health_port()));
  if (options.handle_signals) process->impl_->StartSignalThread();
  BATON_LOG(Info, "listening", LogField("grpc", process->grpc_address()),
            LogField("tls", TlsMode(options.tls)), LogField("http_port", process->http_port()));
  return process;
}

ServerProcess::ServerProcess(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ServerProcess::~ServerProcess() { Stop(); }

int ServerProcess::grpc_port() const { return impl_->grpc_port; }
int ServerProcess::http_port() const {
  return impl_->exposer == nullptr ? -1 : impl_->exposer->port();
}
int ServerProcess::health_port() const { return impl_->health_port; }
std::string ServerProcess::grpc_address() const {
  return absl::StrCat(impl_->host, ":", impl_->grpc_port);
}

std::shared_ptr<grpc::Channel> ServerProcess::InProcessChannel() {
  return impl_->server->InProcessChannel(grpc::ChannelArguments());
}

void ServerProcess::SetReady(bool ready) {
  base::MutexLock lock(&impl_->mutex);
  if (impl_->drained || impl_->terminations > 0 || impl_->ready == ready) return;
  impl_->ready = ready;
  impl_->was_ready |= ready;
  impl_->PublishHealth(true, ready);
  BATON_LOG(Info, ready ? "ready" : "not ready");
}

bool ServerProcess::ready() const {
  base::MutexLock lock(&impl_->mutex);
  return impl_->ready;
}

bool ServerProcess::draining() const {
  base::MutexLock lock(&impl_->mutex);
  return impl_->terminations > 0 || impl_->drained;
}

void ServerProcess::RequestTermination() {
  base::MutexLock lock(&impl_->mutex);
  ++impl_->terminations;
  impl_->changed.NotifyAll();
}

void ServerProcess::WaitForTermination() {
  base::MutexLock lock(&impl_->mutex);
  while (impl_->terminations == 0) impl_->changed.Wait(&impl_->mutex);
}

bool ServerProcess::Drain(const std::function<bool()>& idle) {
  int terminations = 0;
  {
    base::MutexLock lock(&impl_->mutex);
    impl_->drained = true;
    impl_->ready = false;
    impl_->PublishHealth(false, false);
    terminations = impl_->terminations;
  }
  BATON_LOG(Info, "draining", LogField("calls", calls_in_flight()));
  const absl::Time deadline = absl::Now() + impl_->options.drain_timeout;
  while (calls_in_flight() > 0 || (idle != nullptr && !idle())) {
    base::MutexLock lock(&impl_->mutex);
    if (absl::Now() >= deadline || impl_->terminations > terminations) {
      BATON_LOG(Warning, "drain cut short", LogField("calls", calls_in_flight()));
      return false;
    }
    impl_->changed.WaitFor(&impl_->mutex, kDrainPoll);
  }
  return true;
}

int ServerProcess::calls_in_flight() const { return impl_->calls_in_flight.load(); }

void ServerProcess::Stop() {
  {
    base::MutexLock lock(&impl_->mutex);
    if (impl_->stopped) return;
    impl_->stopped = true;
    impl_->drained = true;
    impl_->ready = false;
  }
  impl_->stopping.store(true);
  if (impl_->signal_thread.joinable()) impl_->signal_thread.join();
  impl_->exposer.reset();
  if (impl_->server != nullptr)
    impl_->server->Shutdown(absl::ToChronoTime(absl::Now() + kStopGrace));
  if (impl_->health_server != nullptr)
    impl_->health_server->Shutdown(absl::ToChronoTime(absl::Now() + kStopGrace));
  RemovePortFile(impl_->options.port_file);
}

}  // namespace baton::process
