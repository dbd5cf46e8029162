// What backend.h says about errors, and what the reference computes on a case small enough to check
// by hand.

#include "engine/ops/backend.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "engine/ops/cpu/isa.h"

namespace baton::ops {
namespace {

using testing::HasSubstr;

std::unique_ptr<Backend> Make(const char* name, WeightDtype dtype = WeightDtype::kF32) {
  BackendOptions options;
  options.num_threads = 1;
  return *CreateBackend(name, dtype, options);
}

MatrixSource Constant(int rows, int cols, float value) {
  MatrixSource source;
  source.rows = rows;
  source.cols = cols;
  source.read_row = [=](int, float* out) { std::fill(out, out + cols, value); };
  return source;
}

// This program does not link the CUDA backend.
TEST(BackendFactory, WithoutTheCudaBackendItIsUnavailable) {
  const auto backend = CreateBackend("cuda", WeightDtype::kBf16, {});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(backend.status().message()),
              testing::HasSubstr("built without the CUDA backend"));
}

TEST(BackendFactory, WithoutTheCudaBackendAutoIsTheCpuAndSaysWhy) {
  EXPECT_EQ(AutoBackend().name, "cpu");
  EXPECT_THAT(AutoBackend().reason, testing::HasSubstr("built without the CUDA backend"));
}

// A pool of a host backend is plain memory, shared when asked for.
TEST(BackendPool, OnTheHostIsPlainMemory) {
  const auto backend = CreateBackend("ref", WeightDtype::kF32, {});
  ASSERT_TRUE(backend.ok());
  EXPECT_TRUE((*backend)->pools_on_host());
  auto pool = (*backend)->NewPool(256, false), shared = (*backend)->NewPool(256, true);
  ASSERT_TRUE(pool.ok() && shared.ok());
  EXPECT_LT(pool->fd(), 0);
  EXPECT_GE(shared->fd(), 0);
  pool->data()[3] = 7;
  ASSERT_TRUE((*backend)->CopyInPool(pool->data() + 100, pool->data(), 4).ok());
  ASSERT_TRUE((*backend)->CopyToPool(shared->data(), pool->data() + 100, 4).ok());
  uint8_t host[4] = {};
  ASSERT_TRUE((*backend)->CopyFromPool(host, shared->data(), 4).ok());
  EXPECT_EQ(host[3], 7);
}

TEST(CreateBackend, UnknownNameNamesTheAcceptedOnes) {
  const auto backend = CreateBackend("tpu", WeightDtype::kF32, {});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(backend.status().message()), HasSubstr("ref, cpu"));
}

TEST(CreateBackend, UnknownIsaNamesTheAcceptedOnes) {
  BackendOptions options;
  options.isa = "sse9";
  const auto backend = CreateBackend("cpu", WeightDtype::kF32, options);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(backend.status().message()), HasSubstr("auto, avx2, avx512, amx"));
}

TEST(CreateBackend, IsaThatTheMachineLacksIsUnavailableAndNamesWhatIsThere) {
  for (const char* isa : {"avx2", "avx512", "amx"}) {
    BackendOptions options;
    options.isa = isa;
    const auto backend = CreateBackend("cpu", WeightDtype::kBf16, options);
    const bool here = (" " + cpu::AvailableLevels() + " ").find(std::string(" ") + isa + " ") !=
                      std::string::npos;
    if (here) {
      ASSERT_TRUE(backend.ok()) << backend.status();
      EXPECT_THAT((*backend)->description(), HasSubstr(isa));
    } else {
      EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(backend.status().message()), HasSubstr(cpu::AvailableLevels()));
    }
  }
}

TEST(CreateBackend, BadThreadCountIsRefused) {
  BackendOptions options;
  options.num_threads = -1;
  EXPECT_EQ(CreateBackend("cpu", WeightDtype::kF32, options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options.num_threads = 100000;
  EXPECT_EQ(CreateBackend("cpu", WeightDtype::kF32, options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ParseWeightDtype, KnowsItsNamesOnly) {
  for (const char* name : {"f32", "bf16", "int8", "q4", "fp8"})
    EXPECT_EQ(WeightDtypeName(*ParseWeightDtype(name)), name);
  for (const char* name : {"", "BF16", "fp16", "q4 "}) {
    EXPECT_THAT(std::string(ParseWeightDtype(name).status().message()),
                HasSubstr("auto, f32, bf16, int8, q4, fp8"));
  }
}

class BackendErrors : public testing::TestWithParam<const char*> {};

TEST_P(BackendErrors, PackRefusesShapesTheDtypeCannotHold) {
  EXPECT_FALSE(Make(GetParam(), WeightDtype::kQ4)->Pack(Constant(4, 40, 1), false).ok());
  EXPECT_FALSE(Make(GetParam())->Pack(Constant(3, 8, 1), true).ok());
  EXPECT_FALSE(Make(GetParam())->Pack(Constant(0, 8, 1), false).ok());
  EXPECT_FALSE(Make(GetParam(), WeightDtype::kInt8)->Pack(Constant(1, 70000, 1), false).ok());
}

TEST_P(BackendErrors, WrongShapesAreRefusedBeforeAnyWrite) {
  const auto backend = Make(GetParam());
  const auto table = *backend->Pack(Constant(10, 16, 2.0f), false);
  const auto residual = *backend->NewActivation(ActivationKind::kResidual, 4, 16);
  const auto input = *backend->NewActivation(ActivationKind::kLinearInput, 4, 16);
  const auto narrow = *backend->NewActivation(ActivationKind::kLinearInput, 4, 8);
  const std::vector<float> weight(16, 1.0f), short_weight(8, 1.0f);
  ASSERT_TRUE(backend->Embed(*table, {1, 2}, residual.get()).ok());
  EXPECT_FALSE(backend->Embed(*table, {1, 10}, residual.get()).ok());
  EXPECT_FALSE(backend->Embed(*table, {-1}, residual.get()).ok());
  EXPECT_FALSE(backend->Embed(*table, {1, 1, 1, 1, 1}, residual.get()).ok());
  EXPECT_FALSE(backend->RmsNorm(*residual, 5, weight, 1e-6f, input.get()).ok());
  EXPECT_FALSE(backend->RmsNorm(*residual, 2, short_weight, 1e-6f, input.get()).ok());
  EXPECT_FALSE(backend->RmsNorm(*residual, 2, weight, 1e-6f, narrow.get()).ok());
  EXPECT_FALSE(backend->ProjectAdd(*input, 2, *table, residual.get()).ok());
  float logits[20];
  EXPECT_FALSE(backend->Logits(*residual, {4}, weight, 1e-6f, *table, logits).ok());
  EXPECT_EQ(*backend->Read(*residual, 2, 16), std::vector<float>(32, 2.0f));
}

TEST_P(BackendErrors, AppendAndAttentionCheckTheirArguments) {
  const auto backend = Make(GetParam());
  constexpr int kDim = 16;
  const kv::KvLayout layout = {.num_layers = 1,
                               .num_kv_heads = 1,
                               .head_dim = kDim,
                               .num_blocks = 2,
                               .format = kv::KvFormat::kF32};
  std::vector<uint8_t> pool(layout.pool_bytes());
  const auto qkv = *backend->NewActivation(ActivationKind::kProjected, 2, 4 * kDim);
  const auto out = *backend->NewActivation(ActivationKind::kLinearInput, 2, 2 * kDim);
  const std::vector<float> rope(8 * kDim, 0.0f);
  const std::vector<int32_t> positions = {0}, far = {8};
  const std::vector<int64_t> slots = {0}, outside = {2 * kv::kBlockTokens}, skip = {-1},
                             negative = {-2};
  QkNormRopeAppendArgs append = {.qkv = qkv.get(),
                                 .num_tokens = 1,
                                 .num_heads = 2,
                                 .num_kv_heads = 1,
                                 .head_dim = kDim,
                                 .positions = positions,
                                 .slots = slots,
                                 .rope = rope,
                                 .cache = {.layout = &layout, .layer_base = pool.data()}};
  EXPECT_TRUE(backend->QkNormRopeAppend(append).ok());
  const auto refused = [&](auto change) {
    QkNormRopeAppendArgs bad = append;
    change(&bad);
    return backend->QkNormRopeAppend(bad).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused([&](QkNormRopeAppendArgs* a) { a->positions = far; }));
  EXPECT_TRUE(refused([&](QkNormRopeAppendArgs* a) { a->slots = outside; }));
  EXPECT_TRUE(refused([&](QkNormRopeAppendArgs* a) { a->slots = negative; }));
  EXPECT_TRUE(refused([&](QkNormRopeAppendArgs* a) { a->num_heads = 3; }));
  EXPECT_TRUE(refused(
      [&](QkNormRopeAppendArgs* a) { a->q_weight = absl::MakeConstSpan(rope).subspan(0, 3); }));
  EXPECT_FALSE(refused([&](QkNormRopeAppendArgs* a) { a->slots = skip; }));

  const std::vector<kv::BlockId> table = {1}, bad_table = {2};
  std::vector<SequenceView> views = {
      {.query_start = 0, .query_len = 1, .context_len = 1, .block_table = table}};
  PagedAttentionArgs attention = {.qkv = qkv.get(),
                                  .num_tokens = 1,
                                  .num_heads = 2,
                                  .num_kv_heads = 1,
                                  .head_dim = kDim,
                                  .softmax_scale = 1,
                                  .sequences = views,
                                  .cache = {.layout = &layout, .layer_base = pool.data()},
                                  .out = out.get()};
  EXPECT_TRUE(backend->PagedAttention(attention).ok());
  const auto bad_view = [&](SequenceView view) {
    views[0] = view;
    return backend->PagedAttention(attention).code() == absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(
      bad_view({.query_start = 0, .query_len = 1, .context_len = 1, .block_table = bad_table}));
  EXPECT_TRUE(
      bad_view({.query_start = 0, .query_len = 1, .context_len = 65, .block_table = table}));
  EXPECT_TRUE(bad_view({.query_start = 0, .query_len = 1, .context_len = 0, .block_table = table}));
  EXPECT_TRUE(bad_view({.query_start = 1, .query_len = 1, .context_len = 1, .block_table = table}));
  EXPECT_TRUE(bad_view({.query_start = 0, .query_len = 2, .context_len = 2, .block_table = table}));
}

// One sequence, one head, keys of zero: every visible token weighs the same, so the answer is the
// mean of the values.
TEST_P(BackendErrors, AttentionWithEqualScoresIsTheMeanOfVisibleValues) {
  const auto backend = Make(GetParam());
  constexpr int kDim = 16, kTokens = 70;
  const kv::KvLayout layout = {.num_layers = 1,
                               .num_kv_heads = 1,
                               .head_dim = kDim,
                               .num_blocks = 3,
                               .format = kv::KvFormat::kF32};
  std::vector<uint8_t> pool(layout.pool_bytes(), 0);
  const std::vector<kv::BlockId> table = {2, 0};
  for (int t = 0; t < kTokens; ++t) {
    auto* row = reinterpret_cast<float*>(pool.data() + layout.BlockOffset(0, table[t / 64]) +
                                         layout.RowOffset(1, 0, t % 64));
    std::fill(row, row + kDim, static_cast<float>(t));
  }
  const auto qkv = *backend->NewActivation(ActivationKind::kProjected, 3, 3 * kDim);
  const auto out = *backend->NewActivation(ActivationKind::kLinearInput, 3, kDim);
  const std::vector<SequenceView> views = {
      {.query_start = 0, .query_len = 3, .context_len = kTokens, .block_table = table}};
  const PagedAttentionArgs args = {.qkv = qkv.get(),
                                   .num_tokens = 3,
                                   .num_heads = 1,
                                   .num_kv_heads = 1,
                                   .head_dim = kDim,
                                   .softmax_scale = 1,
                                   .sequences = views,
                                   .cache = {.layout = &layout, .layer_base = pool.data()},
                                   .out = out.get()};
  ASSERT_TRUE(backend->PagedAttention(args).ok());
  const std::vector<float> values = *backend->Read(*out, 3, kDim);
  for (int query = 0; query < 3; ++query) {
    const float mean = (kTokens - 3 + query) / 2.0f;  // of 0 .. 67 + query
    for (int d = 0; d < kDim; ++d) EXPECT_NEAR(values[query * kDim + d], mean, 1e-4f);
  }
}

INSTANTIATE_TEST_SUITE_P(Each, BackendErrors, testing::Values("ref", "cpu"), [](const auto& info) {
  return std::string(info.param);
});

}  // namespace
}  // namespace baton::ops
