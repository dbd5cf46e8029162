#pragma once

#include "baton/worker/v1/peer.pb.h"

namespace baton::kvtransfer {

// The control channel to one peer: an ordered stream of messages. Implemented over gRPC by the
// workers, in memory by tests. Thread-safe. Neither call may lead to OnPeerGone on the same thread
// before it returns.
class PeerLink {
 public:
  virtual ~PeerLink() = default;
  // Queues a message; never blocks. False when the link is gone: the message is dropped.
  virtual bool Send(worker::v1::PeerMessage message) = 0;
  // Ends the session from this side.
  virtual void Close() = 0;
};

}  // namespace baton::kvtransfer
