#include <algorithm>
#include <functional>
#include <map>
#include <set>
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
// Of one message of events: more blocks than any worker has.
constexpr int kMaxKeys = 1 << 22;

// A stream of a worker: its address, and whether it is that of events.
using StreamName = std::pair<std::string, bool>;

}  // namespace

struct WorkerWatch::State : public std::enable_shared_from_this<WorkerWatch::State> {
  WorkerChannels* channels;
  Timers* timers;
  const base::Clock* clock;
  WorkerTable* table;

  base::Mutex mutex;
  base::CondVar all_ended;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  std::set<std::string> watched ABSL_GUARDED_BY(mutex);
  std::map<StreamName, std::function<void()>> open ABSL_GUARDED_BY(mutex);  // how to cancel each
  std::map<StreamName, absl::Duration> pauses ABSL_GUARDED_BY(mutex);

  void Open(const StreamName& name);
  void OnEnded(const StreamName& name, bool ever_answered, const absl::Status& status);
  void OnMessage(const StreamName& name, const worker::v1::WorkerStatus& status) {
    table->OnStatus(name.first, status);
  }
  void OnMessage(const StreamName& name, const worker::v1::KvEvents& events) {
    if (events.stored_size() > kMaxKeys || events.removed_size() > kMaxKeys) return;
    table->OnKvEvents(name.first, events.reset(),
                      {events.stored().data(), static_cast<size_t>(events.stored_size())},
                      {events.removed().data(), static_cast<size_t>(events.removed_size())});
  }
  void ScheduleSweep();
};

// One stream, from its start to its end; deletes itself then.
template <typename Message>
class WorkerWatch::Stream : public grpc::ClientReadReactor<Message> {
 public:
  Stream(std::shared_ptr<State> state, StreamName name)
      : state_(std::move(state)), name_(std::move(name)), use_(state_->channels) {
    stub_ = worker::v1::Cluster::NewStub(state_->channels->of(name_.first));
    status_request_.set_interval_ms(kStatusIntervalMs);
    Bind(this);
  }
  void Start() {
    this->StartRead(&message_);
    this->StartCall();
  }
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    answered_ = true;
    state_->OnMessage(name_, message_);
    this->StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    // Until it is told, the state may cancel the stream: so not before.
    state_->OnEnded(name_, answered_, process::FromGrpcStatus(status));
    delete this;
  }

 private:
  void Bind(grpc::ClientReadReactor<worker::v1::WorkerStatus>* reactor) {
    stub_->async()->WatchStatus(&context_, &status_request_, reactor);
  }
  void Bind(grpc::ClientReadReactor<worker::v1::KvEvents>* reactor) {
    stub_->async()->WatchKvEvents(&context_, &events_request_, reactor);
  }

  const std::shared_ptr<State> state_;
  const StreamName name_;
  const WorkerChannels::Use use_;
  std::unique_ptr<worker::v1::Cluster::Stub> stub_;
  grpc::ClientContext context_;
  worker::v1::WatchStatusRequest status_request_;
  worker::v1::WatchKvEventsRequest events_request_;
  Message message_;
  bool answered_ = false;
};

void WorkerWatch::State::Open(const StreamName& name) {
  std::function<void()> start;
  {
    base::MutexLock lock(&mutex);
    if (stopping || !watched.contains(name.first) || open.contains(name)) return;
    const auto make = [&start](auto* stream) -> std::function<void()> {
      start = [stream] { stream->Start(); };
      return [stream] { stream->Cancel(); };
    };
    open[name] = name.second ? make(new Stream<worker::v1::KvEvents>(shared_from_this(), name))
                             : make(new Stream<worker::v1::WorkerStatus>(shared_from_this(), name));
  }
  start();
}

void WorkerWatch::State::OnEnded(const StreamName& name,
                                 bool ever_answered,
                                 const absl::Status& status) {
  bool told = false;
  {
    base::MutexLock lock(&mutex);
    told = !stopping && watched.contains(name.first) && !name.second;
  }
  if (told) table->OnDown(name.first, status);
  base::MutexLock lock(&mutex);
  open.erase(name);  // from here on the watch, and with it the table, may go away
  all_ended.NotifyAll();
  if (stopping || !watched.contains(name.first)) return;
  absl::Duration& pause = pauses[name];
  pause = ever_answered ? kPauseMin : std::clamp(pause * 2, kPauseMin, kPauseMax);
  timers->At(clock->Now() + pause, [state = shared_from_this(), name] { state->Open(name); });
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

WorkerWatch::WorkerWatch(WorkerChannels* channels,
                         Timers* timers,
                         const base::Clock* clock,
                         WorkerTable* table)
    : state_(std::make_shared<State>()) {
  state_->channels = channels;
  state_->timers = timers;
  state_->clock = clock;
  state_->table = table;
  state_->ScheduleSweep();
}

// Streams of an earlier watch that are still ending open again when they have.
void WorkerWatch::Watch(WorkerRole role, const std::string& address) {
  {
    base::MutexLock lock(&state_->mutex);
    if (!state_->watched.insert(address).second) return;
  }
  state_->table->Add(role, address);
  state_->Open({address, false});
  state_->Open({address, true});
}

void WorkerWatch::Unwatch(const std::string& address) {
  {
    base::MutexLock lock(&state_->mutex);
    if (state_->watched.erase(address) == 0) return;
    for (const bool events : {false, true}) {
      const auto found = state_->open.find({address, events});
      if (found != state_->open.end()) found->second();
      state_->pauses.erase({address, events});
    }
  }
  state_->table->Remove(address);
  state_->channels->Forget(address);
}

WorkerWatch::~WorkerWatch() {
  base::MutexLock lock(&state_->mutex);
  state_->stopping = true;
  for (const auto& [name, cancel] : state_->open) cancel();
  while (!state_->open.empty()) state_->all_ended.Wait(&state_->mutex);
}

}  // namespace baton::router
