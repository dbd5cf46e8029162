#include "cli/simulator.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"

namespace baton::cli {
namespace {

using router::BlockKey;
using router::Placement;
using router::Verdict;

constexpr double kSmallestS = 1e-6;
const double kLogStep = std::log(1.01);
constexpr double kPumpDelayS = 0.0002;  // reports of one moment are looked at together

uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

router::Priority PriorityOf(const std::string& name) {
  return name == "high"  ? router::Priority::kHigh
         : name == "low" ? router::Priority::kLow
                         : router::Priority::kNormal;
}

// One request on its way.
struct Call {
  const TraceRequest* request = nullptr;
  uint64_t number = 0;
  std::vector<BlockKey> keys;  // of prompt and answer
  uint32_t num_prompt_keys = 0;
  double arrived_s = 0;
  double dispatched_s = 0;
  double first_token_s = -1;
  double last_token_s = 0;
  uint32_t tokens = 0;
  bool has_place = false;
  Placement placement;
  std::shared_ptr<SimSequence> on_prefill;
  std::shared_ptr<SimSequence> on_decode;
};

class World {
 public:
  World(const std::vector<TraceRequest>& trace,
        const SimOptions& options,
        std::unique_ptr<router::RoutePolicy> policy)
      : trace_(trace),
        options_(options),
        policy_(std::move(policy)),
        table_(TableOptions()),
        admission_(options.admission, policy_.get(), &table_, &clock_, clock_.clock()) {
    for (int i = 0; i < options.prefill; ++i) AddWorker(router::WorkerRole::kPrefill, i);
    for (int i = 0; i < options.decode; ++i) AddWorker(router::WorkerRole::kDecode, i);
    table_.set_on_capacity([this] { PumpSoon(); });
  }

  ~World() { Forget(std::numeric_limits<double>::infinity()); }

  SimResult Run() {
    result_.requests = trace_.size();
    open_ = trace_.size();
    // Reports of the workers are spread over the interval.
    for (size_t i = 0; i < workers_.size(); ++i) {
      Report(workers_[i].get());
      const double offset = options_.report_s * static_cast<double>(i) / workers_.size();
      clock_.After(offset, [this, i] { ReportForever(workers_[i].get()); });
    }
    clock_.After(trace_.front().arrival_s, [this] { Arrive(0); });
    while (open_ > 0 && clock_.RunNext()) {
    }
    Summarise();
    return std::move(result_);
  }

 private:
  struct Over {
    double until_s;
    std::shared_ptr<SimSequence> sequence;
  };

  router::WorkerTableOptions TableOptions() {
    router::WorkerTableOptions out;
    out.topology = options_.prefill > 0 ? router::Topology::kPd : router::Topology::kSingle;
    out.prefill_queue_tokens = options_.prefill_queue_tokens;
    out.clock = clock_.clock();
    return out;
  }

  void AddWorker(router::WorkerRole role, int index) {
    const std::string address = absl::StrCat(router::WorkerRoleName(role), "-", index);
    table_.Add(role, address);
    workers_.push_back(std::make_unique<SimWorker>(address, role, options_.speed, &clock_));
    by_address_[address] = workers_.back().get();
  }

  void Report(SimWorker* worker) {
    std::vector<BlockKey> stored, removed;
    worker->cache().TakeEvents(&stored, &removed);
    if (!stored.empty() || !removed.empty())
      table_.OnKvEvents(worker->address(), /*reset=*/false, stored, removed);
    table_.OnStatus(worker->address(), worker->Status());
  }

  void ReportForever(SimWorker* worker) {
    Report(worker);
    if (open_ > 0) clock_.After(options_.report_s, [this, worker] { ReportForever(worker); });
  }

  void PumpSoon() {
    if (std::exchange(pump_due_, true)) return;
    clock_.After(kPumpDelayS, [this] {
      pump_due_ = false;
      admission_.Pump();
    });
  }

  void Arrive(size_t i) {
    if (i + 1 < trace_.size()) {
      clock_.At(absl::Seconds(trace_[i + 1].arrival_s), [this, i] { Arrive(i + 1); });
    }
    auto call = std::make_shared<Call>();
    call->request = &trace_[i];
    call->number = i;
    call->arrived_s = absl::ToDoubleSeconds(clock_.Now());
    NameBlocks(call.get());
    Enter(call);
  }

  // A session's prompt begins with what the group's requests before it were about.
  void NameBlocks(Call* call) {
    const TraceRequest& request = *call->request;
    const uint32_t all = request.prompt_tokens + request.output_tokens;
    const uint64_t group = std::hash<std::string>()(request.prefix_group);
    const uint32_t shared = request.is_session ? all : request.prefix_tokens;
    for (uint32_t end = kSimBlockTokens; end <= all; end += kSimBlockTokens) {
      const uint64_t owner = end <= shared ? Mix(group) : Mix(~call->number);
      call->keys.push_back(Mix(owner ^ end));
    }
    call->num_prompt_keys = request.prompt_tokens / kSimBlockTokens;
  }

  void Enter(const std::shared_ptr<Call>& call) {
    router::AdmissionRequest wanted;
    wanted.tenant = call->request->tenant;
    wanted.priority = PriorityOf(call->request->priority);
    wanted.route.prompt_tokens = call->request->prompt_tokens;
    wanted.route.needs_prefill = options_.prefill > 0;
    wanted.route.needs_decode = options_.prefill == 0 || call->request->output_tokens > 1;
    wanted.keys.assign(call->keys.begin(), call->keys.begin() + call->num_prompt_keys);
    wanted.deadline = absl::Seconds(call->arrived_s + options_.deadline_s);
    wanted.resumes = call->has_place;
    const auto entered =
        admission_.Enter(std::move(wanted), [this, call](absl::StatusOr<Placement> placement) {
          if (!placement.ok()) {
            ++result_.late;
            return Close(call);
          }
          call->has_place = true;
          call->placement = *std::move(placement);
          clock_.After(options_.speed.rpc_s, [this, call] { Send(call); });
        });
    if (entered.ok()) return;
    ++result_.refused;
    Close(call);
  }

  std::shared_ptr<SimSequence> MakeSequence(const Call& call) {
    auto sequence = std::make_shared<SimSequence>();
    sequence->prompt_tokens = call.request->prompt_tokens;
    sequence->output_tokens = call.request->output_tokens;
    sequence->keys = call.keys;
    return sequence;
  }

  void Send(const std::shared_ptr<Call>& call) {
    const router::Route& route = call->placement.route;
    call->dispatched_s = absl::ToDoubleSeconds(clock_.Now()) - options_.speed.rpc_s;
    if (!route.decode.empty()) {
      SimWorker* decode = by_address_.at(route.decode);
      call->on_decode = MakeSequence(*call);
      call->on_decode->on_tokens = [this, call](uint32_t more) { OnTokens(call, more); };
      if (!route.prefill_locally && !decode->Reserve(call->on_decode)) return OnFull(call);
      clock_.After(options_.speed.rpc_s,
                   [this, call] { table_.OnReserved(call->placement.decode); });
      if (route.prefill_locally) return ComputeLocally(call, decode);
    }
    SimWorker* prefill = by_address_.at(route.prefill);
    call->on_prefill = MakeSequence(*call);
    call->on_prefill->on_computed = [this, call] { OnPrefilled(call); };
    prefill->Compute(call->on_prefill);
  }

  void OnFull(const std::shared_ptr<Call>& call) {
    ++result_.refused_by_workers;
    clock_.After(options_.speed.rpc_s, [this, call] {
      table_.Release(call->placement.prefill, Verdict::kNone);
      table_.Release(call->placement.decode, Verdict::kFull);
      Enter(call);
    });
  }

  void ComputeLocally(const std::shared_ptr<Call>& call, SimWorker* decode) {
    ++result_.local_prefills;
    call->on_decode->on_computed = [this, call, decode] {
      cached_tokens_ += call->on_decode->cached_tokens;
      call->on_decode->generated = 1;
      clock_.After(options_.speed.rpc_s, [this, call] {
        FirstToken(call);
        table_.OnComputed(call->placement.decode, call->on_decode->cached_tokens,
                          call->request->prompt_tokens, call->on_decode->compute_s);
        if (call->request->output_tokens == 1) Finish(call);
      });
      if (call->request->output_tokens > 1) decode->Generate(call->on_decode);
    };
    decode->Compute(call->on_decode);
  }

  void OnPrefilled(const std::shared_ptr<Call>& call) {
    const SimSequence& sequence = *call->on_prefill;
    cached_tokens_ += sequence.cached_tokens;
    clock_.After(options_.speed.rpc_s, [this, call] {
      FirstToken(call);
      table_.OnComputed(call->placement.prefill, call->on_prefill->cached_tokens,
                        call->request->prompt_tokens, call->on_prefill->compute_s);
      if (call->request->output_tokens == 1) Finish(call);
    });
    SimWorker* prefill = by_address_.at(call->placement.route.prefill);
    const double transfer =
        options_.speed.transfer_s + options_.speed.transfer_token_s * sequence.prompt_tokens;
    clock_.After(transfer, [this, call, prefill] {
      prefill->Release(call->on_prefill);
      if (call->on_decode == nullptr || call->request->output_tokens == 1) return;
      call->on_decode->generated = 1;
      by_address_.at(call->placement.route.decode)->Generate(call->on_decode);
    });
  }

  void FirstToken(const std::shared_ptr<Call>& call) {
    const double now = absl::ToDoubleSeconds(clock_.Now());
    call->first_token_s = call->last_token_s = now;
    call->tokens = 1;
    result_.ttft.Add(now - call->arrived_s);
    if (!call->placement.predicted) return;
    ++num_predicted_;
    error_s_ += std::abs(now - call->dispatched_s - call->placement.route.predicted_ttft_s);
  }

  // Called at the end of a step of the decode worker.
  void OnTokens(const std::shared_ptr<Call>& call, uint32_t more) {
    clock_.After(options_.speed.rpc_s, [this, call, more] {
      const double now = absl::ToDoubleSeconds(clock_.Now());
      result_.itl.Add(now - call->last_token_s);
      if (more > 1) result_.itl.Add(0, more - 1);
      call->last_token_s = now;
      call->tokens += more;
      if (call->tokens >= call->request->output_tokens) Finish(call);
    });
    if (static_cast<uint32_t>(call->on_decode->generated) >= call->request->output_tokens)
      by_address_.at(call->placement.route.decode)->Release(call->on_decode);
  }

  void Finish(const std::shared_ptr<Call>& call) {
    const TraceRequest& request = *call->request;
    if (call->on_decode != nullptr)
      by_address_.at(call->placement.route.decode)->Release(call->on_decode);
    table_.Release(call->placement.prefill, Verdict::kGood);
    table_.Release(call->placement.decode, Verdict::kGood);
    admission_.Leave();
    ++result_.completed;
    result_.output_tokens += request.output_tokens;
    last_s_ = absl::ToDoubleSeconds(clock_.Now());
    result_.e2e.Add(last_s_ - call->arrived_s);
    const double ttft = call->first_token_s - call->arrived_s;
    const double tpot = request.output_tokens == 1 ? 0
                                                   : (call->last_token_s - call->first_token_s) /
                                                         (request.output_tokens - 1);
    result_.good += ttft <= options_.slo_ttft_s && tpot <= options_.slo_tpot_s ? 1 : 0;
    Close(call);
  }

  void Close(const std::shared_ptr<Call>& call) {
    --open_;
    const double now = absl::ToDoubleSeconds(clock_.Now());
    Forget(now);
    // Workers may still be busy with them for as long as a transfer takes.
    const double until = now + 10 * options_.speed.transfer_s + 1;
    for (const auto& sequence : {call->on_prefill, call->on_decode}) {
      if (sequence != nullptr) over_.push_back({until, sequence});
    }
  }

  // The callbacks of a sequence hold its call, which holds the sequence.
  void Forget(double now) {
    for (; !over_.empty() && over_.front().until_s <= now; over_.pop_front()) {
      over_.front().sequence->on_computed = nullptr;
      over_.front().sequence->on_tokens = nullptr;
    }
  }

  void Summarise() {
    uint64_t prompt_tokens = 0;
    for (const TraceRequest& request : trace_) prompt_tokens += request.prompt_tokens;
    result_.duration_s = std::max(1e-9, last_s_ - trace_.front().arrival_s);
    result_.goodput = static_cast<double>(result_.good) / result_.duration_s;
    result_.prefix_hit_ratio = static_cast<double>(cached_tokens_) / prompt_tokens;
    if (num_predicted_ > 0) result_.prediction_error_s = error_s_ / num_predicted_;
    for (size_t i = 0; i < workers_.size(); ++i) {
      const bool is_prefill = i < static_cast<size_t>(options_.prefill);
      (is_prefill ? result_.prefill_busy : result_.decode_busy) +=
          workers_[i]->busy_s() / result_.duration_s /
          (is_prefill ? options_.prefill : options_.decode);
    }
  }

  const std::vector<TraceRequest>& trace_;
  const SimOptions& options_;
  SimClock clock_;
  const std::unique_ptr<router::RoutePolicy> policy_;
  router::WorkerTable table_;
  router::Admission admission_;
  std::vector<std::unique_ptr<SimWorker>> workers_;  // prefill workers first
  std::map<std::string, SimWorker*> by_address_;
  bool pump_due_ = false;
  std::deque<Over> over_;  // of closed calls
  size_t open_ = 0;
  double last_s_ = 0;
  uint64_t cached_tokens_ = 0;
  uint64_t num_predicted_ = 0;
  double error_s_ = 0;
  SimResult result_;
};

absl::Status Check(const std::vector<TraceRequest>& trace, const SimOptions& options) {
  if (options.decode < 1 || options.prefill < 0)
    return absl::InvalidArgumentError("workers: want at least one decode worker");
  if (trace.empty()) return absl::InvalidArgumentError("the trace has no requests");
  const WorkerSpeed& speed = options.speed;
  const uint32_t blocks = options.prefill > 0 ? std::min(speed.prefill_blocks, speed.decode_blocks)
                                              : speed.decode_blocks;
  for (const TraceRequest& request : trace) {
    const uint64_t tokens = uint64_t{request.prompt_tokens} + request.output_tokens;
    if (tokens <= std::min<uint64_t>(speed.max_model_len, uint64_t{blocks} * kSimBlockTokens))
      continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "a request of ", tokens, " tokens fits on no worker: max_model_len=", speed.max_model_len,
        " blocks=", blocks));
  }
  return absl::OkStatus();
}

bool IsBetter(const SimResult& a, const SimResult& b) {
  if (a.goodput != b.goodput) return a.goodput > b.goodput;
  return a.ttft.mean() < b.ttft.mean();
}

}  // namespace

void SimHistogram::Add(double seconds, uint64_t count) {
  const double bin = std::log(std::max(seconds, kSmallestS) / kSmallestS) / kLogStep;
  bins_[std::clamp(static_cast<int>(bin), 0, kBins - 1)] += count;
  count_ += count;
  sum_ += seconds * static_cast<double>(count);
}

double SimHistogram::Percentile(double percent) const {
  if (count_ == 0) return 0;
  const double rank = percent / 100 * static_cast<double>(count_);
  uint64_t seen = 0;
  for (int i = 0; i < kBins; ++i) {
    seen += bins_[i];
    if (static_cast<double>(seen) >= rank && seen > 0)
      return i == 0 ? 0 : kSmallestS * std::exp((i + 0.5) * kLogStep);
  }
  return kSmallestS * std::exp(kBins * kLogStep);
}

absl::StatusOr<SimResult> Simulate(const std::vector<TraceRequest>& trace,
                                   const SimOptions& options) {
  BATON_RETURN_IF_ERROR(Check(trace, options));
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<router::RoutePolicy> policy,
                         router::MakeRoutePolicy(options.policy, options.policy_options));
  return World(trace, options, std::move(policy)).Run();
}

absl::StatusOr<SplitResult> FindBestSplit(const std::vector<TraceRequest>& trace,
                                          SimOptions options,
                                          int workers) {
  if (workers < 2) return absl::InvalidArgumentError("workers: want at least 2 to split");
  std::map<int, SimResult> tried;
  int best = -1;
  const auto look = [&](int prefill) -> absl::Status {
    prefill = std::clamp(prefill, 1, workers - 1);
    if (tried.contains(prefill)) return absl::OkStatus();
    options.prefill = prefill;
    options.decode = workers - prefill;
    BATON_ASSIGN_OR_RETURN(SimResult result, Simulate(trace, options));
    tried.emplace(prefill, std::move(result));
    if (best < 0 || IsBetter(tried.at(prefill), tried.at(best))) best = prefill;
    return absl::OkStatus();
  };
  constexpr int kGrid = 7;
  int step = std::max(1, workers / (kGrid + 1));
  for (int i = 1; i <= kGrid + 1; ++i) BATON_RETURN_IF_ERROR(look(i * step));
  for (step /= 2; step >= 1; step /= 2) {
    const int center = best;
    BATON_RETURN_IF_ERROR(look(center - step));
    BATON_RETURN_IF_ERROR(look(center + step));
  }
  SplitResult out;
  out.prefill = best;
  out.decode = workers - best;
  for (const auto& [prefill, result] : tried) out.tried.emplace_back(prefill, result.goodput);
  out.result = std::move(tried.at(best));
  return out;
}

}  // namespace baton::cli
