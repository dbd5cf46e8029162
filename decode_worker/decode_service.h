#pragma once

// The gRPC entry of a decode worker: reads, checks and queues; the loop does the rest.

#include <functional>
#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace baton::decode {

class DecodeLoop;

// Thread-safe.
class DecodeService {
 public:
  // `draining` says that new calls are refused.
  explicit DecodeService(std::function<bool()> draining);
  ~DecodeService();
  DecodeService(const DecodeService&) = delete;
  DecodeService& operator=(const DecodeService&) = delete;

  // To be registered with the server, before which it must not be destroyed.
  grpc::Service* service();
  // Until then calls are refused with UNAVAILABLE. `loop` outlives the server.
  void SetLoop(DecodeLoop* loop);
  // The loop has stopped: what it has sent is taken to its calls.
  void FinishSending();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::decode
