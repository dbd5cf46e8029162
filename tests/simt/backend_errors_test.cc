// What the CUDA backend says when something is missing, and that it gives everything back.

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/cuda_memory.h"
#include "engine/ops/backend.h"
#include "engine/ops/cuda/cuda_device.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/fake_cudart.h"

namespace baton::simt {
namespace {

runtime::ModelRunnerOptions OnTheDevice() {
  runtime::ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/tiny-qwen3");
  options.backend = "cuda";
  options.weight_dtype = "bf16";
  return options;
}

TEST(BackendErrors, SayWhatIsMissing) {
  GetRuntimeConfig().num_devices = 0;
  auto backend = ops::CreateBackend("cuda", ops::WeightDtype::kBf16, {});
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(backend.status().message()).find("no device"), std::string::npos);
  GetRuntimeConfig() = RuntimeConfig();
  EXPECT_EQ(ops::CreateBackend("cuda", ops::WeightDtype::kInt8, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  GetRuntimeConfig().total_bytes = 1 << 20;
  EXPECT_EQ(ops::CreateBackend("cuda", ops::WeightDtype::kBf16, {}).status().code(),
            absl::StatusCode::kResourceExhausted);
  GetRuntimeConfig() = RuntimeConfig();
  backend = ops::CreateBackend("cuda", ops::WeightDtype::kBf16, {});
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_TRUE((*backend)->NewPool(4096, true).ok());
}

// This program has our own prefill attention only.
TEST(BackendErrors, AnotherKernelIsNotThereWhereItWasNotBuiltIn) {
  ops::BackendOptions options;
  options.prefill_attention = "flashinfer";
  const absl::Status missing =
      ops::CreateBackend("cuda", ops::WeightDtype::kBf16, options).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string(missing.message()).find("BATON_FLASHINFER"), std::string::npos);
  options.prefill_attention = "fastest";
  EXPECT_EQ(ops::CreateBackend("cuda", ops::WeightDtype::kBf16, options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options.prefill_attention = "auto";
  const auto backend = ops::CreateBackend("cuda", ops::WeightDtype::kBf16, options);
  ASSERT_TRUE(backend.ok()) << backend.status();
  EXPECT_NE((*backend)->description().find("prefill=own"), std::string::npos);
  EXPECT_EQ((*backend)->sum_order_version(), ops::kDeviceSumOrderVersion);
}

// --device auto goes on without a device; with one it says which.
TEST(BackendErrors, TheProbeSaysWhatWouldBeMissing) {
  GetRuntimeConfig().num_devices = 0;
  EXPECT_EQ(ops::cuda::ProbeCuda(1).status().code(), absl::StatusCode::kUnavailable);
  GetRuntimeConfig() = RuntimeConfig();
  const auto device = ops::cuda::ProbeCuda(1);
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ(*device, "emulated compute_capability=9.0");
  EXPECT_EQ(ops::AutoBackend().name, "cuda");
}

TEST(BackendErrors, KernelsRunOnlyOnWhatTheyWereCompiledFor) {
  using ops::cuda::IsCompiledFor;
  EXPECT_TRUE(IsCompiledFor("90a-real", 9, 0));
  EXPECT_FALSE(IsCompiledFor("90a-real", 9, 1));
  EXPECT_FALSE(IsCompiledFor("90a-real", 10, 0));
  EXPECT_FALSE(IsCompiledFor("90a-real", 8, 9));
  EXPECT_TRUE(IsCompiledFor("80-real;89-real;100-real", 8, 6));
  EXPECT_TRUE(IsCompiledFor("80-real;89-real;100-real", 10, 3));
  EXPECT_FALSE(IsCompiledFor("89-real;100-real", 8, 6));
  EXPECT_FALSE(IsCompiledFor("80-real;89-real;100-real", 9, 0));
}

// 0.9 of the device less what is taken; the runner's own pool is what is left of it.
TEST(BackendPool, IsSizedByWhatTheDeviceHasLeft) {
  runtime::ModelRunnerOptions options = OnTheDevice();
  options.max_step_tokens = 64;
  options.max_logit_rows = 4;
  constexpr size_t kTotal = size_t{64} << 20;
  GetRuntimeConfig().total_bytes = kTotal + DeviceMemory::Get().bytes_in_use();
  {
    const auto runner = runtime::ModelRunner::Create(options);
    ASSERT_TRUE(runner.ok()) << runner.status();
    const size_t in_use = DeviceMemory::Get().bytes_in_use();
    EXPECT_LE(in_use, 0.9 * GetRuntimeConfig().total_bytes);
    EXPECT_GE(in_use, 0.8 * GetRuntimeConfig().total_bytes);
    EXPECT_EQ((*runner)->sum_order_version(), ops::kDeviceSumOrderVersion);
  }
  options.memory_utilization = 0.02;
  EXPECT_EQ(runtime::ModelRunner::Create(options).status().code(),
            absl::StatusCode::kResourceExhausted);
  GetRuntimeConfig() = RuntimeConfig();
}

TEST(BackendErrors, NothingIsLeftOnTheDevice) {
  runtime::ModelRunnerOptions options = OnTheDevice();
  options.num_blocks = 2;
  const size_t before = DeviceMemory::Get().bytes_in_use();
  {
    const auto runner = runtime::ModelRunner::Create(options);
    ASSERT_TRUE(runner.ok()) << runner.status();
    const std::vector<uint32_t> tokens = {1, 2, 3};
    const std::vector<kv::BlockId> blocks = {1};
    const std::vector<int> rows = {2};
    absl::Span<float> logits;
    ASSERT_TRUE((*runner)->Step({{tokens, 0, blocks, rows}}, nullptr, &logits, nullptr).ok());
    EXPECT_GT(DeviceMemory::Get().bytes_in_use(), before);
  }
  EXPECT_EQ(DeviceMemory::Get().bytes_in_use(), before);
}

// A shared pool has a mirror on the host: it holds what a step with an observer appended, and what
// is written into it counts on the device once the blocks have landed.
TEST(BackendPool, MirrorFollowsObservedStepsAndLandedBlocks) {
  runtime::ModelRunnerOptions options = OnTheDevice();
  options.num_blocks = 4;
  options.shared_kv = true;
  struct Observer : runtime::LayerObserver {
    void OnLayerDone(int layer) override { layers.push_back(layer); }
    std::vector<int> layers;
  };
  const auto sender = runtime::ModelRunner::Create(options);
  const auto receiver = runtime::ModelRunner::Create(options);
  ASSERT_TRUE(sender.ok() && receiver.ok());
  EXPECT_GE((*sender)->kv_pool().fd(), 0);
  const std::vector<uint32_t> prompt = {5, 6, 7, 8, 9}, next = {10};
  const std::vector<kv::BlockId> from = {2}, to = {1};
  const std::vector<int> no_rows, row = {0};
  Observer observer;
  absl::Span<float> logits;
  ASSERT_TRUE((*sender)->Step({{prompt, 0, from, no_rows}}, &observer, nullptr, nullptr).ok());
  const kv::KvLayout& layout = (*sender)->layout();
  EXPECT_EQ(observer.layers.size(), static_cast<size_t>(layout.num_layers));
  for (int layer = 0; layer < layout.num_layers; ++layer) {
    std::memcpy((*receiver)->kv_pool().data() + layout.BlockOffset(layer, 1),
                (*sender)->kv_pool().data() + layout.BlockOffset(layer, 2), layout.block_bytes());
  }
  ASSERT_TRUE((*receiver)->BlocksLanded(to).ok());
  ASSERT_TRUE((*sender)->Step({{next, 5, from, row}}, nullptr, &logits, nullptr).ok());
  const std::vector<float> want(logits.begin(), logits.end());
  ASSERT_TRUE((*receiver)->Step({{next, 5, to, row}}, nullptr, &logits, nullptr).ok());
  EXPECT_EQ(std::vector<float>(logits.begin(), logits.end()), want);
}

// Without a mirror the pool that steps use is the one that others write, layer by layer.
TEST(BackendPool, WithoutAMirrorOthersReadAndWriteThePoolItself) {
  runtime::ModelRunnerOptions options = OnTheDevice();
  options.num_blocks = 4;
  options.shared_kv = true;
  options.kv_mirror = false;
  GetRuntimeConfig().lazy = true;  // what nobody waits for has not happened
  const auto sender = runtime::ModelRunner::Create(options);
  const auto receiver = runtime::ModelRunner::Create(options);
  ASSERT_TRUE(sender.ok() && receiver.ok());
  EXPECT_EQ((*sender)->host_pool(), nullptr);
  ASSERT_NE((*sender)->device_pool(), nullptr);
  const kv::KvLayout& layout = (*sender)->layout();
  const base::CudaDevice device = *base::CudaDevice::Open(0);
  struct Observer : runtime::LayerObserver {
    void OnLayerDone(int layer) override { on_layer(layer); }
    std::function<void(int)> on_layer;
  } observer;
  std::vector<uint8_t> bytes(layout.block_bytes());
  observer.on_layer = [&](int layer) {  // another process reads it, not through the backend
    ASSERT_TRUE(device.Use().ok());
    const auto at = [&](runtime::ModelRunner& runner, kv::BlockId block) {
      return reinterpret_cast<base::CuPointer>(runner.device_pool()->data() +
                                               layout.BlockOffset(layer, block));
    };
    ASSERT_EQ(device.driver().copy_to_host(bytes.data(), at(**sender, 2), bytes.size()), 0);
    ASSERT_EQ(device.driver().copy_to_device(at(**receiver, 1), bytes.data(), bytes.size()), 0);
  };
  const std::vector<uint32_t> prompt = {5, 6, 7, 8, 9}, next = {10};
  const std::vector<kv::BlockId> from = {2}, to = {1};
  const std::vector<int> no_rows, row = {0};
  absl::Span<float> logits;
  ASSERT_TRUE((*sender)->Step({{prompt, 0, from, no_rows}}, &observer, nullptr, nullptr).ok());
  ASSERT_TRUE((*sender)->Step({{next, 5, from, row}}, nullptr, &logits, nullptr).ok());
  const std::vector<float> want(logits.begin(), logits.end());
  ASSERT_TRUE((*receiver)->Step({{next, 5, to, row}}, nullptr, &logits, nullptr).ok());
  EXPECT_EQ(std::vector<float>(logits.begin(), logits.end()), want);
  GetRuntimeConfig().lazy = false;
}

}  // namespace
}  // namespace baton::simt
