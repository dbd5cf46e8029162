// Prefill by FlashInfer's kernel, against double precision: on a device that has it the kernel
// itself, on the emulated one what takes its place, which reads the same arguments.

#include "engine/ops/cuda/flash_prefill.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/ops/cuda/cuda_device.h"
#include "engine/ops/cuda/flash_plan.h"
#include "gtest/gtest.h"
#include "tests/simt/attention_case.h"

namespace baton::simt {
namespace {

using ops::cuda::AttentionPlan;
using ops::cuda::CacheFormat;
using ops::cuda::Element;
using ops::cuda::FlashPrefillParams;

// A launch of the kernel over the sequences of a case that have more than eight queries.
class FlashRun {
 public:
  explicit FlashRun(const AttentionShape& shape) : shape_(shape) {
    shape_.q = Element::kFp8;
    case_ = std::make_unique<AttentionCase>(shape_);
    step_.max_blocks = case_->params().max_blocks;
    step_.query_starts = {0};
    for (size_t b = 0; b < shape.query_lens.size(); ++b) {
      step_.query_starts.push_back(step_.query_starts.back() + shape.query_lens[b]);
      step_.context_lens.push_back(shape.context_lens[b]);
      if (shape.query_lens[b] > ops::cuda::kDecodeQueryMax)
        step_.others.push_back(static_cast<int>(b));
    }
    case_->Choose(step_.others);
  }
  AttentionPlan& step() { return step_; }
  AttentionCase& attention() { return *case_; }

  FlashPrefillParams params() {
    const auto device = ops::cuda::OpenDevice(0);
    EXPECT_TRUE(device.ok()) << device.status();
    const ops::cuda::PagedAttentionParams p = case_->params();
    plan_.Fill(step_, shape_.heads, shape_.kv_heads, shape_.dim, device->num_sms);
    work_ = std::make_unique<DeviceArray<int32_t>>(
        std::vector<int32_t>(plan_.words().begin(), plan_.words().end()));
    int tokens = 0;
    for (const int length : shape_.query_lens) tokens += length;
    return {.q = static_cast<const uint8_t*>(p.q),
            .q_scale = kQueryScale,
            .out = p.out.data,
            .num_tokens = tokens,
            .num_heads = p.num_heads,
            .softmax_scale = p.softmax_scale,
            .cache = p.cache,
            .block_tables = p.block_tables,
            .work = plan_.At(work_->data())};
  }
  void Run() {
    ASSERT_EQ(ops::cuda::FlashPrefill(params(), nullptr), cudaSuccess);
    case_->Check();
  }
  std::vector<std::vector<float>> Rows() {
    std::vector<std::vector<float>> rows;
    for (int query = 0; query < shape_.query_lens[0]; ++query) {
      for (int head = 0; head < shape_.heads; ++head)
        rows.push_back(case_->OutputRow(0, query, head));
    }
    return rows;
  }

 private:
  AttentionShape shape_;
  std::unique_ptr<AttentionCase> case_;
  AttentionPlan step_;
  ops::cuda::FlashPlan plan_;
  std::unique_ptr<DeviceArray<int32_t>> work_;
};

TEST(FlashPrefill, IsAttentionOverTheCache) {
  struct Step {
    std::vector<int> query_lens, context_lens;
  };
  const Step steps[] = {
      {{9}, {9}},                           // less than a tile
      {{128}, {128}},                       // exactly one, or less
      {{193}, {193}},                       // a query in a second one
      {{64}, {700}},                        // over a cached prefix
      {{130, 300}, {131, 364}},             // that ends within a tile of keys
      {{10, 1, 40, 8}, {75, 400, 296, 8}},  // beside decode, whose rows are left alone
  };
  struct Heads {
    int heads, kv_heads, dim;
  };
  uint64_t seed = 1;
  for (const Step& step : steps) {
    for (const Heads& heads : {Heads{4, 2, 128}, Heads{5, 1, 64}}) {
      SCOPED_TRACE(testing::Message()
                   << step.query_lens[0] << "/" << step.context_lens[0] << " D=" << heads.dim);
      FlashRun run({.heads = heads.heads,
                    .kv_heads = heads.kv_heads,
                    .dim = heads.dim,
                    .query_lens = step.query_lens,
                    .context_lens = step.context_lens,
                    .seed = seed++});
      run.Run();
      if (testing::Test::HasFailure()) return;
    }
  }
}

// To the bit: a prompt may be cut anywhere.
TEST(FlashPrefill, AQueryIsTheSameInAnyChunk) {
  for (const int dim : {64, 128}) {
    SCOPED_TRACE(testing::Message() << "D=" << dim);
    FlashRun run({.heads = 2,
                  .kv_heads = 1,
                  .dim = dim,
                  .query_lens = {230},
                  .context_lens = {280},
                  .seed = 7});
    run.Run();
    const std::vector<std::vector<float>> whole = run.Rows();
    // The same tokens as those of two sequences with one table of blocks.
    run.step() = {};
    run.step().query_starts = {0, 100, 230};
    run.step().context_lens = {150, 280};
    run.step().others = {0, 1};
    run.Run();
    EXPECT_EQ(run.Rows(), whole);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(FlashPrefill, IsRefusedWhatItCannotBear) {
  FlashRun run({.query_lens = {9}, .context_lens = {9}});
  const FlashPrefillParams good = run.params();
  const auto refused = [&](auto change) {
    FlashPrefillParams params = good;
    change(&params);
    return ops::cuda::FlashPrefill(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](auto* p) { p->cache.format = CacheFormat::kFp8Dynamic; }));
  EXPECT_TRUE(refused([](auto* p) { p->cache.head_dim = 96; }));
  EXPECT_TRUE(refused([](auto* p) { p->cache.scales = nullptr; }));
  EXPECT_TRUE(refused([](auto* p) { p->num_heads = 3; }));
  EXPECT_TRUE(refused([](auto* p) { p->num_tokens = 0; }));
  EXPECT_TRUE(refused([](auto* p) { p->q_scale = 0; }));
  EXPECT_TRUE(refused([](auto* p) { p->q += 8; }));
  EXPECT_TRUE(refused([](auto* p) { p->work = {}; }));
  run.Run();
}

}  // namespace
}  // namespace baton::simt
