#pragma once

#include "baton/worker/v1/decode.pb.h"

namespace baton::decode {

// Two messages of tokens as one: what a router that lags gets, since each message costs it more
// than the tokens in it. False: they are no two of tokens, and nothing has changed.
inline bool MergeTokens(worker::v1::DecodeResponse* last, worker::v1::DecodeResponse* next) {
  if (!last->has_tokens() || !next->has_tokens()) return false;
  last->mutable_tokens()->MergeFrom(next->tokens());
  return true;
}

}  // namespace baton::decode
