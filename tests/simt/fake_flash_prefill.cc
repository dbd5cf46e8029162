// FlashInfer's kernel of the emulated device: it goes through the same arrays of work, reads the
// same bytes by the same strides and rounds in the same places, in plain loops.

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/fp8.h"
#include "engine/kv/kv_layout.h"
#include "engine/ops/cuda/flash_prefill.h"
#include "tests/simt/fake_cudart.h"

namespace baton::ops::cuda {
namespace {

constexpr float kCodeMax = 448.0f;

const std::array<float, 256>& Values() {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all;
    for (int code = 0; code < 256; ++code)
      all[code] = base::FloatFromFp8(static_cast<uint8_t>(code));
    return all;
  }();
  return values;
}

// One query of one head, over tiles of keys from its own position down.
class FlashRow {
 public:
  FlashRow(const FlashPrefillParams& params, int piece, int query)
      : p_(params),
        dim_(params.cache.head_dim),
        token_(params.work.query_starts[piece] + query),
        head_(params.work.heads[piece]),
        kv_head_(head_ / (params.num_heads / params.cache.num_kv_heads)),
        table_(params.block_tables + params.work.table_starts[piece]),
        visible_(params.work.context_lens[piece] - params.work.query_lens[piece] + query + 1),
        out_(dim_, 0.0f) {}

  void Run() {
    for (int tile = (visible_ - 1) / kFlashKeys; tile >= 0; --tile) Add(tile);
    const CacheLayer& cache = p_.cache;
    const float scale = cache.scales[cache.num_kv_heads + kv_head_] / kCodeMax / sum_;
    auto* to = static_cast<uint16_t*>(p_.out) + At();
    for (int i = 0; i < dim_; ++i) to[i] = base::Bf16FromFloat(out_[i] * scale);
  }

 private:
  int64_t At() const { return (int64_t{token_} * p_.num_heads + head_) * dim_; }
  const uint8_t* Codes(int side, int token) const {
    const CacheLayer& cache = p_.cache;
    const int64_t row = (int64_t{side} * cache.num_kv_heads + kv_head_) * kv::kBlockTokens;
    return cache.base + table_[token / kv::kBlockTokens] * cache.block_bytes +
           (row + token % kv::kBlockTokens) * dim_;
  }
  float Score(int token) const {
    const uint8_t *q = p_.q + At(), *k = Codes(0, token);
    float sum = 0;
    for (int i = 0; i < dim_; ++i) sum += value_of_[q[i]] * value_of_[k[i]];
    return sum;
  }
  void Add(int tile) {
    const int first = tile * kFlashKeys, last = std::min(first + kFlashKeys, visible_);
    std::vector<float> weights;
    float largest = largest_;
    for (int token = first; token < last; ++token) {
      weights.push_back(Score(token));
      largest = std::max(largest, weights.back());
    }
    const float factor = p_.q_scale * p_.cache.scales[kv_head_] * p_.softmax_scale *
                         static_cast<float>(1 / std::log(2.0));
    const float decay = std::exp2((largest_ - largest) * factor);
    largest_ = largest;
    sum_ *= decay;
    for (float& value : out_) value *= decay;
    for (int token = first; token < last; ++token) {
      const float weight = std::exp2((weights[token - first] - largest) * factor);
      sum_ += weight;
      const float rounded = base::FloatFromFp8(base::Fp8FromFloat(weight * kCodeMax));
      const uint8_t* v = Codes(1, token);
      for (int i = 0; i < dim_; ++i) out_[i] += rounded * value_of_[v[i]];
    }
  }

  const std::array<float, 256>& value_of_ = Values();
  const FlashPrefillParams& p_;
  const int dim_, token_, head_, kv_head_;
  const int32_t* table_;
  const int visible_;
  float largest_ = -INFINITY, sum_ = 0;
  std::vector<float> out_;
};

cudaError_t RunAll(const FlashPrefillParams& params) {
  const int queries = FlashQueries(params.cache.head_dim);
  for (int sm = 0; sm < params.work.num_sms; ++sm) {
    for (int piece = params.work.starts[sm]; piece < params.work.starts[sm + 1]; ++piece) {
      const int first = params.work.tiles[piece] * queries;
      const int last = std::min(first + queries, params.work.query_lens[piece]);
      for (int query = first; query < last; ++query) FlashRow(params, piece, query).Run();
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t FlashPrefill(const FlashPrefillParams& params, cudaStream_t stream) {
  if (!FlashPrefillTakes(params)) return cudaErrorInvalidValue;
  return simt::EnqueueHostWork(stream, [params] { return RunAll(params); });
}

}  // namespace baton::ops::cuda
