#pragma once

// The engine's record of one Prefill call. Private to prefill_loop*.cc.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "prefill_worker/prefill_loop.h"

namespace baton::prefill {

struct PrefillLoop::Call {
  Call(CallId call_id,
       runtime::EngineRequest engine_request,
       bool handoff,
       std::shared_ptr<PrefillSink> call_sink)
      : id(call_id),
        request(std::move(engine_request)),
        needs_handoff(handoff),
        sink(std::move(call_sink)) {}

  const CallId id;
  const runtime::EngineRequest request;
  const bool needs_handoff;
  const std::shared_ptr<PrefillSink> sink;  // shared with the gRPC call, which may end first

  std::optional<runtime::Sequence> sequence;
  std::vector<runtime::Answer> answers;         // from the step on that ends the prompt
  std::vector<worker::v1::Token> first_tokens;  // for the Commit
  std::optional<Ticket> ticket;
  worker::RequestTimes times;
  absl::Duration computed_at;  // when the prompt was complete
  absl::Duration append;
  absl::Duration ended_at;
  absl::Duration abort_asked_at;  // when somebody asked for its end; else as ended_at
  bool in_step = false;           // the running step reads its tokens and block table
  bool computed = false;          // first tokens have been sent
  bool ended = false;             // the sink is finished
  bool aborted = false;           // with an error
};

}  // namespace baton::prefill
