// The all-reduce of two ranks, on two emulated devices that run at the same time.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <thread>
#include <vector>

#include "engine/ops/cuda/kernels.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/device_rows.h"
#include "tests/simt/random_values.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

using ops::cuda::AllReduceNorm;
using ops::cuda::AllReduceNormParams;
using ops::cuda::kReduceSignals;

constexpr float kReduceEps = 1e-6f;

// job(rank, stream) on each rank's thread, its device the current one; waits for both devices.
void OnBothDevices(const std::function<void(int rank, cudaStream_t stream)>& job) {
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // arrays are filled on another stream
  const auto run = [&](int rank) {
    EXPECT_EQ(cudaSetDevice(rank), cudaSuccess);
    cudaStream_t stream;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    job(rank, stream);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << LastReport();
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  };
  std::thread second(run, 1);
  std::thread first(run, 0);
  first.join();
  second.join();
}

struct Signals {
  Signals()
      : of_rank{DeviceArray<uint32_t>(kReduceSignals), DeviceArray<uint32_t>(kReduceSignals)} {
    for (DeviceArray<uint32_t>& signals : of_rank)
      signals.Set(std::vector<uint32_t>(kReduceSignals, 0));
    void* memory = nullptr;
    EXPECT_EQ(cudaMallocHost(&memory, sizeof(uint32_t)), cudaSuccess);
    called_off = static_cast<uint32_t*>(memory);
    *called_off = 0;
  }
  ~Signals() { cudaFreeHost(called_off); }

  DeviceArray<uint32_t> of_rank[2];
  uint32_t* called_off;
};

// Rank 0 by itself: eight tokens of eight, each part the same.
AllReduceNormParams RankAlone(Signals* signals,
                              DeviceArray<float>* part,
                              DeviceArray<float>* residual) {
  AllReduceNormParams params;
  params.parts[0] = params.parts[1] = part->data();
  params.signals = signals->of_rank[0].data();
  params.peer_signals = signals->of_rank[1].data();
  params.called_off = signals->called_off;
  params.residual = residual->data();
  params.num_tokens = params.width = 8;
  return params;
}

class AllReduce : public ScheduleTest {
 protected:
  void SetUp() override {
    ScheduleTest::SetUp();
    GetRuntimeConfig().num_devices = 2;
    GetRuntimeConfig().lazy = true;
  }
  void TearDown() override {
    GetRuntimeConfig() = RuntimeConfig();
    ScheduleTest::TearDown();
  }

  // Several reductions one after another, each of parts that are written just before it, two places
  // in turn: so a rank that went on too early would read the next round's.
  void Check(int tokens, int width, Element element, bool norm, int rounds) {
    SCOPED_TRACE(testing::Message() << tokens << " " << width << " " << static_cast<int>(element));
    Random random(tokens * 1000 + width);
    const size_t count = static_cast<size_t>(tokens) * width;
    Signals signals;
    const std::vector<float> start = random.Values(count), weight = random.Values(width, 0.1f, 1);
    std::vector<std::vector<float>> parts[2];
    std::vector<float> residual = start;
    for (int round = 0; round < rounds; ++round) {
      for (auto& of_rank : parts) of_rank.push_back(random.Values(count));
      for (size_t i = 0; i < count; ++i) residual[i] += parts[0].back()[i] + parts[1].back()[i];
    }
    std::vector<double> normed(count);
    for (int t = 0; t < tokens; ++t) {
      double squares = 0;
      for (int i = 0; i < width; ++i)
        squares += double{residual[t * width + i]} * residual[t * width + i];
      const double scale = 1 / std::sqrt(squares / width + kReduceEps);
      for (int i = 0; i < width; ++i)
        normed[t * width + i] = residual[t * width + i] * scale * weight[i];
    }
    DeviceArray<float> places[2] = {DeviceArray<float>(2 * count), DeviceArray<float>(2 * count)};
    DeviceArray<float> device_residual[2] = {DeviceArray<float>(start), DeviceArray<float>(start)};
    DeviceArray<float> device_weight[2] = {DeviceArray<float>(weight), DeviceArray<float>(weight)};
    DeviceRows out[2] = {{element, tokens, width}, {element, tokens, width}};
    OnBothDevices([&](int rank, cudaStream_t stream) {
      for (int round = 0; round < rounds; ++round) {
        const size_t place = round % 2 * count;
        EXPECT_EQ(cudaMemcpyAsync(places[rank].data() + place, parts[rank][round].data(),
                                  count * sizeof(float), cudaMemcpyHostToDevice, stream),
                  cudaSuccess);
        AllReduceNormParams params;
        for (int r = 0; r < 2; ++r) params.parts[r] = places[r].data() + place;
        params.signals = signals.of_rank[rank].data();
        params.peer_signals = signals.of_rank[1 - rank].data();
        params.called_off = signals.called_off;
        params.residual = device_residual[rank].data();
        params.weight = norm ? device_weight[rank].data() : nullptr;
        params.out = out[rank].view();
        params.num_tokens = tokens;
        params.width = width;
        params.eps = kReduceEps;
        EXPECT_EQ(AllReduceNorm(params, stream), cudaSuccess);
      }
    });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(device_residual[rank].Get(), residual) << "rank " << rank;
      // Sums of `width` squares in f32, and the root's and the products' rounding.
      if (norm) out[rank].Check(normed, (width + 8) * 0x1p-24);
    }
  }
};
BATON_INSTANTIATE_SCHEDULES(AllReduce);

TEST_P(AllReduce, BothDevicesHaveTheSumAndItsNorm) {
  Check(1, 8, Element::kF32, true, 1);
  Check(3, 128, Element::kFp8, true, 2);
  Check(5, 1032, Element::kBf16, true, 3);
  Check(2, 2056, Element::kBf16, true, 2);   // two chunks a thread
  Check(2, 16384, Element::kF32, true, 1);   // the most
  Check(130, 512, Element::kBf16, true, 3);  // more tokens than blocks; two warps hold each
  Check(7, 192, Element::kF32, false, 4);
}

TEST_P(AllReduce, ADeviceThatIsSlowReadsWhatWasMeantForIt) {
  for (const int slow : {0, 1}) {
    GetRuntimeConfig().slow_device = slow;
    Check(3, 64, Element::kF32, true, 5);
  }
}

TEST_P(AllReduce, RoundsOfDifferentSizesMeet) {
  Signals signals;
  DeviceArray<float> parts[2] = {DeviceArray<float>(std::vector<float>(70 * 8, 1)),
                                 DeviceArray<float>(std::vector<float>(70 * 8, 2))};
  DeviceArray<float> residual[2] = {DeviceArray<float>(std::vector<float>(70 * 8, 0)),
                                    DeviceArray<float>(std::vector<float>(70 * 8, 0))};
  OnBothDevices([&](int rank, cudaStream_t stream) {
    for (const int tokens : {2, 70, 1, 64, 2}) {
      AllReduceNormParams params;
      for (int r = 0; r < 2; ++r) params.parts[r] = parts[r].data();
      params.signals = signals.of_rank[rank].data();
      params.peer_signals = signals.of_rank[1 - rank].data();
      params.called_off = signals.called_off;
      params.residual = residual[rank].data();
      params.num_tokens = tokens;
      params.width = 8;
      EXPECT_EQ(AllReduceNorm(params, stream), cudaSuccess);
    }
  });
  for (const auto& of_rank : residual) {
    const std::vector<float> sums = of_rank.Get();
    EXPECT_EQ(sums[0], 15) << "in all five rounds";
    EXPECT_EQ(sums[8], 12) << "in all but the third";
    EXPECT_EQ(sums[63 * 8], 6);
    EXPECT_EQ(sums[69 * 8], 3);
  }
}

// A rank whose part is not there yet keeps the other one waiting, in every round: what it has told
// in the round before is not taken for this one's.
TEST_P(AllReduce, WaitsForTheRankThatIsLate) {
  constexpr int kTokens = 3, kWidth = 2056;
  constexpr size_t kCount = size_t{kTokens} * kWidth;
  Signals signals;
  DeviceArray<float> places[2] = {DeviceArray<float>(kCount), DeviceArray<float>(kCount)};
  std::vector<float> want(kCount, 0);
  DeviceArray<float> residual[2] = {DeviceArray<float>(want), DeviceArray<float>(want)};
  Random random(5);
  for (const int late : {1, 1, 0, 0, 1}) {
    const std::vector<float> parts[2] = {random.Values(kCount), random.Values(kCount)};
    for (size_t i = 0; i < kCount; ++i) want[i] += parts[0][i] + parts[1][i];
    const uint64_t waits = NumPeerWaits();
    std::atomic<bool> gone{false};  // the other one, without having waited
    OnBothDevices([&](int rank, cudaStream_t stream) {
      if (rank == late) {
        EnqueueHostWork(stream, [&] {
          while (NumPeerWaits() == waits && !gone) std::this_thread::yield();
          return cudaSuccess;
        });
      }
      EXPECT_EQ(cudaMemcpyAsync(places[rank].data(), parts[rank].data(), kCount * sizeof(float),
                                cudaMemcpyHostToDevice, stream),
                cudaSuccess);
      AllReduceNormParams params;
      for (int r = 0; r < 2; ++r) params.parts[r] = places[r].data();
      params.signals = signals.of_rank[rank].data();
      params.peer_signals = signals.of_rank[1 - rank].data();
      params.called_off = signals.called_off;
      params.residual = residual[rank].data();
      params.num_tokens = kTokens;
      params.width = kWidth;
      EXPECT_EQ(AllReduceNorm(params, stream), cudaSuccess);
      if (rank != late) {
        EnqueueHostWork(stream, [&] {
          gone = true;
          return cudaSuccess;
        });
      }
    });
    EXPECT_GT(NumPeerWaits(), waits);
    for (const auto& of_rank : residual) ASSERT_EQ(of_rank.Get(), want);
  }
}

// The other rank never comes: the host lets this one go.
TEST_P(AllReduce, EndsWhenItIsCalledOff) {
  Signals signals;
  DeviceArray<float> part(std::vector<float>(64, 1)), residual(std::vector<float>(64, 0));
  const AllReduceNormParams params = RankAlone(&signals, &part, &residual);
  std::thread rank([&] {
    EXPECT_EQ(AllReduceNorm(params, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << LastReport();
  });
  __atomic_store_n(signals.called_off, 1, __ATOMIC_RELEASE);
  rank.join();
}

// Between this rank's word and its look at the other's, the other one may have come, gone, and come
// again for the next round.
TEST_P(AllReduce, APeerThatIsARoundAheadHasCome) {
  for (const uint32_t done : {0u, 6u, ~0u - 1, ~0u}) {  // rounds wrap
    Signals signals;
    std::vector<uint32_t> words(kReduceSignals, done);
    std::fill(words.begin() + kReduceSignals / 2, words.end(), done + 2);
    signals.of_rank[0].Set(words);
    DeviceArray<float> part(std::vector<float>(64, 1)), residual(std::vector<float>(64, 0));
    const AllReduceNormParams params = RankAlone(&signals, &part, &residual);
    EXPECT_EQ(AllReduceNorm(params, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess) << LastReport();
    EXPECT_EQ(residual.Get(), std::vector<float>(64, 2));
    EXPECT_EQ(signals.of_rank[1].Get()[kReduceSignals / 2], done + 1) << "told of this round";
  }
}

TEST(AllReduceLauncher, RefusesWhatTheKernelCannotBear) {
  float part = 0, residual = 0;
  uint32_t word = 0;
  AllReduceNormParams good;
  good.parts[0] = good.parts[1] = &part;
  good.signals = good.peer_signals = &word;
  good.called_off = &word;
  good.residual = &residual;
  good.width = 8;
  EXPECT_EQ(AllReduceNorm(good, nullptr), cudaSuccess) << "no tokens: nothing runs";
  const auto refused = [&](const std::function<void(AllReduceNormParams*)>& change) {
    AllReduceNormParams params = good;
    change(&params);
    return AllReduceNorm(params, nullptr) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](auto* p) { p->width = 12; }));
  EXPECT_TRUE(refused([](auto* p) { p->width = 16392; }));
  EXPECT_TRUE(refused([](auto* p) { p->num_tokens = -1; }));
  EXPECT_TRUE(refused([](auto* p) { p->parts[1] = nullptr; }));
  EXPECT_TRUE(refused([](auto* p) { p->peer_signals = nullptr; }));
  EXPECT_TRUE(refused([](auto* p) { p->called_off = nullptr; }));
  EXPECT_TRUE(refused([&](auto* p) { p->weight = &part; })) << "a norm needs a place";
}

}  // namespace
}  // namespace baton::simt
