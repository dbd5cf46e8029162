#include "tests/parity/ops_pipeline.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/ops/canonical_math.h"

namespace baton::tests {
namespace {

std::vector<float> Vector(int n, uint64_t seed, uint64_t salt, float center, float spread) {
  std::vector<float> out(n);
  for (int i = 0; i < n; ++i) out[i] = center + spread * Noise(seed, salt, i);
  return out;
}

std::vector<float> RopeTable(int num_positions, int head_dim) {
  std::vector<float> table(static_cast<size_t>(num_positions) * head_dim);
  const int half = head_dim / 2;
  for (int pos = 0; pos < num_positions; ++pos) {
    for (int i = 0; i < half; ++i) {
      double sine, cosine;
      ops::CanonicalSinCos(pos * std::pow(10000.0, -2.0 * i / head_dim), &sine, &cosine);
      table[static_cast<size_t>(pos) * head_dim + i] = static_cast<float>(cosine);
      table[static_cast<size_t>(pos) * head_dim + half + i] = static_cast<float>(sine);
    }
  }
  return table;
}

}  // namespace

float Noise(uint64_t seed, uint64_t salt, uint64_t index) {
  uint64_t x = seed * 0x9e3779b97f4a7c15ull + salt * 0xbf58476d1ce4e5b9ull +
               index * 0x94d049bb133111ebull + 0x632be59bd9b4e019ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  return static_cast<float>(static_cast<int64_t>(x) >> 40) / 8388608.0f;
}

std::string LayerShape::Describe() const {
  return absl::StrCat("E=", hidden, " F=", ffn, " V=", vocab, " Hq=", num_heads,
                      " Hkv=", num_kv_heads, " D=", head_dim, " qk_norm=", qk_norm, " bias=", bias,
                      " weights=", ops::WeightDtypeName(weights), " kv=", kv::KvFormatName(format),
                      " seed=", seed);
}

std::string FirstDifference(const Record& a, const Record& b) {
  if (a.size() != b.size()) return absl::StrCat("records: ", a.size(), " and ", b.size());
  for (size_t r = 0; r < a.size(); ++r) {
    const auto& [name, x] = a[r];
    const std::vector<float>& y = b[r].second;
    if (x.size() != y.size()) return absl::StrCat(name, ": sizes ", x.size(), " and ", y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::memcmp(&x[i], &y[i], sizeof(float)) == 0 || (std::isnan(x[i]) && std::isnan(y[i])))
        continue;
      return absl::StrCat(name, "[", i, "]: ", x[i], " and ", y[i], " difference ", x[i] - y[i]);
    }
  }
  return "";
}

LayerPipeline::LayerPipeline(ops::Backend* backend, const LayerShape& shape)
    : backend_(backend), shape_(shape) {
  const LayerShape& s = shape;
  layout_ = {.num_layers = 1,
             .num_kv_heads = s.num_kv_heads,
             .head_dim = s.head_dim,
             .num_blocks = s.num_blocks,
             .format = s.format};
  absl::StatusOr<base::Buffer> pool = base::Buffer::Allocate(layout_.pool_bytes());
  BATON_CHECK(pool.ok(), "no memory for the pool");
  pool_ = *std::move(pool);
  std::memset(pool_.data(), 0xff, pool_.size());  // NaN in every format
  norm1_ = Vector(s.hidden, s.seed, 1, 1.0f, 0.5f);
  norm2_ = Vector(s.hidden, s.seed, 2, 1.0f, 0.5f);
  if (s.qk_norm) q_weight_ = Vector(s.head_dim, s.seed, 3, 1.0f, 0.5f);
  if (s.qk_norm) k_weight_ = Vector(s.head_dim, s.seed, 4, 1.0f, 0.5f);
  const int qkv_width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
  if (s.bias) bias_ = Vector(qkv_width, s.seed, 5, 0.0f, 0.5f);
  rope_ = RopeTable(s.num_positions, s.head_dim);
  for (int i = 0; i < 2 * s.num_kv_heads; ++i) scales_.push_back(std::ldexp(1.0f, -6 + i % 3));
  table_ = Weights(s.vocab, s.hidden, 10, false);
  qkv_ = Weights(qkv_width, s.hidden, 11, false);
  o_ = Weights(s.hidden, s.num_heads * s.head_dim, 12, false);
  gate_up_ = Weights(2 * s.ffn, s.hidden, 13, true);
  down_ = Weights(s.hidden, s.ffn, 14, false);
  residual_ = Room(ops::ActivationKind::kResidual, s.hidden);
  normed_ = Room(ops::ActivationKind::kLinearInput, s.hidden);
  projected_ = Room(ops::ActivationKind::kProjected, qkv_width);
  attended_ = Room(ops::ActivationKind::kLinearInput, s.num_heads * s.head_dim);
  inner_ = Room(ops::ActivationKind::kLinearInput, s.ffn);
}

std::unique_ptr<ops::Matrix> LayerPipeline::Weights(int rows,
                                                    int cols,
                                                    uint64_t salt,
                                                    bool interleave_half) {
  ops::MatrixSource source;
  source.rows = rows;
  source.cols = cols;
  const uint64_t seed = shape_.seed;
  const float size = 2.0f / std::sqrt(static_cast<float>(cols));
  source.read_row = [=](int row, float* out) {
    for (int k = 0; k < cols; ++k)
      out[k] = size * Noise(seed, salt, static_cast<uint64_t>(row) * cols + k);
  };
  absl::StatusOr<std::unique_ptr<ops::Matrix>> matrix = backend_->Pack(source, interleave_half);
  BATON_CHECK(matrix.ok(), "pack refused");
  return *std::move(matrix);
}

std::unique_ptr<ops::Activation> LayerPipeline::Room(ops::ActivationKind kind, int width) {
  absl::StatusOr<std::unique_ptr<ops::Activation>> room =
      backend_->NewActivation(kind, shape_.max_tokens, width);
  BATON_CHECK(room.ok(), "activation refused");
  return *std::move(room);
}

absl::Status LayerPipeline::Keep(const char* name,
                                 const ops::Activation& activation,
                                 int num_tokens,
                                 int width,
                                 Record* record) {
  BATON_ASSIGN_OR_RETURN(std::vector<float> values, backend_->Read(activation, num_tokens, width));
  record->emplace_back(name, std::move(values));
  return absl::OkStatus();
}

absl::Status LayerPipeline::Step(const std::vector<LayerSequence>& sequences, Record* record) {
  const LayerShape& s = shape_;
  std::vector<int32_t> ids, positions, rows;
  std::vector<int64_t> slots;
  std::vector<ops::SequenceView> views;
  for (const LayerSequence& sequence : sequences) {
    const int length = static_cast<int>(sequence.tokens.size());
    views.push_back({.query_start = static_cast<int>(ids.size()),
                     .query_len = length,
                     .context_len = sequence.start + length,
                     .block_table = sequence.block_table});
    for (int i = 0; i < length; ++i) {
      const int pos = sequence.start + i;
      rows.push_back(static_cast<int32_t>(ids.size()));
      ids.push_back(sequence.tokens[i]);
      positions.push_back(pos);
      const int64_t block = sequence.block_table[pos / kv::kBlockTokens];
      slots.push_back(sequence.store ? block * kv::kBlockTokens + pos % kv::kBlockTokens : -1);
    }
  }
  const int n = static_cast<int>(ids.size());
  const int qkv_width = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
  const ops::KvCacheView cache = {
      .layout = &layout_, .layer_base = pool_.data(), .scales = scales_};
  BATON_RETURN_IF_ERROR(backend_->Embed(*table_, ids, residual_.get()));
  BATON_RETURN_IF_ERROR(Keep("embed", *residual_, n, s.hidden, record));
  BATON_RETURN_IF_ERROR(backend_->RmsNorm(*residual_, n, norm1_, 1e-6f, normed_.get()));
  BATON_RETURN_IF_ERROR(Keep("norm", *normed_, n, s.hidden, record));
  BATON_RETURN_IF_ERROR(backend_->QkvProject(*normed_, n, *qkv_, bias_, projected_.get()));
  BATON_RETURN_IF_ERROR(Keep("qkv", *projected_, n, qkv_width, record));
  ops::QkNormRopeAppendArgs append = {.qkv = projected_.get(),
                                      .num_tokens = n,
                                      .num_heads = s.num_heads,
                                      .num_kv_heads = s.num_kv_heads,
                                      .head_dim = s.head_dim,
                                      .q_weight = q_weight_,
                                      .k_weight = k_weight_,
                                      .eps = 1e-6f,
                                      .positions = positions,
                                      .slots = slots,
                                      .rope = rope_,
                                      .cache = cache};
  BATON_RETURN_IF_ERROR(backend_->QkNormRopeAppend(append));
  BATON_RETURN_IF_ERROR(Keep("rope", *projected_, n, qkv_width, record));
  ops::PagedAttentionArgs attention = {
      .qkv = projected_.get(),
      .num_tokens = n,
      .num_heads = s.num_heads,
      .num_kv_heads = s.num_kv_heads,
      .head_dim = s.head_dim,
      .softmax_scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
      .sequences = views,
      .cache = cache,
      .out = attended_.get()};
  BATON_RETURN_IF_ERROR(backend_->PagedAttention(attention));
  BATON_RETURN_IF_ERROR(Keep("attention", *attended_, n, s.num_heads * s.head_dim, record));
  BATON_RETURN_IF_ERROR(backend_->ProjectAdd(*attended_, n, *o_, residual_.get()));
  BATON_RETURN_IF_ERROR(Keep("o", *residual_, n, s.hidden, record));
  BATON_RETURN_IF_ERROR(backend_->RmsNorm(*residual_, n, norm2_, 1e-6f, normed_.get()));
  BATON_RETURN_IF_ERROR(backend_->GateUpSilu(*normed_, n, *gate_up_, inner_.get()));
  BATON_RETURN_IF_ERROR(Keep("gate_up", *inner_, n, s.ffn, record));
  BATON_RETURN_IF_ERROR(backend_->ProjectAdd(*inner_, n, *down_, residual_.get()));
  BATON_RETURN_IF_ERROR(Keep("down", *residual_, n, s.hidden, record));
  std::vector<float> logits(static_cast<size_t>(n) * s.vocab);
  BATON_RETURN_IF_ERROR(backend_->Logits(*residual_, rows, norm1_, 1e-6f, *table_, logits.data()));
  record->emplace_back("logits", std::move(logits));
  return backend_->Synchronize();
}

}  // namespace baton::tests
