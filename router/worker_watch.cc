#include <algorithm>
#include <map>
#include <utility>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"

#include "baton/worker/v1/cluster.grpc.pb.h"

#include "engine/process/grpc_status.h"
#include "router/grpc_legs.h"

namespace baton::router {
namespace {

constexpr uint32_t kStatusIntervalMs = 100;
constexpr absl::Duration kPauseMin = absl::Milliseconds(50);
constexpr absl::Duration kPauseMax = absl::Seconds(1);
constexpr absl::Duration kSweepInterval = absl::Milliseconds(250);

}  // namespace

struct WorkerWatch::State : public std::enable_shared_from_this<WorkerWatch::State> {
  const WorkerChannels* channels;
  Timers* timers;
  const base::Clock* clock;
  WorkerTable* table;

  base::Mutex mutex;
  base::CondVar all_ended;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::map<std::string, Stream*> streams ABSL_GUARDED_BY(mutex);  // the open ones
  std::map<std::string, absl::Duration> pauses ABSL_GUARDED_BY(mutex);

  void Open(const std::string& address);
  void OnEnded(const std::string& address, bool ever_answered, const absl::Status& status);
  void ScheduleSweep();
};

// One status stream, from its start to its end; deletes itself then.
class WorkerWatch::Stream : public grpc::ClientReadReactor<worker::v1::WorkerStatus> {
 public:
  Stream(std::shared_ptr<State> state, std::string address)
      : state_(std::move(state)), address_(std::move(address)) {
    request_.set_interval_ms(kStatusIntervalMs);
    stub_ = worker::v1::Cluster::NewStub(state_->channels->of(address_));
    stub_->async()->WatchStatus(&context_, &request_, this);
  }
  void Start() {
    StartRead(&status_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    answered_ = true;
    state_->table->OnStatus(address_, status_);
    StartRead(&status_);
  }
  void OnDone(const grpc::Status& status) override {
    state_->OnEnded(address_, answered_, process::FromGrpcStatus(status));
    delete this;
  }

 private:
  const std::shared_ptr<State> state_;
  const std::string address_;
  std::unique_ptr<worker::v1::Cluster::Stub> stub_;
  grpc::ClientContext context_;
  worker::v1::WatchStatusRequest request_;
  worker::v1::WorkerStatus status_;
  bool answered_ = false;
};

void WorkerWatch::State::Open(const std::string& address) {
  Stream* stream = nullptr;
  {
    base::MutexLock lock(&mutex);
    if (stopping) return;
    stream = new Stream(shared_from_this(), address);
    streams[address] = stream;
  }
  stream->Start();
}

void WorkerWatch::State::OnEnded(const std::string& address,
                                 bool ever_answered,
                                 const absl::Status& status) {
  bool ending = false;
  {
    base::MutexLock lock(&mutex);
    ending = stopping;
  }
  if (!ending) table->OnDown(address, status);
  base::MutexLock lock(&mutex);
  streams.erase(address);  // from here on the watch, and with it the table, may go away
  all_ended.NotifyAll();
  if (stopping) return;
  absl::Duration& pause = pauses[address];
  pause = ever_answered ? kPauseMin : std::clamp(pause * 2, kPauseMin, kPauseMax);
  timers->At(clock->Now() + pause, [state = shared_from_this(), address] { state->Open(address); });
}

void WorkerWatch::State::ScheduleSweep() {
  timers->At(clock->Now() + kSweepInterval, [state = shared_from_this()] {
    {
      base::MutexLock lock(&state->mutex);
      if (state->stopping) return;
    }
    state->table->Sweep();
    state->ScheduleSweep();
  });
}

WorkerWatch::WorkerWatch(const std::vector<std::string>& addresses,
                         const WorkerChannels* channels,
                         Timers* timers,
                         const base::Clock* clock,
                         WorkerTable* table)
    : state_(std::make_shared<State>()) {
  state_->channels = channels;
  state_->timers = timers;
  state_->clock = clock;
  state_->table = table;
  for (const std::string& address : addresses) state_->Open(address);
  state_->ScheduleSweep();
}

WorkerWatch::~WorkerWatch() {
  base::MutexLock lock(&state_->mutex);
  state_->stopping = true;
  for (const auto& [address, stream] : state_->streams) stream->Cancel();
  while (!state_->streams.empty()) state_->all_ended.Wait(&state_->mutex);
}

}  // namespace baton::router
