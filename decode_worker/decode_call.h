#pragma once

// The engine's record of one Generate call. Private to decode_loop*.cc.

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "decode_worker/decode_loop.h"

namespace baton::decode {

struct DecodeLoop::Choice {
  Choice(const runtime::EngineRequest& request,
         uint32_t index,
         const text::Tokenizer& tokenizer,
         int max_model_len)
      : answer(request, index, tokenizer, max_model_len) {}

  runtime::Answer answer;
  std::optional<runtime::Sequence> sequence;  // while it goes on
  uint32_t first_id = 0;                      // its first token, until the sequence has it
  absl::Duration last_token;                  // zero: none yet
  bool in_step = false;
};

struct DecodeLoop::Call {
  Call(CallId call_id,
       runtime::EngineRequest engine_request,
       bool locally,
       std::shared_ptr<DecodeSink> call_sink)
      : id(call_id),
        request(std::move(engine_request)),
        prefill_locally(locally),
        sink(std::move(call_sink)) {}

  // Sequences are numbered so that the call and the choice can be read from the number.
  uint64_t OrderOf(uint32_t choice) const { return id * runtime::kMaxChoices + choice; }

  const CallId id;
  const runtime::EngineRequest request;
  const bool prefill_locally;
  const std::shared_ptr<DecodeSink> sink;  // shared with the gRPC call, which may end first

  std::optional<runtime::Sequence> prompt;  // until the choices have sequences of their own
  bool prompt_in_step = false;
  std::optional<uint64_t> reservation;  // until it has landed or ended
  std::vector<std::unique_ptr<Choice>> choices;
  worker::v1::DecodeResponse::Tokens tokens;  // of this step, not sent yet
  worker::v1::DecodeResponse::Done done;
  worker::RequestTimes times;
  absl::Duration running_since;  // landed, or computed here
  absl::Duration append;
  absl::Duration ended_at;
  absl::Duration abort_asked_at;       // when somebody asked for its end; else as ended_at
  std::optional<absl::Status> failed;  // to be ended with, after the step
  bool ended = false;                  // the sink is finished
  bool aborted = false;                // with an error
};

}  // namespace baton::decode
