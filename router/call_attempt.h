#pragma once

// One try at some of a request's choices, on one pair of workers. Private to generate_call*.cc.

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "router/blame.h"
#include "router/generate_call.h"

namespace baton::router {

struct GenerateCall::Attempt {
  uint32_t id = 0;      // names it in events
  uint32_t number = 0;  // counts those of the request that were sent, from 1
  // A request starts as one attempt at all its choices. Resumed choices, which have tokens of their
  // own behind the prompt, go on in an attempt each.
  uint32_t first_choice = 0;
  uint32_t num_choices = 1;
  // What became of the attempts before it at these choices.
  int failures = 0;
  bool was_refused = false;           // for want of room
  std::vector<std::string> excluded;  // workers that failed
  std::vector<std::string> accusers;  // workers that said their peer had failed

  std::optional<Admission::Id> waiting;  // for workers with room
  Placement placement;
  absl::Duration dispatched;

  std::unique_ptr<PrefillLeg> prefill;  // null: not opened
  std::unique_ptr<DecodeLeg> decode;
  bool prefill_open = false;  // no end has come
  bool decode_open = false;
  bool needs_handoff = false;

  bool reserved = false;
  std::optional<worker::v1::PrefillResponse::FirstTokens> first;
  bool first_delivered = false;
  // What the decode worker said before the first tokens were here.
  std::deque<worker::v1::DecodeResponse::Tokens> held;
  bool decode_spoke = false;  // it has sent tokens: the hand-over is behind us
  bool decode_done = false;
  // How its leg ended while the prefill worker may have told the answer's end already; and how long
  // that is waited for.
  std::optional<absl::Status> decode_failure;
  std::optional<Timers::Id> patience;
  bool prefill_done = false;
  std::vector<bool> worker_ended;  // choices whose end a worker has told
  bool decode_ended_one = false;   // the decode worker told one of them

  const Route& route() const { return placement.route; }
};

// More messages than this wait for first tokens only when a worker is mad.
inline constexpr size_t kMaxHeldMessages = 4096;

}  // namespace baton::router
