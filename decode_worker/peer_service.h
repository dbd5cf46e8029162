#pragma once

// The gRPC side of hand-overs on a decode worker: control sessions that prefill workers open.

#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace baton::kvtransfer {
class Receiver;
}  // namespace baton::kvtransfer

namespace baton::decode {

// Thread-safe.
class PeerService {
 public:
  PeerService();
  ~PeerService();
  PeerService(const PeerService&) = delete;
  PeerService& operator=(const PeerService&) = delete;

  // To be registered with the server, before which it must not be destroyed.
  grpc::Service* service();
  // Until then sessions are refused with UNAVAILABLE. `receiver` outlives the server.
  void SetReceiver(kvtransfer::Receiver* receiver);
  // Of the draft model's KV, before SetReceiver. Without it such sessions are refused with
  // FAILED_PRECONDITION.
  void SetDraftReceiver(kvtransfer::Receiver* receiver);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::decode
