#pragma once

// The calls to workers over gRPC: legs of requests, and the watch on each worker's status.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "engine/process/channel.h"
#include "router/legs.h"
#include "router/timers.h"
#include "router/worker_table.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace baton::router {

// One channel per worker, shared by everything that talks to it. Thread-safe.
class WorkerChannels {
 public:
  // Of one call, which holds its channel: declared before its context, so that it goes after it.
  class Use {
   public:
    explicit Use(const WorkerChannels* channels);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const WorkerChannels* const channels_;
  };

  explicit WorkerChannels(process::ChannelSecurity security);
  // Waits until the last call has gone, a few seconds at most: see process::MakeChannel.
  ~WorkerChannels();
  // Made when it is first asked for.
  std::shared_ptr<grpc::Channel> of(const std::string& address) const;
  // Nobody will ask for it any more; calls on it go on.
  void Forget(const std::string& address);

 private:
  const process::ChannelSecurity security_;
  mutable base::Mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<grpc::Channel>> channels_ ABSL_GUARDED_BY(mutex_);
  mutable base::CondVar unused_;
  mutable int uses_ ABSL_GUARDED_BY(mutex_) = 0;
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

// Keeps two streams open to every worker, its status and the events of its prefix cache, and tells
// the table; opens them again, after a growing pause, when they end. Thread-safe.
class WorkerWatch {
 public:
  // All outlive it.
  WorkerWatch(WorkerChannels* channels,
              Timers* timers,
              const base::Clock* clock,
              WorkerTable* table);
  // Ends the streams and waits for them.
  ~WorkerWatch();

  // Adds the worker to the table and watches it; one that is watched already changes nothing. Takes
  // it out again.
  void Watch(WorkerRole role, const std::string& address);
  void Unwatch(const std::string& address);

 private:
  struct State;
  template <typename Message>
  class Stream;
  // Shared with streams and timers, which end in their own time.
  std::shared_ptr<State> state_;
};

}  // namespace baton::router
