#pragma once

// The decode side of hand-overs without its thread and its sockets: sessions, the table of
// hand-overs, heartbeats, what the end of a connection proves. receiver.cc drives it in a
// worker, a simulator can do so step by step.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
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
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {

// One peer's control channel and its data connection.
struct Session {
  std::string incarnation;
  std::map<std::string, std::string> tokens;  // by transport, each until it is used
  std::string transport;                      // of its data connection
  // The peer stays with that connection: it has said how fast it is, or opened a hand-over. Until
  // then it may try another transport.
  bool settled = false;
  double probe_bytes_per_second = 0;
  absl::Duration heard_at;
  int unheard = 0;       // heartbeats sent since the peer was heard
  bool gone = false;     // the control channel has ended
  bool lost = false;     // the data connection has ended
  bool dropped = false;  // we want nothing of it any more: its data connection is to be closed
  // Shared with effects that are on their way while the session ends.
  std::shared_ptr<LinkSlot> link;

  void Settle() {
    settled = true;
    tokens.clear();
  }
};

using Sessions = std::map<SessionId, Session>;

// Callers' threads and the control channels' threads use it as a Receiver; one transfer thread owns
// listeners and data connections and calls the rest. Thread-safe but for that.
class ReceiverCore : public Receiver, public DataSink {
 public:
  // The data connections, as their owner keeps them.
  class Lines {
   public:
    virtual ~Lines() = default;
    // Null: that session has none.
    virtual DataLine* Find(SessionId session) = 0;
    // Destroys the connection: nothing of it is read or written from here on.
    virtual void Close(DataLine* line) = 0;
  };

  ReceiverCore(const ReceiverOptions& options, std::function<void(ReceiverEvent)> on_event)
      : options_(options),
        on_event_(std::move(on_event)),
        table_(options.layout, options.incarnation) {}

  // Receiver.
  worker::v1::Handoff Reserve(Reservation reservation) override;
  bool Revoke(uint64_t reservation_id, absl::string_view reason) override;
  absl::StatusOr<worker::v1::Hello> OnPeerHello(const worker::v1::Hello& peer,
                                                PeerLink* link,
                                                SessionId* session) override;
  void OnMessage(SessionId session, const worker::v1::PeerMessage& message) override;
  void OnPeerGone(SessionId session) override;
  std::vector<PeerInfo> peers() const override;

  // DataSink, on the transfer thread.
  absl::StatusOr<uint64_t> Attach(const PutListener& listener, absl::string_view token) override;
  GrantFrame Open(uint64_t session, const OpenFrame& open, const PutListener& listener) override;
  std::optional<std::vector<ByteRange>> BeginUnit(uint64_t session, const UnitFrame& unit) override;
  bool Wants(uint64_t reservation_id) override;
  void EndUnit(const UnitFrame& unit, const absl::Status& arrived) override;
  void Report(uint64_t session, double bytes_per_second) override;

  // Transfer thread only, from here on.
  // A connection has failed with `status`. True: it stays, shut, until the peer hangs up; call this
  // again then. False: the caller destroys it.
  bool OnLineFailed(DataLine* line, const absl::Status& status);
  // Closes the connections of sessions that have ended or been dropped, and frees what they held as
  // soon as that is proved to be quiet. After every Wake and every round.
  void EndSessions(Lines* lines);
  // Heartbeats, and the peers that miss too many or do not come to rest. When NextTick() has come.
  void Tick();
  absl::Duration NextTick() const { return tick_at_; }
  // The end of the worker, after its connections: every hand-over fails.
  void FailAll(const absl::Status& reason);

 protected:
  // EndSessions or a connection has something to do. From any thread.
  virtual void Wake() = 0;
  // Where peers connect, in order of preference. Constant.
  virtual std::vector<const PutListener*> listeners() const = 0;

  const ReceiverOptions& options() const { return options_; }

 private:
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
  bool WasTrial(const DataLine& line);
  void Lose(DataLine* line, const absl::Status& reason);
  void Drop(SessionId session, const absl::Status& reason);

  const ReceiverOptions options_;
  const std::function<void(ReceiverEvent)> on_event_;

  // Transfer thread only.
  absl::Duration tick_at_;
  uint64_t heartbeats_ = 0;

  mutable base::Mutex mutex_;
  ReceiverTable table_ ABSL_GUARDED_BY(mutex_);
  Sessions sessions_ ABSL_GUARDED_BY(mutex_);
  SessionId last_session_ ABSL_GUARDED_BY(mutex_) = 0;
};

// Errors: INVALID_ARGUMENT when layout, pool and transports do not fit together.
absl::Status CheckReceiverOptions(const ReceiverOptions& options);

}  // namespace baton::kvtransfer
