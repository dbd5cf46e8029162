#pragma once

// When things happened to one request, and what the client and the metrics are told of it.

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

#include "baton/v1/generation.pb.h"
#include "baton/worker/v1/decode.pb.h"
#include "baton/worker/v1/prefill.pb.h"

#include "router/router_metrics.h"

namespace baton::router {

// Times are of the router's clock. Thread-compatible.
struct CallTimes {
  absl::Duration received;
  std::optional<absl::Duration> encoded;
  std::optional<absl::Duration> admitted;    // workers have room
  std::optional<absl::Duration> dispatched;  // the attempt that gave the first token
  std::optional<absl::Duration> reserved;
  std::optional<absl::Duration> first_computed;  // the first token is in the router
  std::optional<absl::Duration> first_written;   // and has been given to the client
  std::optional<absl::Duration> last_token;
  uint64_t num_gaps = 0;  // between tokens of one answer
  absl::Duration gaps;
  absl::Duration detokenize;
  absl::Duration dispatch_overhead;  // of the first attempt
  uint64_t num_forwarded = 0;        // messages of workers
  absl::Duration forward_overhead;   // sum over them

  std::optional<worker::v1::PrefillResponse::FirstTokens> prefill;  // its tokens are cleared
  std::optional<worker::v1::PrefillResponse::Done> prefill_done;
  std::optional<worker::v1::DecodeResponse::Done> decode_done;
};

// `now`: the end of the request.
void FillTimings(const CallTimes& times, absl::Duration now, v1::Timings* out);
// The parts of the time to first token, of a request that had one.
void ObserveTimes(const CallTimes& times, const std::string& method, const RouterMetrics& metrics);

}  // namespace baton::router
