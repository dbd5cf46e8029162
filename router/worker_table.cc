#include "router/worker_table.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/log.h"
#include "engine/process/fingerprint.h"

namespace baton::router {
namespace {

constexpr absl::Duration kAskFullAgain = absl::Seconds(1);

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

bool Lives(const WorkerView& view) {
  return view.health == WorkerHealth::kReady || view.health == WorkerHealth::kSuspect;
}

// WorkerView::load_tokens as the worker itself counts them.
uint64_t ReportedTokens(const WorkerView& view, const worker::v1::WorkerLoad& load) {
  return view.role == WorkerRole::kPrefill
             ? load.queue_tokens()
             : uint64_t{view.block_tokens} * (load.kv_blocks_active() + load.kv_blocks_reserved());
}

}  // namespace

WorkerTable::WorkerTable(const WorkerTableOptions& options) : options_(options) {
  for (const std::string& address : options_.prefill) Add(WorkerRole::kPrefill, address);
  for (const std::string& address : options_.decode) Add(WorkerRole::kDecode, address);
  base::MutexLock lock(&mutex_);
  PublishCounts();
  if (options_.metrics == nullptr) return;
  decision_time_ = options_.metrics->histogram(base::HistogramId::kRouterDecisionDuration);
  prefix_hit_ratio_ = options_.metrics->gauge(base::GaugeId::kRouterPrefixHitRatio);
}

void WorkerTable::Add(WorkerRole role, const std::string& address) {
  base::MutexLock lock(&mutex_);
  if (slots_.contains(address)) return;
  const auto gone = std::find_if(workers_.begin(), workers_.end(),
                                 [](const Worker& worker) { return !worker.known; });
  const auto slot = static_cast<uint32_t>(gone - workers_.begin());
  if (gone == workers_.end()) {
    workers_.emplace_back();
    views_.emplace_back();
  }
  slots_[address] = slot;
  workers_[slot] = Worker();
  workers_[slot].breaker = Breaker(options_.breaker);
  views_[slot] = WorkerView();
  views_[slot].address = address;
  views_[slot].slot = slot;
  views_[slot].role = role;
  views_[slot].load_tokens_max = role == WorkerRole::kPrefill ? options_.prefill_queue_tokens : 0;
  views_[slot].fingerprint = std::make_shared<worker::v1::LayoutFingerprint>();
  PublishBreaker(slot);
  PublishCounts();
}

void WorkerTable::Remove(const std::string& address) {
  {
    base::MutexLock lock(&mutex_);
    const auto found = slots_.find(address);
    if (found == slots_.end()) return;
    const uint32_t slot = found->second;
    BATON_LOG(Info, "worker forgotten", LogField("worker", address));
    slots_.erase(found);
    StartOver(slot);
    workers_[slot].known = false;
    workers_[slot].health = views_[slot].health = WorkerHealth::kDown;
    if (options_.metrics != nullptr) {
      const absl::string_view labels[] = {address};
      options_.metrics->Remove(base::GaugeId::kRouterWorkerBreakerState, labels);
    }
    PublishCounts();
  }
  if (on_change_ != nullptr) on_change_();
}

std::string WorkerTable::Refuse(WorkerRole role, const worker::v1::WorkerStatus& status) const {
  if (status.role() != WorkerRoleName(role)) {
    return absl::StrCat("it is a ", status.role(), " worker, and was named as ",
                        WorkerRoleName(role));
  }
  if (!options_.tokenizer_fingerprint.empty() && status.state() == worker::v1::WORKER_STATE_READY &&
      status.fingerprint().tokenizer() != options_.tokenizer_fingerprint) {
    return "tokenizer differs between router and worker";
  }
  return "";
}

void WorkerTable::StartOver(uint32_t slot) {
  Worker& worker = workers_[slot];
  worker.ledger.Clear();
  worker.foreign_tokens = 0;
  worker.breaker.Reset();
  views_[slot].full = false;
  index_.Clear(slot);
  PublishBreaker(slot);
}

void WorkerTable::SetKind(uint32_t slot) {
  const std::string key = process::FingerprintKey(workers_[slot].status.fingerprint());
  views_[slot].kind =
      kinds_.try_emplace(key, static_cast<uint32_t>(kinds_.size() + 1)).first->second;
  views_[slot].fingerprint =
      std::make_shared<worker::v1::LayoutFingerprint>(workers_[slot].status.fingerprint());
}

bool WorkerTable::TakeStatus(uint32_t slot, const worker::v1::WorkerStatus& status) {
  Worker& worker = workers_[slot];
  WorkerView& view = views_[slot];
  bool changed = false;
  if (worker.status.incarnation() != status.incarnation()) {
    BATON_LOG(Info, "worker answers", LogField("worker", view.address),
              LogField("incarnation", absl::BytesToHexString(status.incarnation())));
    // At the first contact nothing is known but, perhaps, what its cache holds.
    if (!worker.status.incarnation().empty()) StartOver(slot);
    changed = true;
  }
  worker.status = status;
  worker.last_seen = options_.clock->Now();
  if (view.fingerprint->SerializeAsString() != status.fingerprint().SerializeAsString()) {
    SetKind(slot);
    changed = true;
  }
  const std::string refused = Refuse(view.role, status);
  if (refused != worker.refused && !refused.empty()) {
    BATON_LOG(Error, "worker refused", LogField("worker", view.address),
              LogField("reason", refused));
  }
  changed |= refused != worker.refused;
  worker.refused = refused;
  const WorkerHealth health = HealthOf(status.state());
  if (health != worker.health) {
    SetHealth(slot, health, "");
    changed = true;
  }
  return changed;
}

void WorkerTable::OnStatus(const std::string& address, const worker::v1::WorkerStatus& status) {
  bool changed = false;
  {
    base::MutexLock lock(&mutex_);
    const auto found = slots_.find(address);
    if (found == slots_.end()) return;
    const uint32_t slot = found->second;
    changed = TakeStatus(slot, status);
    Worker& worker = workers_[slot];
    worker.ledger.OnReport();
    const uint64_t reported = ReportedTokens(views_[slot], status.load());
    worker.foreign_tokens = reported - std::min(reported, worker.ledger.tokens());
    // Asking again makes sense when something has changed since it refused, or at the worst after a
    // while.
    const bool moved = status.load().SerializeAsString() != worker.full_load ||
                       options_.clock->Now() - worker.full_since >= kAskFullAgain;
    if (moved) views_[slot].full = false;
    UpdateView(slot);
  }
  if (changed && on_change_ != nullptr) on_change_();
  NotifyCapacity();
}

void WorkerTable::OnDown(const std::string& address, const absl::Status& reason) {
  {
    base::MutexLock lock(&mutex_);
    const auto found = slots_.find(address);
    if (found == slots_.end() || workers_[found->second].health == WorkerHealth::kDown) return;
    SetHealth(found->second, WorkerHealth::kDown, reason.message());
  }
  if (on_change_ != nullptr) on_change_();
  NotifyCapacity();
}

void WorkerTable::OnKvEvents(const std::string& address,
                             bool reset,
                             absl::Span<const BlockKey> stored,
                             absl::Span<const BlockKey> removed) {
  base::MutexLock lock(&mutex_);
  const auto found = slots_.find(address);
  if (found == slots_.end()) return;
  if (reset) index_.Clear(found->second);
  index_.Add(found->second, stored);
  index_.Remove(found->second, removed);
}

void WorkerTable::Sweep() {
  bool changed = false;
  {
    base::MutexLock lock(&mutex_);
    const absl::Duration now = options_.clock->Now();
    index_.Expire(now);
    for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
      Worker& worker = workers_[slot];
      PublishBreaker(slot);
      const absl::Duration silent = now - worker.last_seen;
      if (worker.health == WorkerHealth::kDown || silent < options_.heartbeat_timeout) continue;
      if (silent >= options_.down_timeout) {
        SetHealth(slot, WorkerHealth::kDown, "silent for too long");
        changed = true;
      } else if (worker.health == WorkerHealth::kReady) {
        SetHealth(slot, WorkerHealth::kSuspect, "silent");
        changed = true;
      }
    }
  }
  if (changed && on_change_ != nullptr) on_change_();
  NotifyCapacity();  // breakers become half-open with time
}

void WorkerTable::SetHealth(uint32_t slot, WorkerHealth health, absl::string_view reason) {
  BATON_LOG(Info, "worker", LogField("worker", views_[slot].address),
            LogField("role", WorkerRoleName(views_[slot].role)),
            LogField("state", WorkerHealthName(health)),
            reason.empty() ? "" : LogField("reason", reason));
  workers_[slot].health = health;
  UpdateView(slot);
  PublishCounts();
}

void WorkerTable::UpdateView(uint32_t slot) {
  const Worker& worker = workers_[slot];
  const worker::v1::WorkerLoad& load = worker.status.load();
  WorkerView& view = views_[slot];
  view.health = worker.refused.empty() ? worker.health : WorkerHealth::kDown;
  view.block_tokens = std::max<uint32_t>(1, worker.status.fingerprint().block_tokens());
  view.load_tokens = worker.ledger.tokens() + worker.foreign_tokens;
  const uint32_t available = load.kv_blocks_free() + load.kv_blocks_cached();
  view.available_blocks = available - std::min(available, worker.ledger.unreported_blocks());
  view.num_running = load.requests_running() + load.requests_waiting();
  view.idle = worker.ledger.empty() && view.num_running == 0;
  view.cache_blocks = load.kv_blocks_cached();
  view.num_long = worker.ledger.num_long();
  view.ttft = worker.ttft.coefficients();
  view.ttft_measured = worker.ttft.num_samples() > 0;
  view.max_prompt_tokens = worker.status.max_prompt_tokens();
  view.max_model_len = worker.status.max_model_len();
}

void WorkerTable::PublishBreaker(uint32_t slot) {
  if (options_.metrics == nullptr || !workers_[slot].known) return;
  const absl::string_view labels[] = {views_[slot].address};
  options_.metrics->gauge(base::GaugeId::kRouterWorkerBreakerState, labels)
      .Set(static_cast<double>(workers_[slot].breaker.state(options_.clock->Now())));
}

void WorkerTable::PublishCounts() {
  if (options_.metrics == nullptr) return;
  for (WorkerRole role : {WorkerRole::kPrefill, WorkerRole::kDecode}) {
    for (WorkerHealth health : {WorkerHealth::kDown, WorkerHealth::kLoading, WorkerHealth::kReady,
                                WorkerHealth::kSuspect, WorkerHealth::kDraining}) {
      int count = 0;
      for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
        count +=
            workers_[slot].known && views_[slot].role == role && workers_[slot].health == health;
      }
      options_.metrics
          ->gauge(base::GaugeId::kRouterWorkers, {WorkerRoleName(role), WorkerHealthName(health)})
          .Set(static_cast<double>(count));
    }
  }
}

absl::Status WorkerTable::Usable() const {
  base::MutexLock lock(&mutex_);
  const WorkerView* prefill = nullptr;
  const WorkerView* decode = nullptr;
  for (const WorkerView& view : views_) {
    if (!Lives(view)) continue;
    if (view.role == WorkerRole::kDecode && options_.topology == Topology::kSingle)
      return absl::OkStatus();
    (view.role == WorkerRole::kPrefill ? prefill : decode) = &view;
  }
  if (decode != nullptr && prefill != nullptr) {
    std::set<uint32_t> kinds;
    for (const WorkerView& view : views_) {
      if (Lives(view) && view.role == WorkerRole::kPrefill) kinds.insert(view.kind);
    }
    for (const WorkerView& view : views_) {
      if (Lives(view) && view.role == WorkerRole::kDecode && kinds.contains(view.kind))
        return absl::OkStatus();
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "no pair fits: ", FingerprintDifference(*prefill->fingerprint, *decode->fingerprint),
        " differs between prefill worker ", prefill->address, " and decode worker ",
        decode->address));
  }
  for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
    if (workers_[slot].health == WorkerHealth::kReady && !workers_[slot].refused.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("worker ", views_[slot].address, ": ", workers_[slot].refused));
    }
  }
  return absl::UnavailableError(
      absl::StrCat("no ", decode == nullptr ? "decode" : "prefill", " worker is ready"));
}

uint32_t WorkerTable::max_model_len() const {
  base::MutexLock lock(&mutex_);
  uint32_t least = 0;
  for (const WorkerView& view : views_) {
    if (!Lives(view) || view.max_model_len == 0) continue;
    least = least == 0 ? view.max_model_len : std::min(least, view.max_model_len);
  }
  return least;
}

std::vector<WorkerTable::Row> WorkerTable::Rows() const {
  base::MutexLock lock(&mutex_);
  const absl::Duration now = options_.clock->Now();
  std::vector<Row> rows;
  for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
    const Worker& worker = workers_[slot];
    if (!worker.known) continue;
    rows.push_back({views_[slot].address, views_[slot].role, worker.health, worker.status,
                    worker.breaker.state(now), static_cast<uint32_t>(worker.ledger.size()),
                    worker.ledger.wait_s(now), worker.ttft, index_.num_keys_of(slot)});
  }
  return rows;
}

}  // namespace baton::router
