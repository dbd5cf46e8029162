#pragma once

// Every worker the router knows of: alive or not, ready or not, how loaded, what its cache holds;
// and what the router has sent it.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"

#include "baton/worker/v1/cluster.pb.h"

#include "engine/base/clock.h"
#include "engine/base/metrics.h"
#include "engine/base/mutex.h"
#include "engine/kv/block_hash.h"
#include "router/breaker.h"
#include "router/prefix_index.h"
#include "router/route_policy.h"
#include "router/ttft_model.h"
#include "router/worker_ledger.h"

namespace baton::router {

struct WorkerTableOptions {
  Topology topology = Topology::kPd;
  std::vector<std::string> prefill;  // host:port
  std::vector<std::string> decode;
  // A worker silent for this long is suspect; for down_timeout, or when its connection is lost,
  // down. Status comes several times a second.
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  absl::Duration down_timeout = absl::Seconds(30);
  // Of the router's tokenizer: a worker with another one is of no use. Empty: any.
  std::string tokenizer_fingerprint;
  uint64_t prefill_queue_tokens = 8192;  // WorkerView::load_tokens_max
  // How long a worker is believed to get the blocks of a prompt that was sent to it.
  absl::Duration prefix_assumed = absl::Seconds(30);
  BreakerOptions breaker;
  const base::Clock* clock = &base::Clock::Real();
  base::Metrics* metrics = nullptr;  // null: none are kept
};

// A leg's entry in the books of its worker. Of no use once the worker has restarted or left.
struct WorkId {
  uint32_t slot = 0;
  uint64_t id = 0;  // 0: none
};

// Where a request goes, booked.
struct Placement {
  Route route;
  WorkId prefill;
  WorkId decode;
  bool predicted = false;  // route.predicted_ttft_s rests on measurements
};

// How a leg's end speaks of its worker.
enum class Verdict {
  kGood,    // it did its part
  kFailed,  // it is to blame
  kFull,    // it had no room
  kNone,    // nothing can be said
};

// Thread-safe.
class WorkerTable {
 public:
  explicit WorkerTable(const WorkerTableOptions& options);

  // Called without a lock held, on the thread that reported it, after a change that may matter to
  // Usable(); after anything that may let a waiting request through. Set before the first report.
  void set_on_change(std::function<void()> on_change) { on_change_ = std::move(on_change); }
  void set_on_capacity(std::function<void()> on_capacity) { on_capacity_ = std::move(on_capacity); }

  // A worker to be known of; one that is known already changes nothing. Forgets one: what was sent
  // to it goes on, nothing more is sent.
  void Add(WorkerRole role, const std::string& address);
  void Remove(const std::string& address);

  // What a worker said of itself. A new incarnation starts from nothing.
  void OnStatus(const std::string& address, const worker::v1::WorkerStatus& status);
  // Its connection is lost.
  void OnDown(const std::string& address, const absl::Status& reason);
  // What its prefix cache holds: with `reset`, `stored` is all of it.
  void OnKvEvents(const std::string& address,
                  bool reset,
                  absl::Span<const BlockKey> stored,
                  absl::Span<const BlockKey> removed);
  // Finds the silent ones. To be called a few times within heartbeat_timeout.
  void Sweep();

  // Chooses and books. `keys` names the prompt's full blocks; request.cached_blocks is filled in
  // here. Errors: those of RoutePolicy::Choose; nothing is booked then.
  absl::StatusOr<Placement> Place(const RoutePolicy& policy,
                                  RouteRequest request,
                                  absl::Span<const BlockKey> keys);
  // Whether Place would succeed.
  bool CanPlace(const RoutePolicy& policy, const RouteRequest& request) const;
  // What is predicted for a prompt at the best of all workers that may compute it.
  struct Prediction {
    bool fitted = false;  // from measurements; else from what is assumed before any
    int num_workers = 0;
    double ttft_s = 0;           // from its dispatch to its first token
    double compute_s = 0;        // of that, without the wait
    uint32_t cached_tokens = 0;  // the most that any of them has
  };
  Prediction Predict(RouteRequest request, absl::Span<const BlockKey> keys) const;

  // Of booked legs.
  void OnReserved(const WorkId& work);
  // The prompt's first token is there. `compute_s` as the worker measured it; negative: it says
  // nothing.
  void OnComputed(const WorkId& work, uint32_t cached, uint32_t prompt_tokens, double compute_s);
  // At the leg's end; later calls change nothing.
  void Release(const WorkId& work, Verdict verdict);

  // It is known and its connection stands.
  bool IsAlive(const std::string& address) const;
  std::vector<WorkerView> Snapshot() const;
  // OK when requests can be served: one pair that fits together, or in topology single one decode
  // worker; a suspect worker counts. Errors: UNAVAILABLE, FAILED_PRECONDITION naming the field that
  // differs.
  absl::Status Usable() const;
  // Longest prompt and answer together that every live worker takes; 0 while none is.
  uint32_t max_model_len() const;
  // Names blocks as the workers do; nothing while none is ready.
  std::optional<kv::BlockHasher> MakeHasher(const std::string& salt) const;

  struct Row {
    std::string address;
    WorkerRole role;
    WorkerHealth health;
    worker::v1::WorkerStatus status;  // the last one; empty when none ever came
    BreakerState breaker;
    uint32_t requests_sent;  // and not ended
    double wait_s;
    TtftModel ttft;
    uint64_t blocks_known;  // in the prefix index
  };
  std::vector<Row> Rows() const;

 private:
  struct Worker {
    bool known = true;  // false: the slot is free
    worker::v1::WorkerStatus status;
    std::string refused;  // why it is of no use although it answers
    WorkerHealth health = WorkerHealth::kDown;
    absl::Duration last_seen;
    Breaker breaker;
    WorkerLedger ledger;
    uint64_t foreign_tokens = 0;  // that it last reported beyond those in the ledger
    TtftModel ttft;
    std::string full_load;  // its last report when it refused for want of room
    absl::Duration full_since;
  };

  std::string Refuse(WorkerRole role, const worker::v1::WorkerStatus& status) const;
  // True: the incarnation, fingerprint, refusal or health is another one.
  bool TakeStatus(uint32_t slot, const worker::v1::WorkerStatus& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartOver(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetKind(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetHealth(uint32_t slot, WorkerHealth health, absl::string_view reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Brings a view up to date with report, books and breaker.
  void UpdateView(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefreshTimes(absl::Duration now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  WorkId Book(const WorkerView& view,
              const RouteRequest& request,
              bool computes,
              absl::Duration now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishBreaker(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishCounts() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyCapacity() const {
    if (on_capacity_ != nullptr) on_capacity_();
  }

  const WorkerTableOptions options_;
  std::function<void()> on_change_;
  std::function<void()> on_capacity_;
  mutable base::Mutex mutex_;
  uint64_t next_work_ ABSL_GUARDED_BY(mutex_) = 1;
  // By slot; views_[i] is what policies see of workers_[i].
  std::vector<Worker> workers_ ABSL_GUARDED_BY(mutex_);
  mutable std::vector<WorkerView> views_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, uint32_t> slots_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, uint32_t> kinds_ ABSL_GUARDED_BY(mutex_);  // fingerprint without tp -> kind
  PrefixIndex index_ ABSL_GUARDED_BY(mutex_);
  base::Histogram decision_time_;
  base::Gauge prefix_hit_ratio_;
  uint64_t prompt_blocks_ ABSL_GUARDED_BY(mutex_) = 0;  // looked up, and found where they went
  uint64_t hit_blocks_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace baton::router
