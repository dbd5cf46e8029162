#pragma once

// Finds workers by name: the addresses behind a headless service, asked for again and again.

#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "engine/base/mutex.h"
#include "router/route_policy.h"

namespace baton::router {

// A name that stands for all workers of a role.
struct ServiceName {
  WorkerRole role = WorkerRole::kPrefill;
  std::string host;
  int port = 0;
};

// What changes for those who watch workers. Thread-compatible.
class Discovery {
 public:
  // host:port of every address of the name. Errors: UNAVAILABLE when it cannot be resolved now.
  using Resolver = std::function<absl::StatusOr<std::vector<std::string>>(const ServiceName&)>;
  struct Callbacks {
    std::function<void(WorkerRole, const std::string&)> found;
    std::function<void(const std::string&)> gone;
    // The worker answers: what a name server says of it does not matter.
    std::function<bool(const std::string&)> alive;
  };

  Discovery(std::vector<ServiceName> names, Resolver resolver, Callbacks callbacks);

  // Resolves every name once. New addresses are found at once. One that is missing from an answer,
  // which may be one-sided, is gone after kMissesMax answers without it in a row, if it does not
  // answer either. A name that cannot be resolved changes nothing.
  void Step();

  static constexpr int kMissesMax = 3;

 private:
  const std::vector<ServiceName> names_;
  const Resolver resolver_;
  const Callbacks callbacks_;
  std::vector<std::map<std::string, int>> known_;  // by name: address -> misses in a row
};

// getaddrinfo; blocks.
absl::StatusOr<std::vector<std::string>> ResolveByDns(const ServiceName& name);

// Steps on a thread of its own, at once and then at an interval.
class DiscoveryThread {
 public:
  DiscoveryThread(Discovery discovery, absl::Duration interval);
  // Waits for a resolution under way.
  ~DiscoveryThread();

 private:
  void Run();

  Discovery discovery_;
  const absl::Duration interval_;
  base::Mutex mutex_;
  base::CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace baton::router
