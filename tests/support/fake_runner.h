#pragma once

// A model that is a hash: the next token depends on every token before it, read back from the KV
// blocks. So a block that is lost, foreign, stale or in the wrong place changes the ids, as it
// would with a real model, only at once and for certain.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/log.h"
#include "engine/runtime/model_runner.h"
#include "engine/runtime/sequence.h"
#include "engine/text/tokenizer.h"

namespace baton::testing {

inline constexpr int kFakeVocab = 26;

inline uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 32);
}

// The logit of a token after a context with this hash.
inline float FakeLogit(uint64_t hash, uint32_t id) {
  return static_cast<float>(Mix(hash, id) % 100003) / 10000.0f;
}

class FakeRunner : public runtime::ModelRunner {
 public:
  explicit FakeRunner(int num_blocks, int max_model_len = 4096) : max_model_len_(max_model_len) {
    config_.vocab = kFakeVocab;
    config_.num_layers = layout_.num_layers = 3;
    config_.num_kv_heads = layout_.num_kv_heads = 2;
    config_.head_dim = layout_.head_dim = 8;
    layout_.num_blocks = num_blocks;
    layout_.format = kv::KvFormat::kF32;
    absl::StatusOr<base::Buffer> pool =
        base::Buffer::AllocateShared("fake-kv", layout_.pool_bytes());
    BATON_CHECK(pool.ok());
    pool_ = *std::move(pool);
    std::memset(pool_.data(), 0xff, pool_.size());
  }

  absl::Status Step(absl::Span<const runtime::StepSequence> sequences,
                    runtime::LayerObserver* observer,
                    absl::Span<float>* logits,
                    runtime::StepTimings* timings) override {
    ++steps;
    for (const runtime::StepSequence& part : sequences) {
      BATON_CHECK(part.block_table.size() * kv::kBlockTokens >= part.start + part.tokens.size());
    }
    for (int layer = 0; layer < layout_.num_layers; ++layer) {
      for (const runtime::StepSequence& part : sequences) Append(part, layer);
      if (on_layer) on_layer(layer);
      if (observer != nullptr) observer->OnLayerDone(layer);
    }
    logits_.clear();
    for (const runtime::StepSequence& part : sequences) {
      tokens_computed += static_cast<int64_t>(part.tokens.size());
      uint64_t hash = 1;
      int hashed = 0;
      for (const int row : part.logit_rows) {
        for (; hashed <= part.start + row; ++hashed) hash = HashPosition(part, hashed, hash);
        const bool nan = static_cast<int64_t>(part.tokens[row]) == nan_token;
        for (uint32_t id = 0; id < kFakeVocab; ++id)
          logits_.push_back(nan ? std::numeric_limits<float>::quiet_NaN() : FakeLogit(hash, id));
      }
    }
    if (logits != nullptr) *logits = absl::MakeSpan(logits_);
    if (timings != nullptr) *timings = {};
    return step_status;
  }

  const model::ModelConfig& config() const override { return config_; }
  const model::Checkpoint& checkpoint() const override {
    BATON_CHECK(false, "the fake has no files");
  }
  const kv::KvLayout& layout() const override { return layout_; }
  base::Buffer& kv_pool() override { return pool_; }
  int max_model_len() const override { return max_model_len_; }
  ops::WeightDtype weight_dtype() const override { return ops::WeightDtype::kF32; }
  std::string kv_scales_fingerprint() const override { return ""; }
  std::string device() const override { return "fake"; }
  void CopyBlock(kv::BlockId from, kv::BlockId to) override {
    for (int layer = 0; layer < layout_.num_layers; ++layer) {
      std::memcpy(pool_.data() + layout_.BlockOffset(layer, to),
                  pool_.data() + layout_.BlockOffset(layer, from), layout_.block_bytes());
    }
  }

  absl::Status BlocksLanded(absl::Span<const kv::BlockId> blocks) override {
    landed.insert(landed.end(), blocks.begin(), blocks.end());
    return landed_status;
  }

  // What tests look at and change.
  int steps = 0;
  int64_t tokens_computed = 0;
  std::function<void(int layer)> on_layer;  // inside a step, before the observer
  int64_t nan_token = -1;                   // a context that ends with it gives NaN
  absl::Status step_status;
  std::vector<kv::BlockId> landed;  // to be brought to the device that this might be
  absl::Status landed_status;

 private:
  // The row of one (layer, K|V, head): eight numbers that only this token at this place has.
  uint32_t* Row(int layer, int side, int head, absl::Span<const kv::BlockId> table, int position) {
    const size_t offset = layout_.BlockOffset(layer, table[position / kv::kBlockTokens]) +
                          layout_.RowOffset(side, head, position % kv::kBlockTokens);
    return reinterpret_cast<uint32_t*>(pool_.data() + offset);
  }

  void Append(const runtime::StepSequence& part, int layer) {
    for (size_t i = 0; i < part.tokens.size(); ++i) {
      const int position = part.start + static_cast<int>(i);
      for (int side = 0; side < 2; ++side) {
        for (int head = 0; head < layout_.num_kv_heads; ++head) {
          uint32_t* row = Row(layer, side, head, part.block_table, position);
          for (int k = 0; k < layout_.head_dim; ++k) {
            row[k] = static_cast<uint32_t>(
                Mix(part.tokens[i], Mix(position, (layer * 2 + side) * 64 + head * 8 + k)));
          }
        }
      }
    }
  }

  uint64_t HashPosition(const runtime::StepSequence& part, int position, uint64_t hash) {
    for (int layer = 0; layer < layout_.num_layers; ++layer) {
      for (int side = 0; side < 2; ++side) {
        for (int head = 0; head < layout_.num_kv_heads; ++head) {
          const uint32_t* row = Row(layer, side, head, part.block_table, position);
          for (int k = 0; k < layout_.head_dim; ++k) hash = Mix(hash, row[k]);
        }
      }
    }
    return hash;
  }

  model::ModelConfig config_;
  kv::KvLayout layout_;
  const int max_model_len_;
  base::Buffer pool_;
  std::vector<float> logits_;
};

// Token `id` is the letter 'a' + id.
inline std::unique_ptr<text::Tokenizer> FakeTokenizer() {
  text::VocabularySpec spec;
  for (int id = 0; id < kFakeVocab; ++id)
    spec.tokens.push_back(std::string(1, static_cast<char>('a' + id)));
  spec.pre_tokenizer = "qwen2";
  absl::StatusOr<std::unique_ptr<text::Tokenizer>> tokenizer =
      text::Tokenizer::FromVocabulary(std::move(spec));
  BATON_CHECK(tokenizer.ok(), "tokenizer: ", tokenizer.status().ToString());
  return *std::move(tokenizer);
}

// What the model says after `prompt`, worked out without an engine: one request alone, one token at
// a time. Greedy.
inline std::vector<uint32_t> GreedyIds(std::vector<uint32_t> prompt, int count) {
  FakeRunner runner(kv::BlocksFor(static_cast<int>(prompt.size()) + count) + 1);
  std::vector<kv::BlockId> table;
  for (int block = 0; block < runner.layout().num_blocks; ++block) table.push_back(block);
  std::vector<uint32_t> ids;
  for (int i = 0; i < count; ++i) {
    const int start = i == 0 ? 0 : static_cast<int>(prompt.size()) - 1;
    const absl::Span<const uint32_t> tokens = absl::MakeConstSpan(prompt).subspan(start);
    const int row = static_cast<int>(tokens.size()) - 1;
    const runtime::StepSequence part{tokens, start, table, absl::MakeConstSpan(&row, 1)};
    absl::Span<float> logits;
    runtime::StepTimings timings;
    BATON_CHECK(runner.Step(absl::MakeConstSpan(&part, 1), nullptr, &logits, &timings).ok());
    uint32_t best = 0;
    for (uint32_t id = 1; id < kFakeVocab; ++id) {
      if (logits[id] > logits[best]) best = id;
    }
    ids.push_back(best);
    prompt.push_back(best);
  }
  return ids;
}

// `length` token ids, different for each seed.
inline std::vector<uint32_t> FakePrompt(int length, uint64_t seed) {
  std::vector<uint32_t> ids;
  for (int i = 0; i < length; ++i) ids.push_back(static_cast<uint32_t>(Mix(seed, i) % kFakeVocab));
  return ids;
}

// Greedy, no stop rules but the length.
inline runtime::EngineRequest FakeRequest(std::vector<uint32_t> prompt, uint32_t max_tokens) {
  runtime::EngineRequest request;
  request.request_id = "test";
  request.prompt_ids = std::move(prompt);
  request.params.temperature = 0;
  request.params.max_tokens = max_tokens;
  return request;
}

}  // namespace baton::testing
