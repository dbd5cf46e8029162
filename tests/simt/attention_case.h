#pragma once

// A step of sequences over a paged cache, on the device and in double precision.

#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "engine/base/fp8.h"
#include "engine/kv/kv_layout.h"
#include "engine/ops/cuda/kernels.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/random_values.h"

namespace baton::simt {

struct AttentionShape {
  int heads = 4, kv_heads = 2, dim = 128;
  ops::cuda::CacheFormat format = ops::cuda::CacheFormat::kFp8;
  std::vector<int> query_lens, context_lens;  // context: with the queries
  // q in kFp8: as FlashPrefill takes and computes it.
  ops::cuda::Element q = ops::cuda::Element::kF16, out = ops::cuda::Element::kBf16;
  uint64_t seed = 1;
};

// Of queries in kFp8.
inline constexpr float kQueryScale = 0x1p-6f;

uint16_t F16FromFloat(float value);

class AttentionCase {
 public:
  explicit AttentionCase(const AttentionShape& shape);

  // For all sequences, in `chosen` order when that is given.
  ops::cuda::PagedAttentionParams params();
  void Choose(std::vector<int32_t> chosen);
  int max_query_len() const;
  // Element `dim` of V of a token becomes NaN.
  void SpoilValue(int sequence, int token, int dim);
  // Compares the output of the chosen sequences; that of the others must be untouched.
  void Check();
  // The output of one query as f32.
  std::vector<float> OutputRow(int sequence, int query, int head);

 private:
  using Format = ops::cuda::CacheFormat;
  size_t RowAt(int sequence, int token, int side, int head) const;
  float Stored(int sequence, int token, int side, int head, int i) const;
  void FillRow(int sequence, int token, int side, int head);
  void CheckQuery(int sequence, int query, int head);
  double WeightError(double weight, double total) const;

  AttentionShape shape_;
  Random random_;
  kv::KvLayout layout_;
  std::vector<uint8_t> pool_;
  std::vector<float> scales_, q_;
  std::vector<int32_t> starts_, contexts_, tables_, chosen_;
  int max_blocks_ = 0;
  std::unique_ptr<DeviceArray<uint8_t>> device_pool_, device_q_, device_out_;
  std::unique_ptr<DeviceArray<float>> device_scales_, device_out_scales_;
  std::unique_ptr<DeviceArray<int32_t>> device_starts_, device_contexts_, device_tables_,
      device_chosen_;
  std::vector<uint8_t> out_;
  std::vector<float> out_scales_;
};

}  // namespace baton::simt
