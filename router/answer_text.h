#pragma once

// One of the n answers as the client sees it: each position once, in order, as text and ids.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "baton/v1/generation.pb.h"
#include "baton/worker/v1/common.pb.h"

#include "engine/text/text_assembler.h"

namespace baton::router {

// Thread-compatible.
class AnswerText {
 public:
  // `sampling` outlives it. The first token has position `first_position`.
  AnswerText(uint32_t index,
             uint32_t first_position,
             const worker::v1::Sampling& sampling,
             text::TextAssembler assembler)
      : index_(index),
        next_position_(first_position),
        sampling_(&sampling),
        assembler_(std::move(assembler)) {}

  // Takes a token. One of a position that was taken already, or behind the end, changes nothing:
  // true is returned for a new one only. Errors: INTERNAL when positions are missing before it.
  absl::StatusOr<bool> Accept(const worker::v1::Token& token);
  // The worker says that it is over. Changes nothing when it is.
  void Finish(const worker::v1::ChoiceFinished& finished);

  bool finished() const { return finished_; }
  uint32_t next_position() const { return next_position_; }
  // All tokens so far, the stop token included.
  const std::vector<uint32_t>& ids() const { return ids_; }

  // What has come since the last time. `out` has no finish when the answer goes on. False: nothing
  // new, nothing written.
  bool Take(v1::GenerateResponse* out);

 private:
  void End(v1::FinishReason reason);

  const uint32_t index_;
  uint32_t next_position_;
  const worker::v1::Sampling* const sampling_;
  text::TextAssembler assembler_;
  std::vector<uint32_t> ids_;
  bool finished_ = false;
  bool finish_taken_ = false;
  v1::GenerateResponse pending_;
};

}  // namespace baton::router
