// Two ranks on two emulated devices, as one model: its host code, graphs and all-reduce. Ids are
// those of two ranks on the CPU but where two tokens are as good as equal.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/ops/cuda/cuda_device.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/model_case.h"
#include "tests/simt/simt.h"
#include "tests/support/model_files.h"
#include "tests/support/tiny_checkpoint.h"

namespace baton::simt {
namespace {

using runtime::ModelRunner;
using runtime::ModelRunnerOptions;
using Rows = std::vector<std::vector<float>>;

ModelRunnerOptions TpOptions(const std::string& model, const std::string& backend, int tp) {
  ModelRunnerOptions options;
  options.model_path = absl::StrCat(BATON_SOURCE_DIR, "/tests/data/models/", model);
  options.backend = backend;
  options.weight_dtype = "bf16";
  options.tp = tp;
  options.max_model_len = 256;
  options.max_step_tokens = options.max_logit_rows = 128;
  options.num_blocks = 12;
  options.backend_options.num_threads = 2;
  return options;
}

std::unique_ptr<ModelRunner> NewRunner(const ModelRunnerOptions& options) {
  absl::StatusOr<std::unique_ptr<ModelRunner>> runner = ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  return runner.ok() ? *std::move(runner) : nullptr;
}

Rows RunModel(const ModelRunnerOptions& options) {
  const auto runner = NewRunner(options);
  Rows all;
  int lengths[2] = {0, 0};
  const auto step = [&](int first_count, int second_count) {
    if (runner == nullptr) return;
    for (auto& row : StepTwo(runner.get(), lengths, first_count, second_count))
      all.push_back(std::move(row));
  };
  step(40, 20);
  step(30, 1);
  for (int i = 0; i < 3; ++i) step(1, 1);  // the third as a graph
  for (int i = 0; i < 3; ++i) step(4, 3);  // a verify
  return all;
}

void ExpectSameTokens(const Rows& got, const Rows& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t row = 0; row < want.size(); ++row) {
    double largest = 0;
    for (size_t i = 0; i < want[row].size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[row][i])) << "row " << row << " " << i;
      largest = std::max(largest, std::fabs(double{got[row][i]} - want[row][i]));
    }
    const auto best = [](const std::vector<float>& logits) {
      return std::max_element(logits.begin(), logits.end()) - logits.begin();
    };
    // The two best may change places only where they are closer than the difference of the logits,
    // and that is rounding: small against their spread.
    EXPECT_LE(want[row][best(want[row])] - want[row][best(got[row])], 2 * largest) << row;
    const auto [low, high] = std::minmax_element(want[row].begin(), want[row].end());
    EXPECT_LE(largest, 0.05 * (*high - *low)) << "row " << row;
  }
}

class TpOnTheEmulatedDevices : public testing::Test {
 protected:
  void SetUp() override {
    ClearDeviceError();
    GetRuntimeConfig().num_devices = 2;
    GetRuntimeConfig().lazy = true;
    GetRuntimeStats() = RuntimeStats();
  }
  void TearDown() override {
    GetRuntimeConfig() = RuntimeConfig();
    GetConfig() = Config();
  }
};

TEST_F(TpOnTheEmulatedDevices, SayWhatTwoRanksOnTheCpuSay) {
  GetConfig().order = Order::kRandom;
  ExpectSameTokens(RunModel(TpOptions("tiny-qwen3", "cuda", 2)),
                   RunModel(TpOptions("tiny-qwen3", "cpu", 2)));
  EXPECT_GT(GetRuntimeStats().graph_launches, 0u);
}

TEST_F(TpOnTheEmulatedDevices, OtherShapesAreThoseOfOneRank) {
  for (const char* model : {"random-qwen2-gqa2-tied", "random-llama-gqa1"}) {
    SCOPED_TRACE(model);
    ExpectSameTokens(RunModel(TpOptions(model, "cuda", 2)), RunModel(TpOptions(model, "cuda", 1)));
  }
}

TEST_F(TpOnTheEmulatedDevices, GraphsGiveTheBitsOfOperationsIssuedOneByOne) {
  ModelRunnerOptions eager = TpOptions("random-qwen3-gqa2-tied", "cuda", 2);
  eager.backend_options.enforce_eager = true;
  const Rows want = RunModel(eager);
  EXPECT_EQ(GetRuntimeStats().graph_launches, 0u);
  EXPECT_EQ(RunModel(TpOptions("random-qwen3-gqa2-tied", "cuda", 2)), want);
  // Two ranks, each its own: of three equal steps one is issued, two are graphs.
  EXPECT_EQ(GetRuntimeStats().graph_launches, 8u);
}

// One rank's device fails in the middle of a pass: the step says so, the other rank's kernels do
// not wait for ever, and the next step is as if nothing had been.
TEST_F(TpOnTheEmulatedDevices, ADeviceThatFailsTakesTheStepAndNothingElse) {
  const auto runner = NewRunner(TpOptions("tiny-qwen3", "cuda", 2));
  int lengths[2] = {0, 0};
  StepTwo(runner.get(), lengths, 5, 3);
  StepTwo(runner.get(), lengths, 1, 1);
  int before[2] = {lengths[0], lengths[1]};
  const Rows want = StepTwo(runner.get(), lengths, 1, 1);
  for (int device = 0; device < 2; ++device) {
    const std::vector<uint32_t> token = {1};
    const std::vector<kv::BlockId> blocks = {5};
    const std::vector<int> row = {0};
    GetRuntimeConfig().failing_device = device;
    const auto failed = runner->Step({{token, 0, blocks, row}}, nullptr, nullptr, nullptr);
    EXPECT_EQ(failed.code(), absl::StatusCode::kInternal) << failed;
    GetRuntimeConfig().failing_device = -1;
    int again[2] = {before[0], before[1]};
    EXPECT_EQ(StepTwo(runner.get(), again, 1, 1), want);
  }
}

// In e4m3 the norm after a sum writes codes and scales, and products round tokens up. Two ranks
// have the codes of one (heads of 128, so the blocks of their scales are whole ones).
TEST_F(TpOnTheEmulatedDevices, Fp8WeightsAreThoseOfOneRank) {
  testing_support::TinyCheckpoint model;
  model.hidden = 128;
  model.head_dim = 128;
  model.ffn = 512;
  model.vocab = 64;
  testing_support::TempDir dir;
  model.WriteTo(dir);
  const auto run = [&](int tp) {
    ModelRunnerOptions options = TpOptions("", "cuda", tp);
    options.model_path = dir.path();
    options.weight_dtype = "fp8";
    return RunModel(options);
  };
  const Rows one = run(1), two = run(2);
  ExpectSameTokens(two, one);
  EXPECT_NE(two, one) << "the sums are cut in two";
}

TEST_F(TpOnTheEmulatedDevices, NeedTwoDevices) {
  GetRuntimeConfig().num_devices = 1;
  const absl::Status status = ModelRunner::Create(TpOptions("tiny-qwen3", "cuda", 2)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), "rank 1 of tp=2: cuda: there is no device 1: devices=1");
  EXPECT_EQ(ops::cuda::ProbeCuda(2).status().message(), "cuda: there is no device 1: devices=1");
  EXPECT_TRUE(ops::cuda::ProbeCuda(1).ok());
}

TEST_F(TpOnTheEmulatedDevices, NeedPeerAccess) {
  GetRuntimeConfig().peer_access = false;
  const absl::Status status = ModelRunner::Create(TpOptions("tiny-qwen3", "cuda", 2)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(), "cuda: device 0 has no peer access to device 1, which tp=2 needs");
  EXPECT_EQ(ops::cuda::ProbeCuda(2).status(), status);
  GetRuntimeConfig().peer_access = true;
  EXPECT_TRUE(ops::cuda::ProbeCuda(2).ok());
  EXPECT_NE(NewRunner(TpOptions("tiny-qwen3", "cuda", 2)), nullptr);
  EXPECT_TRUE(IsPeer(0, 1) && IsPeer(1, 0));
}

// The pool is as large as the device with the least left allows; each has its half.
TEST_F(TpOnTheEmulatedDevices, ThePoolIsSizedByWhatBothDevicesHaveLeft) {
  ModelRunnerOptions options = TpOptions("tiny-qwen3", "cuda", 2);
  options.num_blocks = 0;
  options.max_step_tokens = 64;
  options.max_logit_rows = 4;
  DeviceMemory& memory = DeviceMemory::Get();
  const size_t total = size_t{96} << 20;
  GetRuntimeConfig().total_bytes = total;
  constexpr size_t kTaken = size_t{32} << 20;
  void* taken = memory.Allocate(kTaken, 1);
  {
    const auto runner = NewRunner(options);
    ASSERT_NE(runner, nullptr);
    EXPECT_LE(memory.bytes_in_use(1), 0.9 * total);
    EXPECT_GE(memory.bytes_in_use(1), 0.8 * total);
    EXPECT_NEAR(memory.bytes_in_use(0), memory.bytes_in_use(1) - kTaken, 1 << 20);
  }
  EXPECT_TRUE(memory.Free(taken));
}

TEST_F(TpOnTheEmulatedDevices, NothingIsLeftOnTheDevices) {
  const size_t before = DeviceMemory::Get().bytes_in_use();
  RunModel(TpOptions("random-llama-gqa1", "cuda", 2));
  EXPECT_EQ(DeviceMemory::Get().bytes_in_use(), before);
}

// Each rank has its heads' part of the pool on its own device; the mirror has both, and so do
// blocks that are copied, read and written whole.
TEST_F(TpOnTheEmulatedDevices, BlocksAreThoseOfBothRanks) {
  ModelRunnerOptions options = TpOptions("tiny-qwen3", "cuda", 2);
  options.shared_kv = true;
  struct Observer : runtime::LayerObserver {
    void OnLayerDone(int layer) override { layers.push_back(layer); }
    std::vector<int> layers;
  };
  const auto sender = NewRunner(options), receiver = NewRunner(options);
  const std::vector<uint32_t> prompt = {5, 6, 7, 8, 9}, next = {10};
  const std::vector<kv::BlockId> from = {2}, to = {1}, copied = {3}, written = {4};
  const std::vector<int> row = {0}, no_rows;
  Observer observer;
  ASSERT_TRUE(sender->Step({{prompt, 0, from, no_rows}}, &observer, nullptr, nullptr).ok());
  const kv::KvLayout& layout = sender->layout();
  ASSERT_EQ(observer.layers.size(), static_cast<size_t>(layout.num_layers));
  for (int rank = 0; rank < 2; ++rank) {
    for (int layer = 0; layer < layout.num_layers; ++layer) {
      std::memcpy(receiver->kv_pool().data() + layout.BlockOffset(layer, 1, rank),
                  sender->kv_pool().data() + layout.BlockOffset(layer, 2, rank),
                  layout.rank_block_bytes());
    }
  }
  ASSERT_TRUE(receiver->BlocksLanded(to).ok());
  sender->CopyBlock(2, 3);
  std::vector<uint8_t> whole(layout.block_bytes() * layout.num_layers);
  sender->ReadBlock(2, whole.data());
  sender->WriteBlock(4, whole.data());
  const auto logits = [&](ModelRunner* runner, const std::vector<kv::BlockId>& blocks) {
    absl::Span<float> out;
    EXPECT_TRUE(runner->Step({{next, 5, blocks, row}}, nullptr, &out, nullptr).ok());
    return std::vector<float>(out.begin(), out.end());
  };
  const std::vector<float> want = logits(sender.get(), from);
  EXPECT_EQ(logits(receiver.get(), to), want);
  EXPECT_EQ(logits(sender.get(), copied), want);
  EXPECT_EQ(logits(sender.get(), written), want);
}

}  // namespace
}  // namespace baton::simt
