#include "cli/bench_client.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

#include "baton/v1/generation.grpc.pb.h"

#include "cli/load_plan.h"
#include "engine/base/mutex.h"
#include "engine/process/channel.h"

namespace baton::cli {
namespace {

using SteadyClock = std::chrono::steady_clock;

v1::Priority PriorityOf(const std::string& name) {
  if (name == "high") return v1::PRIORITY_HIGH;
  return name == "low" ? v1::PRIORITY_LOW : v1::PRIORITY_NORMAL;
}

std::string CodeName(const grpc::Status& status) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(status.error_code()));
}

class Run;

// One answer, read as it comes. Deletes itself at its end.
class Call : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Call(Run* run, size_t number, double due) : run_(run), number_(number) { record_.due = due; }
  void Start(v1::Generation::Stub* stub);
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  Run* const run_;
  const size_t number_;
  BenchRecord record_;
  grpc::ClientContext context_;
  v1::GenerateRequest request_;
  v1::GenerateResponse response_;
};

class Run {
 public:
  Run(const std::vector<TraceRequest>& plan, const BenchClientOptions& options)
      : plan_(plan), options_(options), records_(plan.size()) {
    for (int i = 0; i < std::max(1, options.channels); ++i) {
      stubs_.push_back(
          v1::Generation::NewStub(process::MakeChannel(options.address, options.access.security)));
    }
  }

  // Which model it is; connects all channels, so that no request waits for that.
  absl::StatusOr<v1::GetModelInfoResponse> Connect() {
    v1::GetModelInfoResponse info;
    for (const auto& stub : stubs_) {
      grpc::ClientContext context;
      Authorize(&context);
      context.set_wait_for_ready(true);
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
      const grpc::Status status = stub->GetModelInfo(&context, v1::GetModelInfoRequest(), &info);
      if (!status.ok()) {
        return absl::UnavailableError(absl::StrCat(options_.address, ": ", status.error_message()));
      }
    }
    return info;
  }

  std::vector<BenchRecord> Execute(uint32_t vocab_size) {
    vocab_size_ = vocab_size;
    start_ = SteadyClock::now();
    if (options_.concurrency > 0) {
      const size_t at_once = std::min<size_t>(options_.concurrency, plan_.size());
      for (size_t i = 0; i < at_once; ++i) StartNext(0);
    } else {
      for (const TraceRequest& request : plan_) {
        std::this_thread::sleep_until(start_ +
                                      std::chrono::duration_cast<SteadyClock::duration>(
                                          std::chrono::duration<double>(request.arrival_s)));
        StartNext(request.arrival_s);
      }
    }
    base::MutexLock lock(&mutex_);
    while (ended_ < plan_.size()) changed_.Wait(&mutex_);
    return std::move(records_);
  }

  void Ended(size_t number, BenchRecord record) {
    const double now = record.end;
    {
      base::MutexLock lock(&mutex_);
      records_[number] = std::move(record);
      ++ended_;
      // Under the lock: the run may be gone as soon as it is released.
      if (ended_ == plan_.size()) changed_.NotifyAll();
      if (options_.concurrency == 0 || started_ == plan_.size()) return;
    }
    StartNext(now);  // its place is free: the next is due
  }

  void Authorize(grpc::ClientContext* context) const {
    const std::string& token = options_.access.token;
    if (!token.empty()) context->AddMetadata("authorization", absl::StrCat("Bearer ", token));
  }
  double Now() const { return std::chrono::duration<double>(SteadyClock::now() - start_).count(); }
  v1::GenerateRequest RequestOf(size_t number) const;
  const TraceRequest& plan(size_t number) const { return plan_[number]; }
  absl::Duration timeout() const { return options_.timeout; }

 private:
  void StartNext(double due) {
    size_t number = 0;
    {
      base::MutexLock lock(&mutex_);
      if (started_ == plan_.size()) return;
      number = started_++;
    }
    (new Call(this, number, due))->Start(stubs_[number % stubs_.size()].get());
  }

  const std::vector<TraceRequest>& plan_;
  const BenchClientOptions& options_;
  std::vector<std::unique_ptr<v1::Generation::Stub>> stubs_;
  uint32_t vocab_size_ = 1;
  SteadyClock::time_point start_;
  base::Mutex mutex_;
  base::CondVar changed_;
  std::vector<BenchRecord> records_ ABSL_GUARDED_BY(mutex_);
  size_t started_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
};

v1::GenerateRequest Run::RequestOf(size_t number) const {
  const TraceRequest& wanted = plan_[number];
  v1::GenerateRequest request;
  const std::vector<uint32_t> ids = PromptIds(wanted, number, options_.seed, vocab_size_);
  request.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  request.set_priority(PriorityOf(wanted.priority));
  v1::SamplingParams* sampling = request.mutable_sampling();
  sampling->set_max_tokens(wanted.output_tokens);
  sampling->set_ignore_eos(true);
  sampling->set_temperature(static_cast<float>(options_.temperature));
  sampling->set_seed(options_.seed + number);
  return request;
}

void Call::Start(v1::Generation::Stub* stub) {
  const TraceRequest& wanted = run_->plan(number_);
  request_ = run_->RequestOf(number_);
  record_.prompt_tokens = wanted.prompt_tokens;
  record_.wanted_tokens = wanted.output_tokens;
  if (!wanted.tenant.empty()) context_.AddMetadata("x-llm-d-inference-fairness-id", wanted.tenant);
  record_.sent = run_->Now();
  const double left = absl::ToDoubleSeconds(run_->timeout()) - (record_.sent - record_.due);
  run_->Authorize(&context_);
  context_.set_deadline(std::chrono::system_clock::now() +
                        std::chrono::duration_cast<std::chrono::system_clock::duration>(
                            std::chrono::duration<double>(left)));
  stub->async()->Generate(&context_, &request_, this);
  StartRead(&response_);
  StartCall();
}

void Call::OnReadDone(bool ok) {
  if (!ok) return;
  record_.Arrived(run_->Now(), static_cast<uint32_t>(response_.token_ids_size()));
  if (response_.has_finished() && response_.finished().has_usage()) {
    record_.prompt_tokens = response_.finished().usage().prompt_tokens();
    record_.cached_tokens = response_.finished().usage().cached_prompt_tokens();
    record_.retries = response_.finished().timings().retries();
  }
  StartRead(&response_);
}

void Call::OnDone(const grpc::Status& status) {
  Run* const run = run_;
  const size_t number = number_;
  BenchRecord record = std::move(record_);
  record.end = run->Now();
  record.code = CodeName(status);
  delete this;  // first: see process::MakeChannel
  run->Ended(number, std::move(record));
}

}  // namespace

absl::StatusOr<BenchRun> RunPlan(const std::vector<TraceRequest>& plan,
                                 const BenchClientOptions& options) {
  Run run(plan, options);
  absl::StatusOr<v1::GetModelInfoResponse> info = run.Connect();
  if (!info.ok()) return info.status();
  BenchRun out;
  out.model = info->name();
  // Control tokens stand at the end of every vocabulary.
  out.records = run.Execute(info->vocab_size() - info->vocab_size() / 10);
  return out;
}

}  // namespace baton::cli
