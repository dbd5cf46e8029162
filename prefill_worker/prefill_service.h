#pragma once

// The gRPC entry of a prefill worker: reads, checks and queues; the loop does the rest.

#include <functional>
#include <memory>

namespace grpc {
class Service;
}  // namespace grpc

namespace baton::prefill {

class PrefillLoop;

// Thread-safe.
class PrefillService {
 public:
  // `draining` says that new calls are refused.
  explicit PrefillService(std::function<bool()> draining);
  ~PrefillService();
  PrefillService(const PrefillService&) = delete;
  PrefillService& operator=(const PrefillService&) = delete;

  // To be registered with the server, before which it must not be destroyed.
  grpc::Service* service();
  // Until then calls are refused with UNAVAILABLE. `loop` outlives the server.
  void SetLoop(PrefillLoop* loop);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::prefill
