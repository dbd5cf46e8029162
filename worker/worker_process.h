#pragma once

// The course of a worker process, from its options to its exit code. What prefill and decode do
// differently comes as a WorkerRole.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/base/metrics.h"
#include "engine/process/server_process.h"
#include "engine/process/status_publisher.h"
#include "worker/engine_host.h"
#include "worker/kv_event_log.h"
#include "worker/worker_options.h"
#include "worker/worker_status.h"

namespace baton::worker {

// One worker's services and engine. Called by RunWorker on the main thread, in the order of the
// methods.
class WorkerRole {
 public:
  virtual ~WorkerRole() = default;
  virtual base::Role role() const = 0;
  // The services clients call, for health.
  virtual std::vector<std::string> service_names() const = 0;
  // Open at once; they refuse calls until the engine is there, and new ones while `draining`.
  virtual std::vector<grpc::Service*> MakeServices(std::function<bool()> draining) = 0;
  // Most tokens of a step and most sequences that want logits in one.
  virtual int step_tokens() const = 0;
  virtual int max_logit_rows() const = 0;
  // Starts the engine thread and opens the services. `changed` may be called from any thread when
  // peers come and go.
  virtual absl::Status StartEngine(std::unique_ptr<EngineHost> host,
                                   base::Metrics* metrics,
                                   StatusSource* status,
                                   std::function<void()> changed) = 0;
  // Changes of the engine's prefix cache, from StartEngine on.
  virtual const KvEventLog& kv_events() const = 0;
  // Nothing is in flight.
  virtual bool idle() const = 0;
  // Ends what is left and joins the engine thread.
  virtual void StopEngine() = 0;
};

// `role_options` says whether the role's own options are good. Returns the exit code: 0 after an
// orderly end, 1 when the worker could not start.
int RunWorker(const WorkerOptions& options, const absl::Status& role_options, WorkerRole* role);

}  // namespace baton::worker
