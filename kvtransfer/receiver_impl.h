#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/base/mutex.h"
#include "kvtransfer/data_connection.h"
#include "kvtransfer/link_slot.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/receiver_table.h"
#include "kvtransfer/socket.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {

// One peer's control channel and its data connection.
struct Session {
  std::string incarnation;
  std::map<std::string, std::string> tokens;  // by transport, until one is used
  std::string transport;                      // of its data connection
  double probe_bytes_per_second = 0;
  absl::Duration heard_at;
  bool gone = false;  // the control channel has ended
  bool lost = false;  // the data connection has ended
  // Shared with effects that are on their way while the session ends.
  std::shared_ptr<LinkSlot> link;
};

using Sessions = std::map<SessionId, Session>;

// Callers' threads and the control channels' threads change the table under the mutex
// (receiver.cc); one transfer thread owns listeners and data connections (receiver_thread.cc).
// Thread-safe.
class ReceiverImpl : public Receiver, private DataSink {
 public:
  ReceiverImpl(const ReceiverOptions& options, std::function<void(ReceiverEvent)> on_event)
      : options_(options),
        on_event_(std::move(on_event)),
        table_(options.layout, options.incarnation) {}
  ~ReceiverImpl() override;

  absl::Status Start();

  worker::v1::Handoff Reserve(Reservation reservation) override;
  bool Revoke(uint64_t reservation_id, absl::string_view reason) override;
  absl::StatusOr<worker::v1::Hello> OnPeerHello(const worker::v1::Hello& peer,
                                                PeerLink* link,
                                                SessionId* session) override;
  void OnMessage(SessionId session, const worker::v1::PeerMessage& message) override;
  void OnPeerGone(SessionId session) override;
  std::vector<PeerInfo> peers() const override;

 private:
  // DataSink, on the transfer thread.
  absl::StatusOr<uint64_t> Attach(const PutListener& listener, absl::string_view token) override;
  GrantFrame Open(uint64_t session, const OpenFrame& open, const PutListener& listener) override;
  std::optional<std::vector<ByteRange>> BeginUnit(uint64_t session, const UnitFrame& unit) override;
  bool Wants(uint64_t reservation_id) override;
  void EndUnit(const UnitFrame& unit, const absl::Status& arrived) override;
  void Report(uint64_t session, double bytes_per_second) override;

  void Run();
  void PollOnce();
  void Accept(PutListener* listener);
  // Returns false when the connection has ended.
  bool Serve(DataConnection* connection, short events);
  void Lose(DataConnection* connection, const absl::Status& reason);
  void EndGoneSessions();
  void SendHeartbeats();
  // Changes the table under the lock, then does what it asks outside of it.
  template <typename Change>
  auto WithTable(Change change) {
    ReceiverEffects effects;
    auto result = [&] {
      base::MutexLock lock(&mutex_);
      return change(table_, sessions_, &effects);
    }();
    Deliver(std::move(effects));
    return result;
  }
  void Deliver(ReceiverEffects effects);

  const ReceiverOptions options_;
  const std::function<void(ReceiverEvent)> on_event_;
  std::vector<std::unique_ptr<PutListener>> listeners_;
  WakeFd wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  // Transfer thread only.
  std::vector<std::unique_ptr<DataConnection>> connections_;
  absl::Duration heartbeat_at_;
  uint64_t heartbeats_ = 0;

  mutable base::Mutex mutex_;
  ReceiverTable table_ ABSL_GUARDED_BY(mutex_);
  Sessions sessions_ ABSL_GUARDED_BY(mutex_);
  SessionId last_session_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace baton::kvtransfer
