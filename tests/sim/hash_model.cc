#include "tests/sim/hash_model.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>

#include <xxhash.h>

#include "engine/base/log.h"
#include "engine/runtime/answer.h"

namespace baton::sim {
namespace {

uint64_t Mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 32);
}

}  // namespace

HashModel::HashModel(kv::KvFormat format, int num_blocks, int max_model_len)
    : max_model_len_(max_model_len) {
  config_.vocab = kVocab;
  config_.num_layers = layout_.num_layers = 3;
  config_.num_kv_heads = layout_.num_kv_heads = 2;
  config_.head_dim = layout_.head_dim = 4;
  layout_.num_blocks = num_blocks;
  layout_.format = format;
  absl::StatusOr<base::Buffer> pool = base::Buffer::Allocate(layout_.pool_bytes());
  BATON_CHECK(pool.ok());
  pool_ = *std::move(pool);
  std::memset(pool_.data(), 0xff, pool_.size());
}

const model::Checkpoint& HashModel::checkpoint() const {
  BATON_CHECK(false, "the hash has no files");
}

absl::Status HashModel::Step(absl::Span<const runtime::StepSequence> sequences,
                             runtime::LayerObserver* observer,
                             absl::Span<float>* logits,
                             runtime::StepTimings* timings) {
  for (const runtime::StepSequence& part : sequences)
    BATON_CHECK(part.block_table.size() * kv::kBlockTokens >= part.start + part.tokens.size());
  for (int layer = 0; layer < layout_.num_layers; ++layer) {
    for (const runtime::StepSequence& part : sequences) Append(part, layer);
    if (on_layer) on_layer();
    if (observer != nullptr) observer->OnLayerDone(layer);
  }
  logits_.clear();
  for (const runtime::StepSequence& part : sequences) {
    for (const int row : part.logit_rows) {
      uint64_t hash = 1;
      for (int layer = 0; layer < layout_.num_layers; ++layer)
        hash = Mix(hash, PrefixHash(layer, part.block_table, part.start + row + 1));
      for (uint32_t id = 0; id < kVocab; ++id)
        logits_.push_back(static_cast<float>(Mix(hash, id) % 100003) / 10000.0f);
    }
  }
  *logits = absl::MakeSpan(logits_);
  if (timings != nullptr) *timings = {};
  return absl::OkStatus();
}

uint64_t HashModel::BlockHash(uint64_t hash, int layer, kv::BlockId block, int rows) const {
  const uint8_t* bytes = pool_.data() + layout_.BlockOffset(layer, block);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout_.num_kv_heads; ++head) {
      hash = XXH3_64bits_withSeed(bytes + layout_.RowOffset(side, head, 0),
                                  rows * layout_.row_bytes(), hash);
      if (layout_.scale_bytes() == 0) continue;
      hash = XXH3_64bits_withSeed(bytes + layout_.ScaleOffset(side, head, 0), rows * sizeof(float),
                                  hash);
    }
  }
  return hash;
}

uint64_t HashModel::PrefixHash(int layer, absl::Span<const kv::BlockId> table, int length) const {
  uint64_t hash = static_cast<uint64_t>(layer);
  for (int start = 0; start < length; start += kv::kBlockTokens) {
    hash = BlockHash(hash, layer, table[start / kv::kBlockTokens],
                     std::min(kv::kBlockTokens, length - start));
  }
  return hash;
}

void HashModel::Append(const runtime::StepSequence& part, int layer) {
  const int full = part.start / kv::kBlockTokens * kv::kBlockTokens;
  // Of the layer below, over the full blocks before the token's own.
  uint64_t before = layer == 0 ? 0 : PrefixHash(layer - 1, part.block_table, full);
  for (size_t i = 0; i < part.tokens.size(); ++i) {
    const int position = part.start + static_cast<int>(i);
    const int row = position % kv::kBlockTokens;
    const kv::BlockId block = part.block_table[position / kv::kBlockTokens];
    uint64_t hash = Mix(Mix(part.tokens[i], position), static_cast<uint64_t>(layer));
    if (layer > 0) {
      const uint64_t below = BlockHash(before, layer - 1, block, row + 1);
      hash = Mix(hash, below);
      if (row + 1 == kv::kBlockTokens) before = below;
    }
    uint8_t* bytes = pool_.data() + layout_.BlockOffset(layer, block);
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < layout_.num_kv_heads; ++head) {
        uint8_t* out = bytes + layout_.RowOffset(side, head, row);
        for (size_t at = 0; at < layout_.row_bytes(); at += 4) {
          hash = Mix(hash, at + 1);
          std::memcpy(out + at, &hash, 4);
        }
        if (layout_.scale_bytes() == 0) continue;
        hash = Mix(hash, 7);
        std::memcpy(bytes + layout_.ScaleOffset(side, head, row), &hash, sizeof(float));
      }
    }
  }
}

void HashModel::CopyBlock(kv::BlockId from, kv::BlockId to) {
  for (int layer = 0; layer < layout_.num_layers; ++layer) {
    std::memcpy(pool_.data() + layout_.BlockOffset(layer, to),
                pool_.data() + layout_.BlockOffset(layer, from), layout_.block_bytes());
  }
}

const text::Tokenizer& Letters() {
  static const text::Tokenizer* const letters = [] {
    text::VocabularySpec spec;
    for (int id = 0; id < kVocab; ++id)
      spec.tokens.push_back(std::string(1, static_cast<char>('a' + id)));
    spec.pre_tokenizer = "qwen2";
    absl::StatusOr<std::unique_ptr<text::Tokenizer>> tokenizer =
        text::Tokenizer::FromVocabulary(std::move(spec));
    BATON_CHECK(tokenizer.ok(), "tokenizer: ", tokenizer.status().ToString());
    return tokenizer->release();
  }();
  return *letters;
}

std::unique_ptr<SimModel> MakeModel(const ModelShape& shape, int num_blocks) {
  if (shape.real) return MakeRealModel(shape, num_blocks);
  return std::make_unique<HashModel>(shape.format, num_blocks, shape.max_model_len);
}

std::vector<uint32_t> SoloIds(const runtime::EngineRequest& request,
                              uint32_t choice,
                              const ModelShape& shape) {
  // Kept: what is read has been written before by this request.
  static auto* const models =
      new std::map<std::pair<bool, kv::KvFormat>, std::unique_ptr<SimModel>>;
  std::unique_ptr<SimModel>& model = (*models)[{shape.real, shape.format}];
  const int max_model_len = shape.max_model_len;
  if (model == nullptr || model->max_model_len() != max_model_len)
    model = MakeModel(shape, kv::BlocksFor(max_model_len));
  std::vector<kv::BlockId> table(model->layout().num_blocks);
  std::iota(table.begin(), table.end(), 0);
  runtime::StepSampler sampler(*model, kVocab);
  runtime::Answer answer(request, choice, Letters(), max_model_len);
  std::vector<uint32_t> tokens = request.prompt_ids;
  std::vector<uint32_t> ids;
  size_t computed = 0;
  while (!answer.finished()) {
    const auto pending = absl::MakeConstSpan(tokens).subspan(computed);
    const int row = static_cast<int>(pending.size()) - 1;
    const runtime::StepSequence part{pending, static_cast<int>(computed), table,
                                     absl::MakeConstSpan(&row, 1)};
    runtime::StepTimings timings;
    sampler.Begin();
    answer.Ask(&sampler);
    BATON_CHECK(sampler.Step(absl::MakeConstSpan(&part, 1), nullptr, &timings).ok());
    computed = tokens.size();
    const absl::StatusOr<runtime::SampledToken> token = answer.Draw(&sampler, 0);
    BATON_CHECK(token.ok());
    ids.push_back(token->id);
    tokens.push_back(token->id);
  }
  return ids;
}

}  // namespace baton::sim
