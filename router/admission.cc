#include "router/admission.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/process/grpc_status.h"

namespace baton::router {
namespace {

// With less than this no worker is asked any more.
constexpr absl::Duration kLeastTimeLeft = absl::Milliseconds(1);
constexpr absl::Duration kRetryMin = absl::Milliseconds(50);
constexpr absl::Duration kRetryMax = absl::Minutes(1);
constexpr absl::Duration kRetryUnknown = absl::Seconds(1);  // before anything was measured

QueueEntry EntryOf(Admission::Id id,
                   const AdmissionRequest& request,
                   const WorkerTable::Prediction& prediction) {
  QueueEntry entry;
  entry.id = id;
  entry.tenant = request.tenant;
  entry.priority = request.priority;
  entry.lane = request.route.is_long ? Lane::kLong : Lane::kShort;
  // What it costs its tenant is what it costs a worker.
  entry.cost = std::max(1e-9, prediction.compute_s);
  entry.urgent = request.resumes;
  return entry;
}

}  // namespace

absl::StatusOr<Admission::Id> Admission::Enter(AdmissionRequest request, Done done) {
  Id id = 0;
  {
    base::MutexLock lock(&mutex_);
    id = next_id_++;
    const WorkerTable::Prediction prediction = table_->Predict(request.route, request.keys);
    request.route.is_long =
        request.route.prompt_tokens - prediction.cached_tokens > options_.long_prompt_tokens;
    const QueueEntry entry = EntryOf(id, request, prediction);
    if (!request.resumes) {
      const absl::Status in_time = CheckInTime(request, entry, prediction);
      if (!in_time.ok()) return in_time;
      const bool waits = running_ >= options_.max_running || !queue_.empty();
      if (waits && static_cast<int>(queue_.size()) >= options_.max_queue)
        return QueueFull(prediction);
    }
    queue_.Push(entry);
    Waiting& waiting = waiting_[id];
    waiting.done = std::move(done);
    waiting.since = clock_->Now();
    waiting.timer = timers_->At(request.deadline, [this, id] { Expire(id); });
    waiting.request = std::move(request);
    empty_.store(false);
    PublishDepth();
  }
  Pump();
  return id;
}

// Only a queue makes a request late: what a worker needs for it alone is the client's to judge, and
// if a wrong prediction refused it, nothing would ever put that prediction right.
absl::Status Admission::CheckInTime(const AdmissionRequest& request,
                                    const QueueEntry& entry,
                                    const WorkerTable::Prediction& prediction) const {
  if (!options_.refuse_late || !prediction.fitted || prediction.num_workers == 0)
    return absl::OkStatus();
  const double queued = queue_.CostAhead(entry) / prediction.num_workers;
  const double wait = queued + prediction.ttft_s - prediction.compute_s;
  const absl::Duration left = std::min(request.deadline, request.first_token_by) - clock_->Now();
  const absl::Duration late = absl::Seconds(wait + prediction.compute_s) - left;
  if (wait <= 0 || late <= absl::ZeroDuration()) return absl::OkStatus();
  absl::Status status = absl::ResourceExhaustedError(
      absl::StrCat("predicted first token: in ",
                   absl::FormatDuration(absl::Seconds(wait + prediction.compute_s)), ", wanted in ",
                   absl::FormatDuration(left), ": waiting=", queue_.size()));
  status = process::WithErrorInfo(std::move(status), kPredictedLate,
                                  {{"predicted_ttft_s", absl::StrCat(wait + prediction.compute_s)},
                                   {"predicted_wait_s", absl::StrCat(wait)}});
  return process::WithRetryInfo(
      std::move(status), std::clamp(std::min(late, absl::Seconds(wait)), kRetryMin, kRetryMax));
}

// The client should come back when what waits now has been served.
absl::Status Admission::QueueFull(const WorkerTable::Prediction& prediction) const {
  absl::Duration delay = kRetryUnknown;
  if (prediction.fitted && prediction.num_workers > 0) {
    delay = std::clamp(absl::Seconds(queue_.cost() / prediction.num_workers), kRetryMin, kRetryMax);
  }
  return process::WithRetryInfo(absl::ResourceExhaustedError(absl::StrCat(
                                    "queue full: waiting=", queue_.size(), " running=", running_)),
                                delay);
}

bool Admission::Cancel(Id id) {
  Waiting gone;
  {
    base::MutexLock lock(&mutex_);
    if (!queue_.Remove(id)) return false;
    gone = Extract(id);
    timers_->Cancel(gone.timer);
  }
  Pump();  // it may have stood before others
  return true;
}

void Admission::Leave() {
  {
    base::MutexLock lock(&mutex_);
    --running_;
  }
  Pump();
}

void Admission::Pump() {
  while (!empty_.load()) {
    Granted granted;
    {
      base::MutexLock lock(&mutex_);
      if (!TakeNext(&granted)) return;
    }
    granted.done(std::move(granted.placement));
  }
}

bool Admission::TakeNext(Granted* out) {
  const QueueEntry* shorts = queue_.Peek(Lane::kShort);
  const QueueEntry* longs = queue_.Peek(Lane::kLong);
  const auto rank = [](const QueueEntry* entry) {
    return std::make_tuple(entry == nullptr, entry != nullptr && !entry->urgent,
                           entry == nullptr ? Priority::kLow : entry->priority,
                           entry == nullptr ? 0 : entry->id);
  };
  const Lane first = rank(longs) < rank(shorts) ? Lane::kLong : Lane::kShort;
  const Lane second = first == Lane::kLong ? Lane::kShort : Lane::kLong;
  const Tried tried = TryLane(first, out);
  return tried == Tried::kTaken ||
         (tried == Tried::kBlocked && TryLane(second, out) == Tried::kTaken);
}

Admission::Tried Admission::TryLane(Lane lane, Granted* out) {
  const QueueEntry* entry = queue_.Peek(lane);
  if (entry == nullptr) return Tried::kBlocked;
  Waiting& waiting = waiting_.at(entry->id);
  const bool needs_place = !waiting.request.resumes;
  // Those whose deadlines pass together would else be sent one after the other, each in the room of
  // the one before.
  const bool late = waiting.request.deadline - clock_->Now() < kLeastTimeLeft;
  if (!late && needs_place && running_ >= options_.max_running) return Tried::kBlocked;
  absl::StatusOr<Placement> placement =
      late ? absl::DeadlineExceededError("too little time is left to begin")
           : table_->Place(*policy_, waiting.request.route, waiting.request.keys);
  if (absl::IsResourceExhausted(placement.status())) {
    if (clock_->Now() - waiting.since < options_.patience) return Tried::kBlocked;
    // Those of the other lane would take the blocks it waits for, for ever. Prefill workers are
    // another matter: there, lanes are apart.
    RouteRequest decode_only = waiting.request.route;
    decode_only.needs_prefill = false;
    decode_only.is_long = false;
    const bool wants_blocks = decode_only.needs_decode && !table_->CanPlace(*policy_, decode_only);
    return wants_blocks ? Tried::kBlocksAll : Tried::kBlocked;
  }
  const Id id = entry->id;
  if (late) {
    queue_.Remove(id);  // its tenant has had nothing for it
  } else {
    queue_.Pop(lane);
  }
  if (placement.ok() && needs_place) ++running_;
  Waiting taken = Extract(id);
  timers_->Cancel(taken.timer);
  out->done = std::move(taken.done);
  out->placement = std::move(placement);
  return Tried::kTaken;
}

Admission::Waiting Admission::Extract(Id id) {
  const auto found = waiting_.find(id);
  Waiting out = std::move(found->second);
  waiting_.erase(found);
  empty_.store(waiting_.empty());
  PublishDepth();
  return out;
}

void Admission::Expire(Id id) {
  Waiting expired;
  {
    base::MutexLock lock(&mutex_);
    if (!queue_.Remove(id)) return;
    expired = Extract(id);
  }
  expired.done(absl::DeadlineExceededError("the deadline passed in the router's queue"));
  Pump();
}

int Admission::num_running() const {
  base::MutexLock lock(&mutex_);
  return running_;
}

int Admission::num_waiting() const {
  base::MutexLock lock(&mutex_);
  return static_cast<int>(waiting_.size());
}

void Admission::PublishDepth() {
  for (int p = 0; p < kNumPriorities; ++p)
    options_.queue_depth[p].Set(static_cast<double>(queue_.size(static_cast<Priority>(p))));
}

}  // namespace baton::router
