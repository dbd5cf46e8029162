#include "tests/sim/reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/answer_merge.h"

namespace baton::sim {

Reader::Reader(Env* env, const Reading& reading)
    : env_(env),
      reading_(reading),
      writer_({.start_write = [this](const v1::GenerateResponse* message) { StartWrite(message); },
               .finish = [this](const absl::Status& status) { OnFinish(status); },
               .merge = &router::MergeDeltas,
               .weigh = &router::WeightOf},
              env->settings.client_buffer_tokens) {}

absl::Status Reader::Write(v1::GenerateResponse response) {
  if (finish_called_) env_->fail("the router writes to a client after the end");
  const v1::GenerateResponse copy = response;
  if (writer_.num_waiting() == 0) weight_written_ = tokens_written_ = tokens_read_ = 0;
  const process::WriteResult result = writer_.TryWrite(std::move(response));
  CheckBound(copy, result);
  switch (result) {
    case process::WriteResult::kQueued:
      return absl::OkStatus();
    case process::WriteResult::kFull:
      record_.overflowed = true;
      return absl::ResourceExhaustedError("the client reads too slowly: its buffer is full");
    case process::WriteResult::kClosed:
      break;
  }
  return absl::CancelledError("the client has gone");
}

void Reader::CheckBound(const v1::GenerateResponse& next, process::WriteResult result) {
  const size_t limit = env_->settings.client_buffer_tokens;
  const size_t weight = router::WeightOf(next);
  if (result == process::WriteResult::kFull) {
    // Tokens weigh at most what their messages do, so at least this much would have been allowed.
    if (weight_written_ - tokens_read_ + weight <= limit)
      env_->fail("a client is said to read too slowly, and there is room");
    return;
  }
  if (result != process::WriteResult::kQueued) return;
  weight_written_ += weight;
  tokens_written_ += static_cast<size_t>(next.token_ids_size());
  const size_t waiting = tokens_written_ - tokens_read_;
  if (waiting > std::max(limit, weight))
    env_->fail(
        absl::StrCat("tokens wait for a client that does not read: ", waiting, " limit=", limit));
}

// As StreamSink: a client that is still there gets what was promised before it gets an error.
void Reader::Finish(const absl::Status& status) {
  if (std::exchange(finish_called_, true)) env_->fail("the router ends a call twice");
  const bool gone = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ||
                    absl::IsResourceExhausted(status);
  writer_.Finish(status, /*keep_waiting=*/!gone);
}

void Reader::Leave(const absl::Status& why) {
  if (record_.num_finishes > 0 || !left_.ok()) return;
  left_ = why;
  if (std::exchange(being_written_, nullptr) != nullptr) writer_.OnWriteDone(false);
}

void Reader::StartWrite(const v1::GenerateResponse* message) {
  being_written_ = message;
  ReadSoon(env_->world->random().Between(absl::Microseconds(2), absl::Microseconds(30)));
}

void Reader::ReadSoon(absl::Duration delay) {
  env_->world->After(delay, router_, "client reads", [self = shared_from_this()] { self->Read(); });
}

void Reader::Read() {
  if (being_written_ == nullptr) return;  // it has left
  if (reading_.pause > absl::ZeroDuration() && messages_read_ >= reading_.pause_after) {
    env_->world->Trace("  a client stops reading for ", absl::FormatDuration(reading_.pause));
    return ReadSoon(std::exchange(reading_.pause, absl::ZeroDuration()));
  }
  Take(*std::exchange(being_written_, nullptr));
  writer_.OnWriteDone(true);
}

void Reader::Take(const v1::GenerateResponse& message) {
  ++messages_read_;
  tokens_read_ += static_cast<size_t>(message.token_ids_size());
  if (record_.ids.size() <= message.index()) {
    record_.ids.resize(message.index() + 1);
    record_.reasons.resize(message.index() + 1);
  }
  auto& ids = record_.ids[message.index()];
  ids.insert(ids.end(), message.token_ids().begin(), message.token_ids().end());
  if (message.has_finished()) record_.reasons[message.index()] = message.finished().reason();
}

void Reader::OnFinish(const absl::Status& status) {
  ++record_.num_finishes;
  record_.status = left_.ok() ? status : left_;
}

}  // namespace baton::sim
