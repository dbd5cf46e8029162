#pragma once

// W3C trace context (`traceparent`): which distributed trace a request belongs to.

#include <string>

#include "absl/strings/string_view.h"

namespace baton::router {

struct TraceContext {
  std::string trace_id;  // 32 lower-case hex digits; empty: the client sent none
  std::string span_id;   // of the router's own span, 16 hex digits
  bool sampled = false;

  // What goes to workers and back to the client; empty without a trace.
  std::string Header() const;
};

// From the client's header. `new_span_id` names the router's span. A header that is missing or
// malformed gives an empty context: a bad one must not fail a request.
TraceContext ParseTraceparent(absl::string_view header, absl::string_view new_span_id);

}  // namespace baton::router
