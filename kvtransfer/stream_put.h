#pragma once

// The part of PutTransport that all stream-socket transports share: attach, frames out, answers in,
// probe.

#include <deque>
#include <string>
#include <vector>

#include "kvtransfer/transport.h"

namespace baton::kvtransfer {

class StreamPut : public PutTransport {
 public:
  const kv::KvLayout& peer_layout() const override { return peer_layout_; }
  absl::StatusOr<double> Probe(absl::Duration timeout) override;
  void Open(const OpenFrame& open) override { Queue(Encode(open)); }
  bool busy() const override { return borrowed_ > 0; }
  absl::StatusOr<size_t> Write() override;
  absl::Status Read(std::vector<Reply>* replies) override;
  int fd() const override { return fd_.get(); }
  bool wants_write() const override { return !segments_.empty(); }

 protected:
  // Presents the token and learns the peer's pool.
  // Errors: UNAVAILABLE; FAILED_PRECONDITION when its pool differs from ours in anything but the
  // number of blocks.
  absl::Status Attach(UniqueFd fd,
                      absl::string_view token,
                      const ConnectOptions& options,
                      std::vector<UniqueFd>* descriptors);
  // Moves kProbeBytes of `bytes` the way Put does, up to the frame that announces them.
  virtual absl::Status MoveProbe(absl::Span<const uint8_t> bytes, absl::Duration timeout) = 0;

  // What is still queued, then `bytes`; waits, at most until `timeout`.
  absl::Status SendRest(const std::string& bytes, absl::Duration timeout);

  void Queue(std::string bytes);
  // `bytes` are read until they are written: busy.
  void QueueBorrowed(absl::Span<const uint8_t> bytes);

 private:
  struct Segment {
    std::string owned;
    absl::Span<const uint8_t> borrowed;
    bool is_borrowed() const { return !borrowed.empty(); }
    absl::Span<const uint8_t> bytes() const {
      return is_borrowed()
                 ? borrowed
                 : absl::MakeSpan(reinterpret_cast<const uint8_t*>(owned.data()), owned.size());
    }
  };

  UniqueFd fd_;
  kv::KvLayout peer_layout_;
  std::deque<Segment> segments_;
  size_t written_ = 0;  // of the first segment
  int borrowed_ = 0;    // segments
  FrameReader reader_;
};

}  // namespace baton::kvtransfer
