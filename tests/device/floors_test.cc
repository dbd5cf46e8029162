#include "tests/device/floors.h"

#include "gtest/gtest.h"

namespace baton::device {
namespace {

model::ModelConfig Qwen3(int hidden, int ffn) {
  model::ModelConfig config;
  config.num_layers = 36;
  config.hidden = hidden;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.ffn = ffn;
  config.vocab = 151936;
  return config;
}

// Figures worked out by hand from the models' shapes.
TEST(Floors, OfQwen3) {
  const ModelCost small = CostOf(Qwen3(2560, 9728)), large = CostOf(Qwen3(4096, 12288));
  EXPECT_NEAR(small.linear_weights, 3.633e9, 1e6);
  EXPECT_NEAR(large.linear_weights, 6.946e9, 1e6);
  EXPECT_NEAR(large.head_weights, 0.622e9, 1e6);
  EXPECT_EQ(large.kv_bytes_per_token, 73728);
  EXPECT_NEAR(PrefillFloor(large, 4096, false), 62.5e-3, 0.4e-3);
  EXPECT_NEAR(PrefillFloor(large, 32768, true), 390e-3, 1e-3);
  EXPECT_NEAR(PrefillFloor(small, 1024, true), 3.9e-3, 0.3e-3);
  EXPECT_NEAR(DecodeFloor(large, 1, 2048, true), 1.94e-3, 0.01e-3);
  EXPECT_NEAR(DecodeFloor(large, 64, 2048, true), 4.16e-3, 0.02e-3);
  EXPECT_NEAR(DecodeFloor(small, 1, 2048, false), 1.91e-3, 0.01e-3);
}

}  // namespace
}  // namespace baton::device
