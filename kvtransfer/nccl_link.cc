#include "kvtransfer/nccl_link.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mutex.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

// Blocks of threads that carry a pair's bytes: they are taken from the model's work.
constexpr int kMaxCtas = 4;
constexpr absl::Duration kExitTimeout = absl::Seconds(2);

// Threads that abort communicators. A thread each, so that one that never comes back holds up
// nobody. Thread-safe.
class NcclAborts {
 public:
  static NcclAborts& Get() {
    static NcclAborts* const aborts = [] {
      // None must be in the driver when the process takes it down.
      std::atexit([] { Get().Wait(kExitTimeout); });
      return new NcclAborts;
    }();
    return *aborts;
  }
  void Run(std::function<void()> abort) {
    {
      base::MutexLock lock(&mutex_);
      ++running_;
    }
    std::thread([this, abort = std::move(abort)]() mutable {
      abort();
      abort = nullptr;  // what it owns is given back before anyone is told
      base::MutexLock lock(&mutex_);
      --running_;
      ended_.NotifyAll();
    }).detach();
  }
  bool Wait(absl::Duration timeout) {
    const absl::Duration deadline = base::Clock::Real().Now() + timeout;
    base::MutexLock lock(&mutex_);
    while (running_ > 0) {
      const absl::Duration left = deadline - base::Clock::Real().Now();
      if (left <= absl::ZeroDuration()) return false;
      ended_.WaitFor(&mutex_, left);
    }
    return true;
  }

 private:
  base::Mutex mutex_;
  base::CondVar ended_;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<NcclLink>> NcclLink::Join(const base::NcclLibrary& nccl,
                                                         const base::NcclUniqueId& id,
                                                         Rank rank,
                                                         const void* data,
                                                         size_t slot_bytes) {
  std::unique_ptr<NcclLink> link(new NcclLink(nccl, rank));
  for (int i = 0; i < kNcclSlots; ++i) {
    BATON_ASSIGN_OR_RETURN(DeviceCopier stream, DeviceCopier::Create(data));
    BATON_ASSIGN_OR_RETURN(base::Buffer staging,
                           base::AllocateOnDevice(stream.device().ordinal(), slot_bytes));
    link->parts_->slots.push_back({std::move(staging), std::move(stream)});
  }
  BATON_RETURN_IF_ERROR(link->parts_->slots[0].stream.device().Use());
  base::NcclConfig config;
  config.blocking = 0;
  config.min_ctas = 1;
  config.max_ctas = kMaxCtas;
  const base::NcclResult begun = nccl.init(&link->parts_->comm, kDecode + 1, id, rank, &config);
  BATON_RETURN_IF_ERROR(base::NcclStatus(nccl, begun, nullptr, "join the communicator"));
  return link;
}

NcclLink::~NcclLink() {
  if (parts_->comm == nullptr) return;
  std::shared_ptr<Parts> parts(std::move(parts_));  // shared, as functions must be copyable
  NcclAborts::Get().Run([parts] {
    const absl::Status on_device = parts->slots[0].stream.device().Use();
    const absl::Status aborted =
        base::NcclStatus(parts->nccl, parts->nccl.abort(parts->comm), nullptr, "abort");
    for (const absl::Status& status : {on_device, aborted}) {
      if (!status.ok()) BATON_LOG(Warning, "nccl transport ", LogField("reason", status.message()));
    }
  });
}

bool NcclLink::WaitForAborts(absl::Duration timeout) { return NcclAborts::Get().Wait(timeout); }

bool NcclLink::active() const {
  return !joined_ || !queue_.empty() ||
         std::any_of(states_.begin(), states_.end(), [](State state) {
           return state == State::kPosting || state == State::kMoving;
         });
}

int NcclLink::TakeSlot() {
  for (int i = 0; i < kNcclSlots; ++i) {
    if (states_[i] != State::kFree) continue;
    states_[i] = State::kTaken;
    return i;
  }
  return -1;
}

void NcclLink::Send(int index, size_t bytes) { Issue(/*is_send=*/true, index, bytes); }
void NcclLink::Receive(int index, size_t bytes) { Issue(/*is_send=*/false, index, bytes); }

void NcclLink::Issue(bool is_send, int index, size_t bytes) {
  BATON_CHECK(states_[index] == State::kTaken && bytes <= parts_->slots[index].staging.size());
  states_[index] = State::kQueued;
  sends_[index] = is_send;
  queue_.push_back({is_send, index, bytes});
}

absl::Status NcclLink::Poll() {
  const base::NcclLibrary& nccl = parts_->nccl;
  BATON_RETURN_IF_ERROR(parts_->slots[0].stream.device().Use());
  base::NcclResult state = base::kNcclSuccess;
  BATON_RETURN_IF_ERROR(
      base::NcclStatus(nccl, nccl.async_error(parts_->comm, &state), parts_->comm, "state"));
  BATON_RETURN_IF_ERROR(base::NcclStatus(nccl, state, parts_->comm, "communicator"));
  // Until the last call has ended the communicator takes no other, and the streams do not have it.
  if (state == base::kNcclInProgress) return absl::OkStatus();
  joined_ = true;
  BATON_RETURN_IF_ERROR(PollSlots());
  while (!queue_.empty()) {
    const Operation next = queue_.front();
    queue_.pop_front();
    BATON_RETURN_IF_ERROR(Post(next));
    if (states_[next.slot] == State::kPosting) break;
  }
  return absl::OkStatus();
}

absl::Status NcclLink::PollSlots() {
  for (int i = 0; i < kNcclSlots; ++i) {
    if (states_[i] == State::kPosting) states_[i] = State::kMoving;
    if (states_[i] != State::kMoving) continue;
    BATON_ASSIGN_OR_RETURN(const bool idle, parts_->slots[i].stream.Idle());
    if (idle) states_[i] = sends_[i] ? State::kFree : State::kReceived;
  }
  return absl::OkStatus();
}

absl::Status NcclLink::Post(const Operation& operation) {
  const base::NcclLibrary& nccl = parts_->nccl;
  Slot& slot = parts_->slots[operation.slot];
  uint8_t* const data = slot.staging.data();
  base::CuStream* const stream = slot.stream.stream();
  const base::NcclResult result =
      operation.is_send
          ? nccl.send(data, operation.bytes, base::kNcclBytes, peer_, parts_->comm, stream)
          : nccl.receive(data, operation.bytes, base::kNcclBytes, peer_, parts_->comm, stream);
  BATON_RETURN_IF_ERROR(
      base::NcclStatus(nccl, result, parts_->comm, operation.is_send ? "send" : "receive"));
  states_[operation.slot] = result == base::kNcclInProgress ? State::kPosting : State::kMoving;
  return absl::OkStatus();
}

}  // namespace baton::kvtransfer
