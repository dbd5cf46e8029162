#pragma once

// What all three server processes share: a gRPC server with health, reflection and metrics, an HTTP
// port, a port file, and an orderly end on SIGTERM. gRPC types stay out of this header.
//
// A process does, in this order:
//   process::BlockTerminationSignals();                      // before any thread exists
//   auto metrics = base::Metrics::Create(role, model_name);
//   auto server = process::ServerProcess::Start(options, metrics.get(), services);   // answers
//   health; NOT_SERVING
//   ... load the model, warm up ...
//   server->SetReady(true);
//   server->WaitForTermination();                            // SIGTERM, SIGINT or
//   RequestTermination server->Drain([&] { return nothing_in_flight; });        // NOT_SERVING;
//   waits, at most drain_timeout server->Stop();                                          //
//   cancels what is left; returns when no handler runs return 0;

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "engine/base/metrics.h"
#include "engine/process/exposer.h"
#include "engine/process/tls.h"

namespace grpc {
class Channel;
class Service;
}  // namespace grpc

namespace baton::process {

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // host:port of the gRPC server; port 0: any free one
  TlsServerOptions tls;                // of that port alone
  int http_port = 0;                   // /metrics, /health, /ready, /; 0: any free one, -1: none
  // A port of its own for grpc.health.v1, in plain text and without credentials, as Kubernetes'
  // probes want it. The main port answers health too. 0: any free one, -1: none.
  int health_port = -1;
  // JSON {"grpc":PORT,"http":PORT,"health":PORT}, written when all are open; empty: none.
  std::string port_file;
  // "vllm": /metrics carries vLLM's names too. "none" or empty: ours alone.
  std::string metrics_compat;
  // Further pages of the HTTP port; they win over its own.
  Exposer::Routes routes;
  bool reflection = true;
  bool channelz = false;
  absl::Duration drain_timeout = absl::Seconds(60);
  // Names that grpc.health.v1 knows beside "" (alive), "liveness" and "readiness": the services
  // clients call.
  std::vector<std::string> health_services;
  int max_message_bytes = 16 << 20;
  int max_concurrent_streams = 4096;  // per connection
  // A client that says nothing for `keepalive_time` is asked, and has gone if it does not answer
  // within `keepalive_timeout`: what its calls held is free then.
  absl::Duration keepalive_time = absl::Seconds(60);
  absl::Duration keepalive_timeout = absl::Seconds(20);
  // Connections are closed gracefully after this long, so that balancers of connections spread
  // their clients again. Calls get `max_connection_age_grace` to end. Infinite for workers, whose
  // sessions live as long as their peers.
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_age_grace = absl::Minutes(15);
  // Exit at once, code 0, on SIGTERM before the first SetReady(true): nothing is in flight while a
  // model loads.
  bool exit_while_loading = true;
  // False in tests that run several servers in one process: signals are left alone.
  bool handle_signals = true;
};

// Call first thing in main: threads inherit the mask, and the server's own thread receives SIGTERM
// and SIGINT.
void BlockTerminationSignals();

// Thread-safe.
class ServerProcess {
 public:
  // `metrics` and `services` outlive the result. Services are open from here on: they must answer
  // UNAVAILABLE until they can serve. Errors: INVALID_ARGUMENT for an address that cannot be
  // parsed and as CheckTls, UNAVAILABLE when a port cannot be had, the file system's error for the
  // port file.
  static absl::StatusOr<std::unique_ptr<ServerProcess>> Start(
      const ServerOptions& options,
      base::Metrics* metrics,
      const std::vector<grpc::Service*>& services);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  int grpc_port() const;
  int http_port() const;    // -1: none
  int health_port() const;  // -1: none
  // host:port under which the gRPC server listens.
  std::string grpc_address() const;
  // To the gRPC server, without a socket or TLS. Shared, as gRPC's stubs want it.
  std::shared_ptr<grpc::Channel> InProcessChannel();

  // Health "readiness" and health_services, and /ready. May go back and forth; stays false once
  // draining. Health "" is SERVING from the start until the drain; "liveness" and /health answer to
  // the end.
  void SetReady(bool ready);
  bool ready() const;

  // True from the first signal on: services refuse new work with UNAVAILABLE.
  bool draining() const;
  // As SIGTERM does. A second time, or a second signal, ends the drain at once.
  void RequestTermination();
  void WaitForTermination();

  // Not ready; then waits until no call is in flight (health, reflection, Cluster.Watch* and
  // Peer.Session do not count) and `idle` holds, at most drain_timeout. `idle` may be null. False
  // when the time was over first.
  bool Drain(const std::function<bool()>& idle);
  // Calls in flight that Drain waits for.
  int calls_in_flight() const;
  // Ends every call and closes the ports. Idempotent.
  void Stop();

 private:
  struct Impl;
  explicit ServerProcess(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::process
