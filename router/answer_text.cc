#include "router/answer_text.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::router {
namespace {

void CopyLogprob(const worker::v1::Token& token, v1::TokenLogprob* out) {
  out->set_token_id(token.id());
  out->set_logprob(token.logprob());
  for (const worker::v1::Logprob& top : token.top()) {
    v1::TopLogprob* copy = out->add_top();
    copy->set_token_id(top.token_id());
    copy->set_logprob(top.logprob());
  }
}

}  // namespace

absl::StatusOr<bool> AnswerText::Accept(const worker::v1::Token& token) {
  if (finished_ || token.position() < next_position_) return false;
  if (token.position() > next_position_) {
    return absl::InternalError(
        absl::StrCat("answer: position=", token.position(), " expected=", next_position_));
  }
  ++next_position_;
  ids_.push_back(token.id());
  pending_.add_token_ids(token.id());
  if (token.has_logprob()) CopyLogprob(token, pending_.add_logprobs());
  const auto& stop_ids = sampling_->stop_token_ids();
  if (std::find(stop_ids.begin(), stop_ids.end(), token.id()) != stop_ids.end()) {
    pending_.mutable_text()->append(assembler_.Finish(token.id()));
    pending_.mutable_finished()->set_stop_token_id(token.id());
    End(v1::FINISH_REASON_STOP);
    return true;
  }
  pending_.mutable_text()->append(assembler_.Push(token.id()));
  if (assembler_.stopped()) {
    const auto index = static_cast<int>(*assembler_.stops().matched_index());
    pending_.mutable_finished()->set_stop_string(sampling_->stop(index));
    End(v1::FINISH_REASON_STOP);
  }
  return true;
}

void AnswerText::Finish(const worker::v1::ChoiceFinished& finished) {
  if (finished_) return;
  pending_.mutable_text()->append(assembler_.Finish());
  if (finished.finish() == worker::v1::FINISH_STOP_STRING &&
      finished.stop_index() < static_cast<uint32_t>(sampling_->stop_size())) {
    pending_.mutable_finished()->set_stop_string(
        sampling_->stop(static_cast<int>(finished.stop_index())));
  }
  if (finished.finish() == worker::v1::FINISH_STOP_TOKEN) {
    pending_.mutable_finished()->set_stop_token_id(finished.stop_token_id());
  }
  End(finished.finish() == worker::v1::FINISH_LENGTH ? v1::FINISH_REASON_LENGTH
                                                     : v1::FINISH_REASON_STOP);
}

void AnswerText::End(v1::FinishReason reason) {
  pending_.mutable_finished()->set_reason(reason);
  finished_ = true;
}

bool AnswerText::Take(v1::GenerateResponse* out) {
  if (pending_.token_ids_size() == 0 && (!finished_ || finish_taken_)) return false;
  finish_taken_ = finished_;
  pending_.set_index(index_);
  pending_.set_completion_tokens(static_cast<uint32_t>(ids_.size()));
  *out = std::exchange(pending_, v1::GenerateResponse());
  return true;
}

}  // namespace baton::router
