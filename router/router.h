#pragma once

// A whole router: everything between its options and its open ports, in the order in which it may
// be used.

#include <memory>

#include "absl/status/statusor.h"
#include "engine/base/metrics.h"
#include "engine/process/server_process.h"
#include "router/router_options.h"

namespace baton::router {

// Thread-safe.
class Router {
 public:
  // Loads what it needs of the model, opens the ports and begins to watch the workers. Serves when
  // a pair is usable. Errors: those of ResolveOptions, LoadModelFacts and ServerProcess::Start.
  static absl::StatusOr<std::unique_ptr<Router>> Start(const RouterOptions& options,
                                                       bool handle_signals = true);
  // As Stop.
  ~Router();

  process::ServerProcess& server();
  base::Metrics& metrics();
  // Waits for the end of service, lets what runs finish, and stops.
  void RunUntilTerminated();
  // Ends what still runs. Idempotent.
  void Stop();

 private:
  struct Impl;
  explicit Router(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace baton::router
