#pragma once

// Which workers a request goes to. Pure: looks at a snapshot, changes nothing.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "baton/worker/v1/common.pb.h"

namespace baton::router {

enum class WorkerRole { kPrefill, kDecode };
enum class WorkerHealth { kDown, kLoading, kReady, kDraining };
absl::string_view WorkerRoleName(WorkerRole role);        // "prefill", "decode"
absl::string_view WorkerHealthName(WorkerHealth health);  // "down", "loading", "ready", "draining"

// pd: prompts are computed by prefill workers and handed over. single: decode workers compute them.
enum class Topology { kPd, kSingle };

// A worker as the policy sees it.
struct WorkerView {
  std::string address;
  WorkerRole role = WorkerRole::kPrefill;
  WorkerHealth health = WorkerHealth::kDown;
  // Tokens it has been given and not done with: for prefill those to be computed, for decode those
  // that hold KV.
  uint64_t load_tokens = 0;
  // KV blocks that a new request could take: free ones and those that only the prefix cache holds.
  uint32_t available_blocks = 0;
  uint32_t block_tokens = 64;
  uint32_t max_prompt_tokens = 0;  // 0: says nothing
  uint32_t max_model_len = 0;      // 0: says nothing
  // Shared, because snapshots are taken per request and a fingerprint changes only when a worker
  // restarts.
  std::shared_ptr<const worker::v1::LayoutFingerprint> fingerprint;
};

// What two workers have to agree on: the name of the first field that differs, "" when they may be
// paired.
std::string FingerprintDifference(const worker::v1::LayoutFingerprint& a,
                                  const worker::v1::LayoutFingerprint& b);

struct RouteRequest {
  uint32_t prompt_tokens = 0;
  bool needs_prefill = true;  // a prefill worker computes the prompt
  bool needs_decode = true;   // false: the answer ends with its first token
  // Addresses that failed this request before.
  std::vector<std::string> excluded;
};

struct Route {
  std::string prefill;  // empty: none needed
  std::string decode;   // empty: none needed
  // The decode worker's last report has room for the prompt: both workers may start at once.
  bool decode_has_headroom = false;
};

// Thread-safe, without state that a choice changes.
class RoutePolicy {
 public:
  virtual ~RoutePolicy() = default;
  // Errors: UNAVAILABLE when no worker of a role is ready, INVALID_ARGUMENT when the prompt is too
  // long for every one, FAILED_PRECONDITION naming the field in which all pairs differ.
  virtual absl::StatusOr<Route> Choose(absl::Span<const WorkerView> workers,
                                       const RouteRequest& request) const = 0;
};

// The pair with the least load; of equals the first in the operator's order.
std::unique_ptr<RoutePolicy> MakeLeastLoadPolicy();

}  // namespace baton::router
