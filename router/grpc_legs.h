#pragma once

// The calls to workers over gRPC: legs of requests, and the watch on each worker's status.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "router/legs.h"
#include "router/timers.h"
#include "router/worker_table.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace baton::router {

// One channel per worker, shared by everything that talks to it. Immutable, thread-safe.
class WorkerChannels {
 public:
  explicit WorkerChannels(const std::vector<std::string>& addresses);
  ~WorkerChannels();
  // `address` must be one of those given.
  const std::shared_ptr<grpc::Channel>& of(const std::string& address) const {
    return channels_.at(address);
  }

 private:
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels_;
};

// Thread-safe.
class GrpcLegFactory : public LegFactory {
 public:
  // Both outlive it.
  GrpcLegFactory(const WorkerChannels* channels, const base::Clock* clock)
      : channels_(channels), clock_(clock) {}

  std::unique_ptr<PrefillLeg> OpenPrefill(const std::string& address,
                                          worker::v1::PrefillRequest::Open open,
                                          absl::Duration deadline,
                                          PrefillEvents events) override;
  std::unique_ptr<DecodeLeg> OpenDecode(const std::string& address,
                                        worker::v1::DecodeRequest::Open open,
                                        absl::Duration deadline,
                                        DecodeEvents events) override;

 private:
  const WorkerChannels* const channels_;
  const base::Clock* const clock_;
};

// Keeps a status stream open to every worker and tells the table; opens it again, after a growing
// pause, when it ends.
class WorkerWatch {
 public:
  // All outlive it.
  WorkerWatch(const std::vector<std::string>& addresses,
              const WorkerChannels* channels,
              Timers* timers,
              const base::Clock* clock,
              WorkerTable* table);
  // Ends the streams and waits for them.
  ~WorkerWatch();

 private:
  struct State;
  class Stream;
  // Shared with streams and timers, which end in their own time.
  std::shared_ptr<State> state_;
};

}  // namespace baton::router
