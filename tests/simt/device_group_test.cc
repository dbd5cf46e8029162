// What two ranks on two emulated devices do between passes, one of which was called off.

#include "engine/ops/cuda/device_group.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "engine/parallel/local_group.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {
namespace {

using ops::cuda::AllReduceNormParams;
using ops::cuda::DeviceGroup;

constexpr int kGroupTokens = 3, kGroupWidth = 8, kGroupCount = kGroupTokens * kGroupWidth;
constexpr uint64_t kManyLooks = 600;  // among them some at the word that calls off

class DeviceGroupTest : public testing::Test {
 protected:
  void SetUp() override {
    ClearDeviceError();
    GetRuntimeConfig().num_devices = 2;
    GetRuntimeConfig().lazy = true;
  }
  void TearDown() override { GetRuntimeConfig() = RuntimeConfig(); }

  struct Rank {
    DeviceGroup* group;
    cudaStream_t stream;
    int rank;
  };
  // job on each rank's thread, its device the current one.
  void OnBothRanks(const std::function<void(const Rank&)>& job) {
    const auto run = [&](int rank) {
      EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
      cudaStream_t stream;
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      {
        auto group = DeviceGroup::Join(&ranks_.end(rank), rank, stream);
        EXPECT_TRUE(group.ok()) << group.status();
        EXPECT_TRUE((*group)->Reserve(kGroupTokens, kGroupWidth).ok());
        job({group->get(), stream, rank});
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << LastReport();
        EXPECT_TRUE((*group)->Barrier().ok()) << "the other one reads this one's memory";
      }
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    };
    std::thread second(run, 1);
    run(0);
    second.join();
  }
  void Reduce(const Rank& rank, float part) {
    const std::vector<float> values(kGroupCount, part);
    EXPECT_EQ(cudaMemcpyAsync(rank.group->part(), values.data(), kGroupCount * sizeof(float),
                              cudaMemcpyHostToDevice, rank.stream),
              cudaSuccess);
    AllReduceNormParams params;
    params.residual = residual_[rank.rank].data();
    params.num_tokens = kGroupTokens;
    params.width = kGroupWidth;
    const absl::Status status = rank.group->Reduce(params, rank.stream);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(cudaStreamSynchronize(rank.stream), cudaSuccess) << LastReport();
  }

  parallel::LocalGroup ranks_{2};
  DeviceArray<float> residual_[2] = {DeviceArray<float>(std::vector<float>(kGroupCount, 0)),
                                     DeviceArray<float>(std::vector<float>(kGroupCount, 0))};
};

// Rank 1's kernel of a pass that rank 0 has called off comes late, when rank 0 has long begun the
// next one: the word it leaves on rank 0's device is no word of that pass. And rank 0 waits for it
// for as long as it takes: its pass is not called off any more.
TEST_F(DeviceGroupTest, AWordOfAPassThatWasCalledOffIsNotTakenForOneOfTheNext) {
  std::atomic<bool> gone{false};
  GetRuntimeConfig().slow_device = 1;  // to clear its words
  OnBothRanks([&](const Rank& rank) {
    EXPECT_TRUE(rank.group->BeginPass(rank.stream).ok());
    EXPECT_TRUE(rank.group->Barrier().ok());
    if (rank.rank == 0) {
      rank.group->CallOff();
    } else {
      // As long as a device may be behind the host. (A rank 0 that cleared its words meanwhile
      // would do so at once.)
      EnqueueHostWork(rank.stream, [] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return cudaSuccess;
      });
      AllReduceNormParams params;
      params.residual = residual_[1].data();
      params.num_tokens = kGroupTokens;
      params.width = kGroupWidth;
      EXPECT_TRUE(rank.group->Reduce(params, rank.stream).ok());
    }
    EXPECT_TRUE(rank.group->Barrier().ok());  // between passes nobody calls off
    EXPECT_TRUE(rank.group->BeginPass(rank.stream).ok());
    residual_[rank.rank].Set(std::vector<float>(kGroupCount, 0));
    if (rank.rank == 1) {
      EnqueueHostWork(rank.stream, [&gone, waits = NumPeerWaits()] {
        while (NumPeerWaits() < waits + kManyLooks && !gone) std::this_thread::yield();
        return cudaSuccess;
      });
    }
    Reduce(rank, rank.rank == 0 ? 1.0f : 2.0f);
    if (rank.rank == 0) gone = true;
  });
  for (const auto& of_rank : residual_)
    EXPECT_EQ(of_rank.Get(), std::vector<float>(kGroupCount, 3));
}

TEST_F(DeviceGroupTest, PassesGoOnWhereNobodyCallsOff) {
  OnBothRanks([&](const Rank& rank) {
    for (int pass = 0; pass < 3; ++pass) {
      EXPECT_TRUE(rank.group->BeginPass(rank.stream).ok());
      for (int round = 0; round < 4; ++round) Reduce(rank, rank.rank == 0 ? 1.0f : 2.0f);
    }
  });
  for (const auto& of_rank : residual_)
    EXPECT_EQ(of_rank.Get(), std::vector<float>(kGroupCount, 36));
}

// One device has met the other and then stands still: the other one goes on as far as it may, and
// what is still to be read stays as it is. Each part is another power of two.
TEST_F(DeviceGroupTest, APartStaysUntilASlowDeviceHasReadIt) {
  for (const int slow : {0, 1}) {
    GetRuntimeConfig().slow_device = slow;
    for (DeviceArray<float>& of_rank : residual_) of_rank.Set(std::vector<float>(kGroupCount, 0));
    OnBothRanks([&](const Rank& rank) {
      float part = rank.rank == 0 ? 1.0f : 2.0f;
      for (int pass = 0; pass < 3; ++pass) {
        EXPECT_TRUE(rank.group->BeginPass(rank.stream).ok());
        for (int round = 0; round < 4; ++round, part *= 4) Reduce(rank, part);
      }
    });
    for (const auto& of_rank : residual_)
      EXPECT_EQ(of_rank.Get(), std::vector<float>(kGroupCount, (1 << 24) - 1)) << "slow " << slow;
  }
}

}  // namespace
}  // namespace baton::simt
