// The sending side of WorkerTable: where requests go, what they take up there, how they ended.

#include <algorithm>
#include <utility>

#include "engine/process/fingerprint.h"
#include "router/worker_table.h"

namespace baton::router {

void WorkerTable::RefreshTimes(absl::Duration now) {
  bool any_prefill = false, any_decode = false;  // that is ready and may be sent to
  for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
    WorkerView& view = views_[slot];
    view.wait_s = workers_[slot].ledger.wait_s(now);
    view.tripped = !workers_[slot].breaker.Allows(now);
    if (view.health != WorkerHealth::kReady || view.tripped) continue;
    (view.role == WorkerRole::kPrefill ? any_prefill : any_decode) = true;
  }
  for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
    WorkerView& view = views_[slot];
    const bool any = view.role == WorkerRole::kPrefill ? any_prefill : any_decode;
    if (view.tripped && !any) view.tripped = !workers_[slot].breaker.AllowsAlone(now);
  }
}

WorkId WorkerTable::Book(const WorkerView& view,
                         const RouteRequest& request,
                         bool computes,
                         absl::Duration now) {
  Worker& worker = workers_[view.slot];
  Work work;
  const uint32_t missing = request.prompt_tokens - CachedTokens(view, request);
  work.tokens = missing;
  if (view.role == WorkerRole::kDecode) {
    work.blocks =
        (request.prompt_tokens + view.block_tokens - 1) / view.block_tokens + request.num_choices;
    work.tokens = uint64_t{work.blocks} * view.block_tokens;
  }
  if (computes) {
    work.compute_s =
        std::max(1e-9, view.ttft.Seconds(CachedTokens(view, request), request.prompt_tokens));
    work.is_long = request.is_long;
  }
  const WorkId id{view.slot, next_work_++};
  worker.ledger.Add(id.id, work, now);
  worker.breaker.OnSent(now);
  UpdateView(view.slot);
  return id;
}

absl::StatusOr<Placement> WorkerTable::Place(const RoutePolicy& policy,
                                             RouteRequest request,
                                             absl::Span<const BlockKey> keys) {
  base::MutexLock lock(&mutex_);
  const absl::Duration now = options_.clock->Now();
  RefreshTimes(now);
  request.ticket = next_work_;
  if (!keys.empty())
    request.cached_blocks = index_.Match(keys, static_cast<uint32_t>(workers_.size()), now);
  absl::StatusOr<Route> route = policy.Choose(views_, request);
  if (!route.ok()) return route.status();
  Placement placement;
  const absl::Duration until = now + options_.prefix_assumed;
  if (!route->prefill.empty()) {
    const WorkerView& view = views_[slots_.at(route->prefill)];
    placement.predicted = workers_[view.slot].ttft.fitted();
    placement.prefill = Book(view, request, /*computes=*/true, now);
    index_.Assume(view.slot, keys, until);
  }
  if (!route->decode.empty()) {
    const WorkerView& view = views_[slots_.at(route->decode)];
    if (route->prefill_locally) placement.predicted = workers_[view.slot].ttft.fitted();
    placement.decode = Book(view, request, route->prefill_locally, now);
    index_.Assume(view.slot, keys, until);
  }
  prompt_blocks_ += keys.size();
  hit_blocks_ += route->cached_tokens / views_[0].block_tokens;
  if (prompt_blocks_ > 0)
    prefix_hit_ratio_.Set(static_cast<double>(hit_blocks_) / static_cast<double>(prompt_blocks_));
  decision_time_.Observe(absl::ToDoubleSeconds(options_.clock->Now() - now));
  placement.route = *std::move(route);
  return placement;
}

bool WorkerTable::CanPlace(const RoutePolicy& policy, const RouteRequest& request) const {
  base::MutexLock lock(&mutex_);
  return policy.Choose(views_, request).ok();
}

WorkerTable::Prediction WorkerTable::Predict(RouteRequest request,
                                             absl::Span<const BlockKey> keys) const {
  base::MutexLock lock(&mutex_);
  const absl::Duration now = options_.clock->Now();
  if (!keys.empty())
    request.cached_blocks = index_.Match(keys, static_cast<uint32_t>(workers_.size()), now);
  const WorkerRole role = request.needs_prefill ? WorkerRole::kPrefill : WorkerRole::kDecode;
  Prediction out;
  for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
    const WorkerView& view = views_[slot];
    if (view.role != role || view.health != WorkerHealth::kReady) continue;
    out.fitted |= workers_[slot].ttft.fitted();
    const uint32_t cached = CachedTokens(view, request);
    out.cached_tokens = std::max(out.cached_tokens, cached);
    const double compute = view.ttft.Seconds(cached, request.prompt_tokens);
    const double ttft = workers_[slot].ledger.wait_s(now) + compute;
    if (out.num_workers++ > 0 && ttft >= out.ttft_s) continue;
    out.ttft_s = ttft;
    out.compute_s = compute;
  }
  return out;
}

void WorkerTable::OnReserved(const WorkId& work) {
  base::MutexLock lock(&mutex_);
  if (work.slot < workers_.size()) workers_[work.slot].ledger.OnReserved(work.id);
}

void WorkerTable::OnComputed(const WorkId& work,
                             uint32_t cached,
                             uint32_t prompt_tokens,
                             double compute_s) {
  {
    base::MutexLock lock(&mutex_);
    if (work.slot >= workers_.size() || work.id == 0) return;
    Worker& worker = workers_[work.slot];
    const absl::Duration now = options_.clock->Now();
    worker.ledger.OnComputed(work.id, now);
    // The KV of a prompt that decode computes stays there; prefill is done with its tokens.
    if (views_[work.slot].role == WorkerRole::kPrefill && worker.ledger.Remove(work.id, now))
      worker.breaker.OnSuccess();
    if (compute_s >= 0) worker.ttft.Observe(cached, prompt_tokens, compute_s);
    UpdateView(work.slot);
  }
  NotifyCapacity();
}

void WorkerTable::Release(const WorkId& work, Verdict verdict) {
  {
    base::MutexLock lock(&mutex_);
    if (work.slot >= workers_.size() || work.id == 0) return;
    Worker& worker = workers_[work.slot];
    const absl::Duration now = options_.clock->Now();
    // A prefill worker may still fail behind its first token: that is a verdict too.
    const bool booked = worker.ledger.Remove(work.id, now);
    if (booked && verdict == Verdict::kGood) worker.breaker.OnSuccess();
    if (verdict == Verdict::kFailed && worker.known) worker.breaker.OnFailure(now);
    if (booked && verdict == Verdict::kNone) worker.breaker.OnNoVerdict();
    if (booked && verdict == Verdict::kFull) {
      worker.breaker.OnSuccess();
      views_[work.slot].full = true;
      worker.full_load = worker.status.load().SerializeAsString();
      worker.full_since = now;
    }
    UpdateView(work.slot);
    if (verdict == Verdict::kFailed) PublishBreaker(work.slot);
  }
  NotifyCapacity();
}

bool WorkerTable::IsAlive(const std::string& address) const {
  base::MutexLock lock(&mutex_);
  const auto found = slots_.find(address);
  return found != slots_.end() && workers_[found->second].health != WorkerHealth::kDown;
}

std::vector<WorkerView> WorkerTable::Snapshot() const {
  base::MutexLock lock(&mutex_);
  std::vector<WorkerView> views;
  for (uint32_t slot = 0; slot < workers_.size(); ++slot) {
    if (workers_[slot].known) views.push_back(views_[slot]);
  }
  return views;
}

std::optional<kv::BlockHasher> WorkerTable::MakeHasher(const std::string& salt) const {
  base::MutexLock lock(&mutex_);
  for (const WorkerView& view : views_) {
    if (view.health != WorkerHealth::kReady) continue;
    const absl::StatusOr<kv::KvFormat> format = kv::ParseKvFormat(view.fingerprint->kv_dtype());
    if (format.ok())
      return kv::BlockHasher(process::FingerprintKey(*view.fingerprint), *format, salt);
  }
  return std::nullopt;
}

}  // namespace baton::router
