#pragma once

// Runs requests through a decode loop that computes their prompts itself, and tells what came out.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "decode_worker/decode_loop.h"
#include "tests/support/collecting_sink.h"

namespace baton::testing {

// One choice of an answer. Everything a client can see, so that two runs compare with ==.
struct ChoiceOutput {
  std::vector<uint32_t> ids;
  std::vector<float> logprobs;   // if asked for
  std::vector<std::string> top;  // alternatives, serialised
  int finish = 0;                // worker::v1::Finish
  uint32_t stop_token_id = 0;
  uint32_t stop_index = 0;

  bool operator==(const ChoiceOutput& other) const = default;
};
using Output = std::vector<ChoiceOutput>;  // by choice

// Drafts what it is told a text goes on with, but for wrong tokens at some places: acceptance as a
// test wants it. Texts are prompts with their answers.
class OracleDrafter : public decode::Drafter {
 public:
  // The draft at position p is wrong when `wrong(p)`.
  OracleDrafter(std::vector<std::vector<uint32_t>> texts,
                int vocab,
                std::function<bool(size_t position)> wrong)
      : texts_(std::move(texts)), vocab_(vocab), wrong_(std::move(wrong)) {}

  decode::DraftOffer Offer(const decode::Drafting& drafting) override {
    return {FindText(drafting) == nullptr ? 0 : drafting.limit, 0.9f};
  }
  void Draft(absl::Span<decode::Drafting* const> draftings) override {
    for (decode::Drafting* drafting : draftings) {
      const std::vector<uint32_t>& text = *FindText(*drafting);
      for (int i = 0; i < drafting->count; ++i) {
        const size_t at = drafting->sequence->tokens.size() + i;
        const uint32_t right = at < text.size() ? text[at] : 0;
        drafting->tokens[i] = wrong_(at) ? (right + 1) % vocab_ : right;
      }
    }
  }
  void OnVerified(const decode::Drafting& drafting, int accepted) override {
    EXPECT_LE(accepted, drafting.count);
  }
  void Forget(uint64_t order) override {}

 private:
  const std::vector<uint32_t>* FindText(const decode::Drafting& drafting) const {
    const std::vector<uint32_t>& tokens = drafting.sequence->tokens;
    for (const std::vector<uint32_t>& text : texts_) {
      if (text.size() >= tokens.size() && std::equal(tokens.begin(), tokens.end(), text.begin()))
        return &text;
    }
    return nullptr;
  }

  std::vector<std::vector<uint32_t>> texts_;
  int vocab_;
  std::function<bool(size_t)> wrong_;
};

// A loop over `runner`, stepped by hand; checks that positions come once and in order, that
// requests end well, and that nothing is held when idle.
class DecodeDriver {
 public:
  DecodeDriver(const decode::DecodeLoopOptions& options,
               runtime::ModelRunner& runner,
               const text::Tokenizer& tokenizer,
               const worker::WorkerMetrics& metrics = worker::WorkerMetrics())
      : loop_(options, runner, tokenizer, metrics) {}

  decode::DecodeLoop& loop() { return loop_; }

  // All at once; outputs in the same order.
  std::vector<Output> Run(const std::vector<runtime::EngineRequest>& requests) {
    std::vector<std::shared_ptr<Sink>> sinks;
    for (const runtime::EngineRequest& request : requests) {
      sinks.push_back(std::make_shared<Sink>());
      EXPECT_TRUE(loop_.Open(request, /*prefill_locally=*/true, sinks.back()).ok());
    }
    while (loop_.RunOnce(absl::ZeroDuration())) {
    }
    std::vector<Output> outputs;
    for (size_t i = 0; i < requests.size(); ++i) {
      EXPECT_TRUE(sinks[i]->status().ok()) << sinks[i]->status();
      outputs.push_back(OutputOf(*sinks[i], requests[i]));
    }
    EXPECT_EQ(loop_.memory().pool().counts().active, 0);
    EXPECT_EQ(loop_.num_calls(), 0);
    loop_.memory().pool().CheckInvariants();
    loop_.memory().cache().CheckInvariants();
    return outputs;
  }
  Output RunOne(const runtime::EngineRequest& request) { return Run({request})[0]; }

 private:
  using Sink = CollectingSink<worker::v1::DecodeResponse>;

  static Output OutputOf(const Sink& sink, const runtime::EngineRequest& request) {
    Output output(request.params.n);
    for (const worker::v1::DecodeResponse& response : sink.responses()) {
      for (const worker::v1::Token& token : response.tokens().tokens()) {
        ChoiceOutput& choice = output[token.choice()];
        EXPECT_EQ(token.position(), request.prompt_ids.size() + choice.ids.size());
        EXPECT_EQ(choice.finish, 0) << "a token after the end";
        choice.ids.push_back(token.id());
        if (!token.has_logprob()) continue;
        choice.logprobs.push_back(token.logprob());
        for (const worker::v1::Logprob& top : token.top())
          choice.top.push_back(top.SerializeAsString());
      }
      for (const worker::v1::ChoiceFinished& finished : response.tokens().finished()) {
        ChoiceOutput& choice = output[finished.choice()];
        EXPECT_EQ(choice.finish, 0) << "a second end";
        choice.finish = finished.finish();
        choice.stop_token_id = finished.stop_token_id();
        choice.stop_index = finished.stop_index();
      }
    }
    return output;
  }

  decode::DecodeLoop loop_;
};

// Prompt and answer of every choice: what OracleDrafter drafts from.
inline std::vector<std::vector<uint32_t>> TextsOf(
    const std::vector<runtime::EngineRequest>& requests, const std::vector<Output>& outputs) {
  std::vector<std::vector<uint32_t>> texts;
  for (size_t i = 0; i < requests.size(); ++i) {
    for (const ChoiceOutput& choice : outputs[i]) {
      texts.push_back(requests[i].prompt_ids);
      texts.back().insert(texts.back().end(), choice.ids.begin(), choice.ids.end());
    }
  }
  return texts;
}

}  // namespace baton::testing
