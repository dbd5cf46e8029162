#pragma once

// What is said of a request when it has ended: its log line, and the timing trailer of its call.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "baton/v1/generation.pb.h"

namespace baton::router {

// Of a request that has ended, however it did. Figures that were never known are zero.
struct RequestReport {
  std::string request_id;
  std::string label;  // the client's
  std::string trace_id;
  std::string method;
  absl::Time ended;
  absl::StatusCode code = absl::StatusCode::kOk;
  std::string message;  // of a failure
  uint32_t prompt_tokens = 0;
  uint32_t cached_prompt_tokens = 0;
  uint32_t completion_tokens = 0;
  uint32_t attempts = 0;
  v1::Timings timings;  // with workers and transport
};

// " key=value" fields, every stage in milliseconds. Holds no text of prompt or answer.
std::string RequestLogFields(const RequestReport& report);

// The value of the trailer `baton-server-timing`, written as HTTP's Server-Timing:
// "queue;dur=0.120, tokenize;dur=1.400, ...", in milliseconds.
std::string ServerTiming(const v1::Timings& timings);

}  // namespace baton::router
