#pragma once

// The decode side of one pair: receives what is announced, in order, and copies it into the pool.

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/base/clock.h"
#include "engine/base/nccl_library.h"
#include "kvtransfer/device_memory.h"
#include "kvtransfer/nccl_link.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {

// Between two looks at what a device does, and at a peer that is to join.
inline constexpr absl::Duration kNcclPollInterval = absl::Microseconds(50);
inline constexpr absl::Duration kNcclWaitInterval = absl::Milliseconds(1);

// As large as the largest unit that a peer makes of such blocks.
size_t NcclSlotBytes(const kv::KvLayout& layout);

// The same, saying whose fault it is.
absl::Status NamedNccl(absl::string_view who, const absl::Status& status);

// One thread at a time.
class NcclPort : public PayloadPort {
 public:
  // `copier` is of the pool's device, `peer` for messages; `num_ports` counts the living.
  NcclPort(const base::NcclLibrary& nccl,
           const ListenOptions& options,
           DeviceCopier copier,
           std::string peer,
           std::atomic<int>* num_ports);
  ~NcclPort() override;

  absl::Status Join(const NcclJoinFrame& join) override;
  absl::Status Expect(uint64_t bytes) override;
  absl::Status Poll() override;
  bool arrived() const override;
  absl::Status Place(absl::Span<const ByteRange> ranges) override;
  absl::StatusOr<bool> Placed() override { return copier_.Idle(); }
  void Pop() override;
  absl::Duration poll_interval() const override;

 private:
  struct Payload {
    uint64_t bytes;
    int slot;  // -1: none is free yet
  };

  absl::Status PollLink();
  // Errors: UNAVAILABLE when nothing has come of the peer for too long.
  absl::Status CheckLate(absl::string_view what) const;

  const base::NcclLibrary nccl_;
  const base::Clock& clock_;
  base::Buffer* const pool_;
  const size_t slot_bytes_;
  const absl::Duration timeout_;
  DeviceCopier copier_;
  const std::string peer_;
  std::atomic<int>* const num_ports_;
  std::unique_ptr<NcclLink> link_;  // null: not told yet which communicator
  std::deque<Payload> expected_;
  absl::Duration progress_at_;  // when the peer last did what was waited for
};

}  // namespace baton::kvtransfer
