#include "worker/worker_process.h"

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine/base/gpu_stats.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/version.h"
#include "engine/ops/cuda_version.h"

namespace baton::worker {
namespace {

LogLevel LogLevelOf(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

// host:port of the HTTP server, which listens where the gRPC server does.
std::string HttpAddress(const process::ServerProcess& server) {
  if (server.http_port() < 0) return "";
  const std::string grpc = server.grpc_address();
  return absl::StrCat(grpc.substr(0, grpc.rfind(':')), ":", server.http_port());
}

// Metrics of the GPUs that compute, as long as what it returns lives. A worker serves without them.
std::unique_ptr<base::GpuExporter> ExportGpus(const WorkerOptions& options,
                                              const EngineHost& host,
                                              base::Metrics* metrics) {
  std::vector<std::string> ids = host.runner->device_ids();
  if (!options.test_gpu.empty()) ids.push_back(options.test_gpu);
  if (ids.empty()) return nullptr;
  absl::StatusOr<std::unique_ptr<base::GpuExporter>> exporter =
      base::GpuExporter::Start(ids, metrics);
  if (exporter.ok()) return *std::move(exporter);
  BATON_LOG(Warning, "no gpu metrics", LogField("error", exporter.status().message()));
  return nullptr;
}

absl::Status Serve(const WorkerOptions& options, WorkerRole* role) {
  const absl::Time start = absl::Now();
  const auto metrics = base::Metrics::Create(role->role(), ServedModelName(options));
  std::string why;
  const std::string backend = BackendOf(options, &why);
  BATON_LOG(Info, "device requested=", options.device, " backend=", backend,
            LogField("reason", why));
  metrics
      ->gauge(base::GaugeId::kBuildInfo,
              {base::kVersion, base::kCommit, backend, ops::CudaVersion()})
      .Set(1);
  StatusSource status(metrics.get(), ServedModelName(options));
  process::StatusPublisher publisher([&](v1::WorkerStatus* out) { status.Fill(out); });
  // The services are made before the server, which they ask whether it drains.
  std::atomic<process::ServerProcess*> server_ptr{nullptr};
  std::vector<grpc::Service*> services = role->MakeServices([&server_ptr] {
    const process::ServerProcess* server = server_ptr.load();
    return server != nullptr && server->draining();
  });
  services.push_back(publisher.service());
  process::ServerOptions server_options = ServerOptionsOf(options);
  server_options.health_services = role->service_names();
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<process::ServerProcess> server,
                         process::ServerProcess::Start(server_options, metrics.get(), services));
  server_ptr.store(server.get());
  status.SetHttpAddress(HttpAddress(*server));

  absl::StatusOr<EngineHost> host =
      LoadEngine(options, role->step_tokens(), role->max_logit_rows());
  std::unique_ptr<base::GpuExporter> gpus;
  if (host.ok()) gpus = ExportGpus(options, *host, metrics.get());
  absl::Status started = host.status();
  if (host.ok())
    started = role->StartEngine(std::make_unique<EngineHost>(*std::move(host)), metrics.get(),
                                &status, [&] { publisher.NotifyChanged(); });
  if (!started.ok()) {
    server->Stop();
    return started;
  }
  publisher.SetKvEvents(
      [role](uint64_t* cursor, v1::KvEvents* out) { return role->kv_events().Read(cursor, out); });
  status.SetLoadTime(absl::Now() - start);
  status.SetState(v1::WORKER_STATE_READY);
  server->SetReady(true);
  publisher.NotifyChanged();

  server->WaitForTermination();
  BATON_LOG(Info, "draining");
  status.SetState(v1::WORKER_STATE_DRAINING);
  publisher.NotifyChanged();
  const bool drained = server->Drain([&] { return role->idle(); });
  BATON_LOG(Info, "drained", LogField("complete", drained ? "yes" : "no"));
  role->StopEngine();
  server->Stop();
  return absl::OkStatus();
}

}  // namespace

int RunWorker(const WorkerOptions& options, const absl::Status& role_options, WorkerRole* role) {
  InitLogging(base::RoleName(role->role()), LogLevelOf(options.log_level));
  absl::Status status = ValidateOptions(options);
  if (status.ok()) status = role_options;
  if (status.ok() && !options.check_flags) status = Serve(options, role);
  if (status.ok()) return 0;
  BATON_LOG(Error, "cannot serve: ", status.message());
  return 1;
}

}  // namespace baton::worker
