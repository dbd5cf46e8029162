#pragma once

// A communicator of two ranks, a prefill worker's and a decode worker's, and the staging memory
// that payload passes through on its way: a few slots on the device, each as large as the largest
// unit.

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/buffer.h"
#include "engine/base/nccl_library.h"
#include "kvtransfer/device_memory.h"

namespace baton::kvtransfer {

// While one slot is on its way the next is filled or emptied.
inline constexpr int kNcclSlots = 2;

// One rank of a pair. One thread at a time. Nothing here waits: what NCCL begins is looked after by
// Poll. Both ranks issue their operations in the same order, which the frames on the socket give.
class NcclLink {
 public:
  enum Rank { kPrefill = 0, kDecode = 1 };

  // Begins to join the communicator of `id`. Slots lie on the device that `data` lies on.
  // Errors: RESOURCE_EXHAUSTED (device memory); UNAVAILABLE saying what NCCL says.
  static absl::StatusOr<std::unique_ptr<NcclLink>> Join(const base::NcclLibrary& nccl,
                                                        const base::NcclUniqueId& id,
                                                        Rank rank,
                                                        const void* data,
                                                        size_t slot_bytes);
  // Gives up what is under way, of whatever state. An abort waits for the device, so it is made,
  // and the memory given back, on a thread of its own. Slots must not be in use by copies.
  ~NcclLink();
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  // False when those aborts have not all ended in time.
  static bool WaitForAborts(absl::Duration timeout);

  // Takes what is under way further. Errors: UNAVAILABLE saying what NCCL says, INTERNAL (device):
  // it cannot be used any more.
  absl::Status Poll();
  // The peer has joined too.
  bool joined() const { return joined_; }
  // Poll has something to look after.
  bool active() const;

  // A slot that nobody uses; -1: none.
  int TakeSlot();
  uint8_t* slot(int index) { return parts_->slots[index].staging.data(); }
  // The first `bytes` of a taken slot go to the peer; then the slot is free again.
  void Send(int index, size_t bytes);
  // ... come from it.
  void Receive(int index, size_t bytes);
  bool received(int index) const { return states_[index] == State::kReceived; }
  // Of a slot that has been taken or received.
  void GiveBack(int index) { states_[index] = State::kFree; }

 private:
  enum class State { kFree, kTaken, kQueued, kPosting, kMoving, kReceived };
  struct Operation {
    bool is_send;
    int slot;
    size_t bytes;
  };
  struct Slot {
    base::Buffer staging;
    DeviceCopier stream;
  };
  // What an abort must outlive.
  struct Parts {
    base::NcclLibrary nccl;
    base::NcclComm* comm = nullptr;
    std::vector<Slot> slots;
  };

  explicit NcclLink(const base::NcclLibrary& nccl, Rank rank)
      : peer_(rank == kPrefill ? kDecode : kPrefill), parts_(std::make_unique<Parts>()) {
    parts_->nccl = nccl;
  }
  void Issue(bool is_send, int index, size_t bytes);
  absl::Status PollSlots();
  absl::Status Post(const Operation& operation);

  const int peer_;
  std::unique_ptr<Parts> parts_;
  bool joined_ = false;
  std::array<State, kNcclSlots> states_{};
  std::array<bool, kNcclSlots> sends_{};
  std::deque<Operation> queue_;
};

}  // namespace baton::kvtransfer
