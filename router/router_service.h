#pragma once

// baton.v1.Generation over gRPC: the entry of every request.

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"

#include "router/generate_call.h"
#include "router/token_gate.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace baton::router {

struct RouterServiceOptions {
  CallDeps deps;
  EncoderPool* encoder_pool = nullptr;
  // The longest any request may take, whatever its client says.
  absl::Duration request_timeout_max = absl::Minutes(10);
  // Tokens of an answer that its client does not read: above it the answer ends.
  size_t client_buffer_tokens = 8192;
  std::function<bool()> draining;
  TokenGate* tokens = nullptr;  // null: everybody may call
};

// Thread-safe.
class RouterService {
 public:
  // What `options` points to outlives the service.
  explicit RouterService(RouterServiceOptions options);
  ~RouterService();
  // Workers and load, as GetStatus answers.
  void FillStatus(v1::GetStatusResponse* response) const;
  // To be registered with a server.
  grpc::Service* service();

 private:
  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace baton::router
