#pragma once

// One try at a request on one pair of workers. Private to generate_call*.cc.

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "router/generate_call.h"

namespace baton::router {

struct GenerateCall::Attempt {
  uint32_t number = 0;
  Route route;
  absl::Duration dispatched;
  int64_t prefill_work = 0;  // tokens counted against the workers in the table
  int64_t decode_work = 0;

  std::unique_ptr<PrefillLeg> prefill;  // null: not opened
  std::unique_ptr<DecodeLeg> decode;
  bool prefill_open = false;  // no end has come
  bool decode_open = false;
  bool needs_handoff = false;

  bool reserved = false;
  std::optional<worker::v1::DecodeResponse::Reserved>
      ticket;  // until the prefill leg is there to get it
  std::optional<worker::v1::PrefillResponse::FirstTokens> first;
  bool first_delivered = false;
  // What the decode worker said before the first tokens were here.
  std::deque<worker::v1::DecodeResponse::Tokens> held;
  bool decode_spoke = false;  // it has sent tokens: the hand-over is behind us
  bool decode_done = false;
  std::vector<bool> worker_ended;  // choices whose end a worker has told
  bool decode_ended_one = false;   // the decode worker told one of them
};

// More messages than this wait for first tokens only when a worker is mad.
inline constexpr size_t kMaxHeldMessages = 4096;

}  // namespace baton::router
