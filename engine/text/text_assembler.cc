#include "engine/text/text_assembler.h"

namespace baton::text {

std::string TextAssembler::Push(TokenId id) {
  std::string free, delta;
  if (stopped()) return delta;
  stops_.Push(tokenizer_->TextBytes(id, options_.show_special), &free);
  stream_.Push(free, &delta);
  return delta;
}

std::string TextAssembler::Finish(std::optional<TokenId> end_token) {
  std::string held, delta;
  stops_.Flush(&held);
  stream_.Push(held, &delta);
  if (end_token && options_.include_stop && !stopped())
    stream_.Push(tokenizer_->TokenBytes(*end_token), &delta);
  stream_.Flush(&delta);
  return delta;
}

}  // namespace baton::text
