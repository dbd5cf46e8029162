#pragma once

// Every worker the router was told of: alive or not, ready or not, how loaded.

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "baton/worker/v1/cluster.pb.h"

#include "engine/base/clock.h"
#include "engine/base/metrics.h"
#include "engine/base/mutex.h"
#include "router/route_policy.h"

namespace baton::router {

struct WorkerTableOptions {
  Topology topology = Topology::kPd;
  std::vector<std::string> prefill;  // host:port
  std::vector<std::string> decode;
  // A worker that was silent for this long is down. Status comes several times a second.
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  // Of the router's tokenizer: a worker with another one is of no use. Empty: any.
  std::string tokenizer_fingerprint;
  const base::Clock* clock = &base::Clock::Real();
  base::Metrics* metrics = nullptr;  // null: none are kept
};

// Thread-safe.
class WorkerTable {
 public:
  explicit WorkerTable(const WorkerTableOptions& options);

  // Called, on the thread that reported it, after a change that may matter to Usable(). Set before
  // the first report.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }

  // What a worker said of itself. A new incarnation starts from nothing.
  void OnStatus(const std::string& address, const worker::v1::WorkerStatus& status);
  void OnDown(const std::string& address, const absl::Status& reason);
  // Finds the silent ones. To be called a few times within heartbeat_timeout.
  void Sweep();

  std::vector<WorkerView> Snapshot() const;
  // OK when a request can be served: one pair that fits together, or in topology single one decode
  // worker. Errors: UNAVAILABLE, FAILED_PRECONDITION naming the field that differs.
  absl::Status Usable() const;
  // Longest prompt and answer together that every ready worker takes; 0 while none is ready.
  uint32_t max_model_len() const;

  // Tokens sent to a worker and not yet seen in its reports.
  void AddWork(const std::string& address, int64_t tokens);

  struct Row {
    std::string address;
    WorkerRole role;
    WorkerHealth health;
    worker::v1::WorkerStatus status;  // the last one; empty when none ever came
  };
  std::vector<Row> Rows() const;

 private:
  struct Worker {
    WorkerRole role;
    size_t order;  // the operator's
    WorkerHealth health = WorkerHealth::kDown;
    worker::v1::WorkerStatus status;
    std::shared_ptr<const worker::v1::LayoutFingerprint> fingerprint;
    std::string refused;  // why it is of no use although it answers
    absl::Duration last_seen;
    int64_t work_tokens = 0;
  };

  WorkerView ViewOf(const std::string& address, const Worker& worker) const;
  std::string Refuse(const Worker& worker, const worker::v1::WorkerStatus& status) const;
  void SetHealth(const std::string& address,
                 Worker* worker,
                 WorkerHealth health,
                 absl::string_view reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishCounts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const WorkerTableOptions options_;
  std::function<void()> on_change_;
  mutable base::Mutex mutex_;
  std::map<std::string, Worker> workers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::router
