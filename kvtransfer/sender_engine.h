#pragma once

// One connection's sender without its thread: the table of hand-overs, the transport, heartbeats.
// sender.cc drives it in a worker, a simulator can do so step by step.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/mutex.h"
#include "kvtransfer/link_slot.h"
#include "kvtransfer/sender.h"
#include "kvtransfer/sender_table.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {

// Thread-safe as a Sender; the rest belongs to one transfer thread.
class SenderEngine : public Sender {
 public:
  // `transport` is connected and its probe came to `bytes_per_second`.
  SenderEngine(const SenderOptions& options,
               absl::string_view peer_incarnation,
               PeerLink* link,
               std::unique_ptr<PutTransport> transport,
               double bytes_per_second);

  // Sender.
  TransferId Begin(TransferSpec spec) override;
  void Push(TransferId id,
            int block_begin,
            int block_end,
            int layer_begin,
            int layer_end,
            absl::Span<const kv::BlockId> our_blocks) override;
  void Commit(TransferId id, std::vector<worker::v1::Token> first_tokens) override;
  void Abort(TransferId id, absl::string_view reason) override;
  void OnMessage(const worker::v1::PeerMessage& message) override;
  void OnPeerGone(const absl::Status& reason) override;
  std::string transport_name() const override { return transport_name_; }
  double probe_bytes_per_second() const override { return probe_bytes_per_second_; }
  bool suspect() const override;

  // Transfer thread only, from here on.
  // One round: ends, timers, one unit, what bytes can move, the heartbeat. True if anything
  // happened: there may be more at once.
  bool Step();
  // When Step has something to do although nobody has woken it and no byte can move.
  absl::Duration NextTimer() const;
  // The end: every transfer is done. Nothing is read from our pool or written into the peer's any
  // more.
  void Stop();
  // Null once the connection is broken.
  PutTransport* transport() { return transport_.get(); }
  size_t num_transfers() const;

 protected:
  // Step has something to do. From any thread.
  virtual void Wake() = 0;

  const base::Clock& clock() const { return *options_.clock; }

 private:
  template <typename F>
  void Change(F change) {
    {
      base::MutexLock lock(&mutex_);
      change(table_);
    }
    Wake();
  }

  // Decides under the lock, acts outside of it.
  bool Work();
  // The connection cannot be used any more: every transfer ends.
  void Break(const absl::Status& reason);
  void Issue(IssuedUnit unit);
  void Deliver(SenderEffects effects);
  absl::StatusOr<bool> MoveBytes();
  void Heartbeat();

  const SenderOptions options_;
  const std::string transport_name_;
  const double probe_bytes_per_second_;
  LinkSlot link_;

  // Transfer thread only, but for construction.
  std::unique_ptr<PutTransport> transport_;  // null once broken
  bool unit_in_flight_ = false;              // Put, and UnitWritten not yet said
  absl::Duration heartbeat_at_;              // the next one
  uint64_t heartbeats_ = 0;

  mutable base::Mutex mutex_;
  absl::Duration heard_at_ ABSL_GUARDED_BY(mutex_);
  int unheard_ ABSL_GUARDED_BY(mutex_) = 0;  // heartbeats sent since the peer was heard
  SenderTable table_ ABSL_GUARDED_BY(mutex_);
  absl::Status gone_ ABSL_GUARDED_BY(mutex_);  // not OK: the peer or the link is gone
};

}  // namespace baton::kvtransfer
