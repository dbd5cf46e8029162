#include "router/worker_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/log.h"

namespace baton::router {
namespace {

WorkerHealth HealthOf(worker::v1::WorkerState state) {
  switch (state) {
    case worker::v1::WORKER_STATE_READY:
      return WorkerHealth::kReady;
    case worker::v1::WORKER_STATE_DRAINING:
      return WorkerHealth::kDraining;
    default:
      return WorkerHealth::kLoading;
  }
}

}  // namespace

WorkerTable::WorkerTable(const WorkerTableOptions& options) : options_(options) {
  base::MutexLock lock(&mutex_);
  for (const std::string& address : options_.prefill) {
    workers_[address] = Worker{.role = WorkerRole::kPrefill, .order = workers_.size()};
  }
  for (const std::string& address : options_.decode) {
    workers_[address] = Worker{.role = WorkerRole::kDecode, .order = workers_.size()};
  }
  PublishCounts();
}

std::string WorkerTable::Refuse(const Worker& worker,
                                const worker::v1::WorkerStatus& status) const {
  if (status.role() != WorkerRoleName(worker.role)) {
    return absl::StrCat("it is a ", status.role(), " worker, and was named as ",
                        WorkerRoleName(worker.role));
  }
  if (!options_.tokenizer_fingerprint.empty() && status.state() == worker::v1::WORKER_STATE_READY &&
      status.fingerprint().tokenizer() != options_.tokenizer_fingerprint) {
    return "tokenizer differs between router and worker";
  }
  return "";
}

void WorkerTable::OnStatus(const std::string& address, const worker::v1::WorkerStatus& status) {
  bool changed = false;
  {
    base::MutexLock lock(&mutex_);
    const auto found = workers_.find(address);
    if (found == workers_.end()) return;
    Worker& worker = found->second;
    if (worker.status.incarnation() != status.incarnation()) {
      BATON_LOG(Info, "worker answers", LogField("worker", address),
                LogField("incarnation", absl::BytesToHexString(status.incarnation())));
      worker.work_tokens = 0;
      changed = true;
    }
    if (worker.fingerprint == nullptr ||
        worker.fingerprint->SerializeAsString() != status.fingerprint().SerializeAsString()) {
      worker.fingerprint = std::make_shared<worker::v1::LayoutFingerprint>(status.fingerprint());
      changed = true;
    }
    worker.status = status;
    worker.last_seen = options_.clock->Now();
    const std::string refused = Refuse(worker, status);
    if (refused != worker.refused && !refused.empty()) {
      BATON_LOG(Error, "worker refused", LogField("worker", address), LogField("reason", refused));
    }
    changed |= refused != worker.refused;
    worker.refused = refused;
    const WorkerHealth health = HealthOf(status.state());
    if (health != worker.health) {
      SetHealth(address, &worker, health, "");
      changed = true;
    }
  }
  if (changed && on_change_ != nullptr) on_change_();
}

void WorkerTable::OnDown(const std::string& address, const absl::Status& reason) {
  {
    base::MutexLock lock(&mutex_);
    const auto found = workers_.find(address);
    if (found == workers_.end() || found->second.health == WorkerHealth::kDown) return;
    SetHealth(address, &found->second, WorkerHealth::kDown, reason.message());
  }
  if (on_change_ != nullptr) on_change_();
}

void WorkerTable::Sweep() {
  bool changed = false;
  {
    base::MutexLock lock(&mutex_);
    const absl::Duration now = options_.clock->Now();
    for (auto& [address, worker] : workers_) {
      if (worker.health == WorkerHealth::kDown ||
          now - worker.last_seen < options_.heartbeat_timeout)
        continue;
      SetHealth(address, &worker, WorkerHealth::kDown, "silent");
      changed = true;
    }
  }
  if (changed && on_change_ != nullptr) on_change_();
}

void WorkerTable::SetHealth(const std::string& address,
                            Worker* worker,
                            WorkerHealth health,
                            absl::string_view reason) {
  BATON_LOG(Info, "worker", LogField("worker", address),
            LogField("role", WorkerRoleName(worker->role)),
            LogField("state", WorkerHealthName(health)),
            reason.empty() ? "" : LogField("reason", reason));
  worker->health = health;
  if (health == WorkerHealth::kDown) worker->work_tokens = 0;
  PublishCounts();
}

void WorkerTable::PublishCounts() {
  if (options_.metrics == nullptr) return;
  for (WorkerRole role : {WorkerRole::kPrefill, WorkerRole::kDecode}) {
    for (WorkerHealth health : {WorkerHealth::kDown, WorkerHealth::kLoading, WorkerHealth::kReady,
                                WorkerHealth::kDraining}) {
      const auto count = std::count_if(workers_.begin(), workers_.end(), [&](const auto& entry) {
        return entry.second.role == role && entry.second.health == health;
      });
      options_.metrics
          ->gauge(base::GaugeId::kRouterWorkers, {WorkerRoleName(role), WorkerHealthName(health)})
          .Set(static_cast<double>(count));
    }
  }
}

WorkerView WorkerTable::ViewOf(const std::string& address, const Worker& worker) const {
  const worker::v1::WorkerLoad& load = worker.status.load();
  WorkerView view;
  view.address = address;
  view.role = worker.role;
  view.health = worker.refused.empty() ? worker.health : WorkerHealth::kDown;
  view.block_tokens = std::max<uint32_t>(1, worker.status.fingerprint().block_tokens());
  const uint64_t reported =
      worker.role == WorkerRole::kPrefill
          ? load.queue_tokens()
          : uint64_t{view.block_tokens} * (load.kv_blocks_active() + load.kv_blocks_reserved());
  view.load_tokens =
      std::max<uint64_t>(reported, static_cast<uint64_t>(std::max<int64_t>(0, worker.work_tokens)));
  view.available_blocks = load.kv_blocks_free() + load.kv_blocks_cached();
  view.max_prompt_tokens = worker.status.max_prompt_tokens();
  view.max_model_len = worker.status.max_model_len();
  view.fingerprint = worker.fingerprint;
  return view;
}

std::vector<WorkerView> WorkerTable::Snapshot() const {
  base::MutexLock lock(&mutex_);
  std::vector<WorkerView> views(workers_.size());
  for (const auto& [address, worker] : workers_) views[worker.order] = ViewOf(address, worker);
  return views;
}

absl::Status WorkerTable::Usable() const {
  RouteRequest request;
  request.needs_prefill = options_.topology == Topology::kPd;
  const absl::Status status = MakeLeastLoadPolicy()->Choose(Snapshot(), request).status();
  if (status.ok()) return status;
  base::MutexLock lock(&mutex_);
  for (const auto& [address, worker] : workers_) {
    if (worker.health == WorkerHealth::kReady && !worker.refused.empty()) {
      return absl::FailedPreconditionError(absl::StrCat("worker ", address, ": ", worker.refused));
    }
  }
  return status;
}

uint32_t WorkerTable::max_model_len() const {
  uint32_t least = 0;
  for (const WorkerView& view : Snapshot()) {
    if (view.health != WorkerHealth::kReady || view.max_model_len == 0) continue;
    least = least == 0 ? view.max_model_len : std::min(least, view.max_model_len);
  }
  return least;
}

void WorkerTable::AddWork(const std::string& address, int64_t tokens) {
  base::MutexLock lock(&mutex_);
  const auto found = workers_.find(address);
  if (found == workers_.end()) return;
  found->second.work_tokens = std::max<int64_t>(0, found->second.work_tokens + tokens);
}

std::vector<WorkerTable::Row> WorkerTable::Rows() const {
  base::MutexLock lock(&mutex_);
  std::vector<Row> rows(workers_.size());
  for (const auto& [address, worker] : workers_) {
    rows[worker.order] = {address, worker.role, worker.health, worker.status};
  }
  return rows;
}

}  // namespace baton::router
