#pragma once

// The decode side of one data connection: from bytes on a socket to calls on a sink.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kvtransfer/frame.h"
#include "kvtransfer/socket.h"
#include "kvtransfer/transport.h"

namespace baton::kvtransfer {

// What a connection asks its owner. Called on the transfer thread.
class DataSink {
 public:
  virtual ~DataSink() = default;
  // The session that this token was given to; it may be used once.
  // Errors: PERMISSION_DENIED.
  virtual absl::StatusOr<uint64_t> Attach(const PutListener& listener, absl::string_view token) = 0;
  virtual GrantFrame Open(uint64_t session, const OpenFrame& open, const PutListener& listener) = 0;
  // As ReceiverTable's calls of these names.
  virtual std::optional<std::vector<ByteRange>> BeginUnit(uint64_t session,
                                                          const UnitFrame& unit) = 0;
  virtual bool Wants(uint64_t reservation_id) = 0;
  virtual void EndUnit(const UnitFrame& unit, const absl::Status& arrived) = 0;
  virtual void Report(uint64_t session, double bytes_per_second) = 0;
};

// A data connection as those see it who decide about sessions.
class DataLine {
 public:
  virtual ~DataLine() = default;
  virtual uint64_t session() const = 0;  // 0: not attached yet
  virtual const PutListener& listener() const = 0;
  // A peer that writes itself must end the connection itself, else its end proves nothing: from now
  // on we answer nothing, believe nothing and wait for that.
  virtual void Shut(const absl::Status& reason) = 0;
};

// Transfer thread only.
class DataConnection : public DataLine {
 public:
  // `listener`, `sink` and `pool` outlive it.
  DataConnection(UniqueFd fd,
                 PutListener* listener,
                 DataSink* sink,
                 base::Buffer* pool,
                 absl::Duration accepted_at)
      : fd_(std::move(fd)),
        listener_(listener),
        sink_(sink),
        pool_(pool),
        accepted_at_(accepted_at) {
    WatchProcess();
  }
  ~DataConnection() override;
  DataConnection(const DataConnection&) = delete;
  DataConnection& operator=(const DataConnection&) = delete;

  // Reads what is there, but not so much that other connections starve.
  // Errors: UNAVAILABLE (closed by the peer), INVALID_ARGUMENT (nonsense), PERMISSION_DENIED
  // (token), RESOURCE_EXHAUSTED (it does not read); ABORTED: closed by a peer whose writes may
  // still go on (PutListener::writes_outlive_socket), to be called again until it is UNAVAILABLE.
  absl::Status OnReadable();
  absl::Status OnWritable();
  // Where payload comes through a port: takes it further. Every round. Errors: as OnReadable's.
  absl::Status Advance();
  // Stops receiving a unit that has been revoked meanwhile.
  void DropUnwantedUnit();

  // DataLine.
  void Shut(const absl::Status& reason) override;
  uint64_t session() const override { return session_; }
  const PutListener& listener() const override { return *listener_; }

  // For poll.
  int fd() const { return awaits_exit_ ? process_.get() : fd_.get(); }
  bool wants_write() const { return !out_.empty(); }
  // Advance has something to do after this long, although poll may find nothing.
  absl::Duration poll_interval() const {
    return port_ == nullptr ? absl::InfiniteDuration() : port_->poll_interval();
  }
  absl::Duration accepted_at() const { return accepted_at_; }
  bool shut() const { return shut_; }

 private:
  void WatchProcess();
  absl::Status OnClosed(const absl::Status& reason);
  // Of a shut connection only the farewell is still looked for.
  void LookForFarewell(size_t count);
  absl::Status OnFrame(const Frame& frame);
  absl::Status OnAttach(const Frame& frame);
  absl::Status OnUnit(const UnitFrame& unit);
  absl::Status OnProbe(const ProbeFrame& probe);
  // The first announced payload has arrived at the port.
  absl::Status TakeArrived();
  // Whether the sink wants the unit, and where.
  void BeginUnit(const UnitFrame& unit);
  void FinishUnit();
  void AbandonUnit(const absl::Status& reason);
  absl::Status Answer(const std::string& frame);

  UniqueFd fd_;
  PutListener* listener_;
  DataSink* sink_;
  base::Buffer* pool_;
  absl::Duration accepted_at_;
  uint64_t session_ = 0;
  bool shut_ = false;
  // Of a peer whose writes outlive its connection.
  UniqueFd process_;
  bool farewell_ = false;
  bool awaits_exit_ = false;  // the connection has ended without one
  FrameReader reader_;
  std::string out_;

  // The unit that is arriving, and whether it is received (else skipped).
  std::optional<UnitFrame> unit_;
  bool unit_wanted_ = false;
  std::vector<ByteRange> unit_ranges_;
  bool probe_arriving_ = false;

  // Where payload comes so: units and probes (nothing) that are announced; the first of them may be
  // being copied into the pool.
  std::unique_ptr<PayloadPort> port_;
  std::deque<std::optional<UnitFrame>> announced_;
  bool placing_ = false;
};

}  // namespace baton::kvtransfer
