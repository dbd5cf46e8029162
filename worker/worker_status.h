#pragma once

// What a worker tells routers and Prometheus about itself.

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "baton/worker/v1/cluster.pb.h"
#include "engine/base/metrics.h"
#include "engine/base/mutex.h"
#include "worker/engine_host.h"

namespace baton::worker {

// Thread-safe.
class StatusSource {
 public:
  // `metrics` outlives it.
  StatusSource(base::Metrics* metrics, std::string model_name);

  // The model is loaded: everything but the load is known from here on. `host` outlives the source;
  // `load` and `peers` must neither block nor take long.
  void SetEngine(const EngineHost* host,
                 std::function<v1::WorkerLoad()> load,
                 std::function<std::vector<v1::WorkerStatus::Peer>()> peers);
  void SetState(v1::WorkerState state);
  void SetHttpAddress(std::string address);
  // `took` is the time from start until the model was loaded and warm.
  void SetLoadTime(absl::Duration took);

  void Fill(v1::WorkerStatus* status);

 private:
  void SetPeerGauges(const std::vector<v1::WorkerStatus::Peer>& peers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  base::Metrics& metrics_;
  const std::string model_name_;
  base::Mutex mutex_;
  v1::WorkerStatus fixed_ ABSL_GUARDED_BY(mutex_);  // all but load and peers
  std::function<v1::WorkerLoad()> load_ ABSL_GUARDED_BY(mutex_);
  std::function<std::vector<v1::WorkerStatus::Peer>()> peers_ ABSL_GUARDED_BY(mutex_);
  // Series of peers that exist, by (transport, address).
  std::map<std::pair<std::string, std::string>, double> peer_series_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace baton::worker
