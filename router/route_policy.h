#pragma once

// Which workers a request goes to. Pure: looks at views and a request, changes nothing.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

#include "baton/worker/v1/common.pb.h"

#include "router/ttft_model.h"

namespace baton::router {

enum class WorkerRole { kPrefill, kDecode };
// suspect: its connection is alive, but it has not reported for a while. It gets no new work; what
// it has goes on.
enum class WorkerHealth { kDown, kLoading, kReady, kSuspect, kDraining };
absl::string_view WorkerRoleName(WorkerRole role);        // "prefill", "decode"
absl::string_view WorkerHealthName(WorkerHealth health);  // "down", "loading", "ready", ...

// pd: prompts are computed by prefill workers and handed over. single: decode workers compute them.
enum class Topology { kPd, kSingle };

// A worker as the policy sees it.
struct WorkerView {
  std::string address;
  uint32_t slot = 0;  // its number in the table
  WorkerRole role = WorkerRole::kPrefill;
  WorkerHealth health = WorkerHealth::kDown;
  bool tripped = false;  // its breaker lets nothing through now
  // Tokens it has been given and not done with: for prefill those to be computed, for decode those
  // that hold KV.
  uint64_t load_tokens = 0;
  // A prefill worker with this many tokens to compute gets no more: they wait in the router, where
  // their order can still change. 0: no limit.
  uint64_t load_tokens_max = 0;
  // KV blocks that a new request could take: free ones and those that only the prefix cache holds,
  // less what was promised since the last report.
  uint32_t available_blocks = 0;
  bool full = false;  // it has refused for want of blocks, and has not reported more since
  bool idle = true;   // nothing runs there that we know of
  uint32_t num_running = 0;
  uint32_t cache_blocks = 0;  // that only its prefix cache holds
  uint32_t num_long = 0;      // long prompts it has to compute
  double wait_s = 0;          // predicted time until it begins with another prompt
  TtftCoefficients ttft;
  bool ttft_measured = true;  // else nothing is known of its speed
  uint32_t block_tokens = 64;
  uint32_t max_prompt_tokens = 0;  // 0: says nothing
  uint32_t max_model_len = 0;      // 0: says nothing
  // Shared, because views are copied and a fingerprint changes only when a worker restarts.
  std::shared_ptr<const worker::v1::LayoutFingerprint> fingerprint;
  // Workers of one kind have equal fingerprints, but for tp: they can be paired.
  uint32_t kind = 0;
};

// What two workers have to agree on: the name of the first field that differs, "" when they may be
// paired.
std::string FingerprintDifference(const worker::v1::LayoutFingerprint& a,
                                  const worker::v1::LayoutFingerprint& b);

struct RouteRequest {
  uint32_t prompt_tokens = 0;
  uint32_t num_choices = 1;
  bool needs_prefill = true;  // a prefill worker computes the prompt
  bool needs_decode = true;   // false: the answer ends with its first token
  bool is_long = false;       // see RoutePolicyOptions::long_prompt_share
  // Addresses that failed this request before: taken only where there is no other.
  std::vector<std::string> excluded;
  // By WorkerView::slot: leading blocks of the prompt in that worker's prefix cache. May be shorter
  // than there are workers: the others have none.
  std::vector<uint32_t> cached_blocks;
  // What a policy may toss its coins with: differs from request to request.
  uint64_t ticket = 0;
};

struct Route {
  std::string prefill;  // empty: none needed
  std::string decode;   // empty: none needed
  // The decode worker's last report has room for the prompt: both workers may start at once.
  bool decode_has_headroom = false;
  bool prefill_locally = false;  // the decode worker computes the prompt
  // Of the worker that computes the prompt.
  uint32_t cached_tokens = 0;
  double predicted_ttft_s = 0;
};

struct RoutePolicyOptions {
  // With prefill workers: a prompt of which the decode worker lacks at most this many tokens is
  // computed there, if it is sooner done so. 0: never.
  uint32_t local_prefill_tokens = 64;
  // At most this share of the prefill workers have long prompts at a time, so that short ones find
  // a worker without one.
  double long_prompt_share = 0.5;
};

// Thread-safe, without state that a choice changes.
class RoutePolicy {
 public:
  virtual ~RoutePolicy() = default;
  // Errors: RESOURCE_EXHAUSTED when those that could take it are full or suspect: try again when a
  // report comes or a request ends. UNAVAILABLE when no worker of a role is ready, INVALID_ARGUMENT
  // when the prompt is too long for every one, FAILED_PRECONDITION naming the field in which all
  // pairs differ.
  virtual absl::StatusOr<Route> Choose(absl::Span<const WorkerView> workers,
                                       const RouteRequest& request) const = 0;
};

// Time from its dispatch to its first token if this worker computes it; cached tokens of it.
double PredictTtft(const WorkerView& worker, const RouteRequest& request);
uint32_t CachedTokens(const WorkerView& worker, const RouteRequest& request);

// prefix: soonest first token, by what each worker holds of the prompt, its queue and its measured
// speed; among decode workers of about the least load, the one that holds most of the prompt.
// Sessions so stay where their prefix is, until waiting there costs more than computing it again
// elsewhere; new ones go where the cache holds least.
// least_load: fewest tokens. power_of_two: the better of two drawn ones, by load. round_robin.
// Of equals the first in the operator's order.
// Errors: INVALID_ARGUMENT naming the accepted names.
absl::StatusOr<std::unique_ptr<RoutePolicy>> MakeRoutePolicy(absl::string_view name,
                                                             const RoutePolicyOptions& options);

}  // namespace baton::router
