#pragma once

// What waits for a client that lags.

#include <algorithm>
#include <cstddef>

#include "baton/v1/generation.pb.h"

namespace baton::router {

// Two messages of one answer as one, unless the first is its last. False: nothing has changed.
inline bool MergeDeltas(v1::GenerateResponse* last, v1::GenerateResponse* next) {
  if (last->index() != next->index() || last->has_finished()) return false;
  last->mutable_text()->append(next->text());
  last->mutable_token_ids()->MergeFrom(next->token_ids());
  for (auto& logprob : *next->mutable_logprobs()) last->add_logprobs()->Swap(&logprob);
  last->set_completion_tokens(next->completion_tokens());
  if (next->has_finished()) last->mutable_finished()->Swap(next->mutable_finished());
  return true;
}

// What a message counts against the limit of tokens that wait.
inline size_t WeightOf(const v1::GenerateResponse& message) {
  return std::max<size_t>(1, static_cast<size_t>(message.token_ids_size()));
}

}  // namespace baton::router
