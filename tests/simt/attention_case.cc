#include "tests/simt/attention_case.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace baton::simt {

using ops::cuda::Element;

// Nearest even, for values in the normal range or zero.
uint16_t F16FromFloat(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) return static_cast<uint16_t>(sign);  // below 2^-14: zero
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

AttentionCase::AttentionCase(const AttentionShape& shape) : shape_(shape), random_(shape.seed) {
  const AttentionShape& s = shape_;
  constexpr kv::KvFormat kFormats[] = {kv::KvFormat::kFp8, kv::KvFormat::kFp8Dynamic,
                                       kv::KvFormat::kBf16, kv::KvFormat::kF32};
  const int num_sequences = static_cast<int>(s.query_lens.size());
  int num_blocks = 0;
  starts_ = {0};
  for (int b = 0; b < num_sequences; ++b) {
    starts_.push_back(starts_.back() + s.query_lens[b]);
    contexts_.push_back(s.context_lens[b]);
    max_blocks_ = std::max(max_blocks_, kv::BlocksFor(s.context_lens[b]));
    num_blocks += kv::BlocksFor(s.context_lens[b]);
  }
  ++max_blocks_;  // the tables are longer than any sequence needs; what lies there is poison
  layout_ = {.num_layers = 1,
             .num_kv_heads = s.kv_heads,
             .head_dim = s.dim,
             .num_blocks = num_blocks + 1,
             .format = kFormats[static_cast<int>(s.format)]};
  pool_.assign(layout_.pool_bytes(), 0xff);
  const std::vector<int> blocks = random_.Distinct(num_blocks, num_blocks + 1);
  tables_.assign(static_cast<size_t>(num_sequences) * max_blocks_, -1);
  int next = 0;
  for (int b = 0; b < num_sequences; ++b) {
    for (int i = 0; i < kv::BlocksFor(s.context_lens[b]); ++i)
      tables_[b * max_blocks_ + i] = blocks[next++];
  }
  for (int i = 0; i < 2 * s.kv_heads; ++i)
    scales_.push_back(std::ldexp(1.0f, random_.Between(-6, -2)));
  for (int b = 0; b < num_sequences; ++b) {
    for (int token = 0; token < s.context_lens[b]; ++token) {
      for (int side = 0; side < 2; ++side)
        for (int head = 0; head < s.kv_heads; ++head) FillRow(b, token, side, head);
    }
  }
  q_ = random_.Values(static_cast<size_t>(starts_.back()) * s.heads * s.dim, 1.5f);
  for (float& value : q_) {
    value = s.q == Element::kFp8
                ? kQueryScale * base::FloatFromFp8(base::Fp8FromFloat(value / kQueryScale))
                : FloatFromF16(F16FromFloat(value));
  }

  device_pool_ = std::make_unique<DeviceArray<uint8_t>>(pool_);
  std::vector<uint8_t> q_bytes;
  for (const float value : q_) {
    const uint32_t bits = s.q == Element::kF32   ? std::bit_cast<uint32_t>(value)
                          : s.q == Element::kFp8 ? base::Fp8FromFloat(value / kQueryScale)
                                                 : F16FromFloat(value);
    for (int i = 0; i < (s.q == Element::kF32 ? 4 : s.q == Element::kFp8 ? 1 : 2); ++i)
      q_bytes.push_back(static_cast<uint8_t>(bits >> (8 * i)));
  }
  device_q_ = std::make_unique<DeviceArray<uint8_t>>(q_bytes);
  const size_t out_bytes = s.out == Element::kF32 ? 4 : s.out == Element::kBf16 ? 2 : 1;
  device_out_ = std::make_unique<DeviceArray<uint8_t>>(q_.size() * out_bytes);
  device_out_scales_ =
      std::make_unique<DeviceArray<float>>(static_cast<size_t>(s.heads) * starts_.back());
  device_out_->Fill();  // of sequences that are left out, and elements without scales
  device_out_scales_->Fill();
  device_scales_ = std::make_unique<DeviceArray<float>>(scales_);
  device_starts_ = std::make_unique<DeviceArray<int32_t>>(starts_);
  device_contexts_ = std::make_unique<DeviceArray<int32_t>>(contexts_);
  device_tables_ = std::make_unique<DeviceArray<int32_t>>(tables_);
  std::vector<int32_t> all(num_sequences);
  std::iota(all.begin(), all.end(), 0);
  Choose(all);
}

void AttentionCase::Choose(std::vector<int32_t> chosen) {
  chosen_ = std::move(chosen);
  device_chosen_ = std::make_unique<DeviceArray<int32_t>>(chosen_);
}

ops::cuda::PagedAttentionParams AttentionCase::params() {
  ops::cuda::PagedAttentionParams params;
  params.q = device_q_->data();
  params.q_element = shape_.q;
  params.out = {.data = device_out_->data(),
                .element = shape_.out,
                .scales = device_out_scales_->data(),
                .pitch = starts_.back()};
  params.num_heads = shape_.heads;
  params.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape_.dim)));
  params.cache = {.base = device_pool_->data(),
                  .block_bytes = static_cast<int64_t>(layout_.block_bytes()),
                  .format = shape_.format,
                  .num_kv_heads = shape_.kv_heads,
                  .head_dim = shape_.dim,
                  .scales = device_scales_->data()};
  params.query_starts = device_starts_->data();
  params.context_lens = device_contexts_->data();
  params.block_tables = device_tables_->data();
  params.max_blocks = max_blocks_;
  params.sequences = device_chosen_->data();
  params.num_sequences = static_cast<int>(chosen_.size());
  return params;
}

int AttentionCase::max_query_len() const {
  int most = 0;
  for (const int32_t sequence : chosen_) most = std::max(most, shape_.query_lens[sequence]);
  return most;
}

size_t AttentionCase::RowAt(int sequence, int token, int side, int head) const {
  const int block = tables_[sequence * max_blocks_ + token / kv::kBlockTokens];
  return layout_.BlockOffset(0, block) + layout_.RowOffset(side, head, token % kv::kBlockTokens);
}

void AttentionCase::FillRow(int sequence, int token, int side, int head) {
  const size_t row = RowAt(sequence, token, side, head);
  const bool nothing = shape_.format == Format::kFp8Dynamic && random_.Between(0, 15) == 0;
  float scale = 1;
  if (shape_.format == Format::kFp8) scale = scales_[side * shape_.kv_heads + head];
  if (shape_.format == Format::kFp8Dynamic) {
    // Keys of one size; values from large to tiny, which f16 weights must bear.
    scale = nothing     ? 0.0f
            : side == 0 ? 0.008f * (1 + random_.Between(0, 7))
                        : std::ldexp(1.0f + 0.1f * random_.Between(0, 9), -random_.Between(2, 20));
    const int block = tables_[sequence * max_blocks_ + token / kv::kBlockTokens];
    std::memcpy(&pool_[layout_.BlockOffset(0, block) +
                       layout_.ScaleOffset(side, head, token % kv::kBlockTokens)],
                &scale, sizeof(scale));
  }
  for (int i = 0; i < shape_.dim; ++i) {
    const float value = random_.Value();
    uint8_t* at = &pool_[row + i * layout_.element_bytes()];
    if (shape_.format == Format::kF32) {
      std::memcpy(at, &value, 4);
    } else if (shape_.format == Format::kBf16) {
      const uint16_t bits = base::Bf16FromFloat(value);
      std::memcpy(at, &bits, 2);
    } else if (shape_.format == Format::kFp8) {
      *at = base::Fp8FromFloat(value / scale);
    } else {
      *at = nothing ? 0 : base::Fp8FromFloat(value * 100);
    }
  }
}

float AttentionCase::Stored(int sequence, int token, int side, int head, int i) const {
  const uint8_t* at = &pool_[RowAt(sequence, token, side, head) + i * layout_.element_bytes()];
  if (shape_.format == Format::kF32) {
    float value;
    std::memcpy(&value, at, 4);
    return value;
  }
  if (shape_.format == Format::kBf16) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return base::FloatFromBf16(bits);
  }
  float scale = scales_[side * shape_.kv_heads + head];
  if (shape_.format == Format::kFp8Dynamic) {
    const int block = tables_[sequence * max_blocks_ + token / kv::kBlockTokens];
    std::memcpy(&scale,
                &pool_[layout_.BlockOffset(0, block) +
                       layout_.ScaleOffset(side, head, token % kv::kBlockTokens)],
                sizeof(scale));
  }
  return base::FloatFromFp8(*at) * scale;
}

void AttentionCase::SpoilValue(int sequence, int token, int dim) {
  for (int head = 0; head < shape_.kv_heads; ++head)
    pool_[RowAt(sequence, token, 1, head) + dim] = 0x7f;
  device_pool_->Set(pool_);
}

std::vector<float> AttentionCase::OutputRow(int sequence, int query, int head) {
  if (out_.empty()) {
    out_ = device_out_->Get();
    out_scales_ = device_out_scales_->Get();
  }
  const int64_t token = starts_[sequence] + query;
  std::vector<float> row;
  for (int i = 0; i < shape_.dim; ++i) {
    const size_t at = (token * shape_.heads + head) * shape_.dim + i;
    if (shape_.out == Element::kF32) {
      float value;
      std::memcpy(&value, &out_[4 * at], 4);
      row.push_back(value);
    } else if (shape_.out == Element::kBf16) {
      uint16_t bits;
      std::memcpy(&bits, &out_[2 * at], 2);
      row.push_back(base::FloatFromBf16(bits));
    } else {
      row.push_back(base::FloatFromFp8(out_[at]) * out_scales_[head * starts_.back() + token]);
    }
  }
  return row;
}

void AttentionCase::Check() {
  out_.clear();
  for (size_t b = 0; b < shape_.query_lens.size(); ++b) {
    const int sequence = static_cast<int>(b);
    const bool chosen = std::count(chosen_.begin(), chosen_.end(), sequence) > 0;
    for (int query = 0; query < shape_.query_lens[b]; ++query) {
      for (int head = 0; head < shape_.heads; ++head) {
        if (chosen) {
          CheckQuery(sequence, query, head);
        } else {
          for (const float value : OutputRow(sequence, query, head)) ASSERT_TRUE(std::isnan(value));
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// Of a weight exp(score - largest), whose sum over all tokens is `total`, as part of that sum: f16
// has 2^-11 of it, and e4m3, times 448, 2^-4 or half of its least step.
double AttentionCase::WeightError(double weight, double total) const {
  if (shape_.q != Element::kFp8) return 0x1p-11 * weight / total;
  return std::max(0x1p-4 * weight, 0x1p-10 / 448) / total;
}

// Scores are f32 sums of D products, the output one of all tokens; where q is e4m3, a tensor core
// keeps 14 bits of what it adds 32 products to. Then the output is rounded to its own type.
void AttentionCase::CheckQuery(int sequence, int query, int head) {
  const int dim = shape_.dim, kv_head = head / (shape_.heads / shape_.kv_heads);
  const float* q =
      &q_[(static_cast<size_t>(starts_[sequence] + query) * shape_.heads + head) * dim];
  const int visible = contexts_[sequence] - shape_.query_lens[sequence] + query + 1;
  std::vector<double> scores(visible);
  const bool fp8 = shape_.q == Element::kFp8;
  const double score_step = fp8 ? (dim / 32) * 0x1p-13 : (dim + 8) * 0x1p-24;
  const double sum_step = fp8 ? (visible / 32 + 2) * 0x1p-13 : visible * 0x1p-24;
  double largest = -INFINITY, score_error = 0;
  for (int j = 0; j < visible; ++j) {
    double score = 0, magnitude = 0;
    for (int i = 0; i < dim; ++i) {
      const double product = double{q[i]} * Stored(sequence, j, 0, kv_head, i);
      score += product;
      magnitude += std::fabs(product);
    }
    scores[j] = score / std::sqrt(static_cast<double>(dim));
    largest = std::max(largest, scores[j]);
    score_error = std::max(score_error, score_step * magnitude / std::sqrt(dim));
  }
  double total = 0;
  for (double& score : scores) total += score = std::exp(score - largest);
  std::vector<double> want(dim), error(dim);
  double row_largest = 0;
  for (int i = 0; i < dim; ++i) {
    double sum = 0, magnitude = 0, rounding = 0;
    for (int j = 0; j < visible; ++j) {
      const double stored = Stored(sequence, j, 1, kv_head, i);
      const double value = scores[j] / total * stored;
      sum += value;
      magnitude += std::fabs(value);
      rounding += WeightError(scores[j], total) * std::fabs(stored);
    }
    want[i] = sum;
    error[i] = rounding + magnitude * (2 * score_error + sum_step) + 1e-12;
    row_largest = std::max(row_largest, std::fabs(sum) + error[i]);
  }
  const std::vector<float> got = OutputRow(sequence, query, head);
  for (int i = 0; i < dim; ++i) {
    const double rounding = shape_.out == Element::kF32 ? 0
                            : shape_.out == Element::kBf16
                                ? std::fabs(want[i]) * 0x1p-8
                                : std::fabs(want[i]) / 16 + row_largest / 448 / 512;
    ASSERT_NEAR(got[i], want[i], error[i] * 1.01 + rounding)
        << "sequence " << sequence << " query " << query << " head " << head << " dim " << i
        << " visible " << visible;
  }
}

}  // namespace baton::simt
