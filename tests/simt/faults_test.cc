// Tests of the tester: kernels with one planted fault each. A fault must come back as a report, as
// poison in the output, as a result that depends on the schedule, or, in sanitizer builds, as that
// sanitizer's report.

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "engine/ops/cuda/gpu.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/schedules.h"
#include "tests/simt/unwritten_kernels.h"

namespace baton::simt {
namespace {

namespace gpu = ops::gpu;
using testing::HasSubstr;

// Hides where a pointer comes from, so that the compiler cannot see the fault.
template <typename T>
T* Hide(T* pointer) {
  asm volatile("" : "+r"(pointer));
  return pointer;
}

void EarlyReturn(float* out) {
  if (threadIdx.x >= 20) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
void BarrierAtTwoSites(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
void BarrierMissedByAWarp(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    gpu::NamedBarrierSync(1, 64);
  }
  out[threadIdx.x] = 1;
}
void HalfWarpShuffle(float* out) {
  float value = 1;
  if (threadIdx.x < 16) value = __shfl_xor_sync(0xffffffffu, value, 1);
  __syncthreads();
  out[threadIdx.x] = value;
}
void MaskWithoutCaller(float* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1); }
void ShuffleFromReturnedLane(float* out) {
  if (threadIdx.x >= 16) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 16);
}
void LanesInDifferentOperations(float* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  } else {
    out[threadIdx.x] = static_cast<float>(__ballot_sync(0xffffffffu, 1));
  }
}
void NamedBarrierCountsDiffer(float* out) {
  gpu::NamedBarrierSync(1, threadIdx.x < 32 ? 64 : 96);
  out[threadIdx.x] = 1;
}
void Trap(float* out) {
  out[threadIdx.x] = 1;
  if (threadIdx.x == 7) __trap();
}
void Livelock(float* out) {
  BATON_SHARED(volatile int, flag, [1]);
  if (threadIdx.x == 0) flag[0] = 0;
  __syncthreads();
  while (flag[0] == 0) __nanosleep(10);
  out[threadIdx.x] = 1;
}
void AsyncCopyMisaligned(float* out) {
  BATON_SHARED(float, buffer, [64]);
  gpu::AsyncCopy16(&buffer[threadIdx.x % 8 + 1], out);
}
void AsyncCopyToGlobal(float* out) { gpu::AsyncCopy16(out + 4, out); }
void LdMatrixMisaligned(float* out) {
  BATON_SHARED(float, buffer, [64]);
  uint32_t words[4];
  gpu::LdMatrixX4(words, Hide(reinterpret_cast<char*>(buffer)) + 4 * (threadIdx.x % 8));
  out[threadIdx.x] = static_cast<float>(words[0]);
}
void LdMatrixOfGlobal(float* out) {
  uint32_t words[4];
  gpu::LdMatrixX4(words, out);
  out[threadIdx.x] = static_cast<float>(words[0]);
}
void MmaByHalfAWarp(float* out) {
  const uint32_t a[4] = {}, b[2] = {};
  const float c[4] = {};
  float d[4] = {};
  if (threadIdx.x < 16) gpu::MmaF16(d, a, b, c);
  out[threadIdx.x] = d[0];
}

void AsyncCopyWithoutWait(float* out) {
  BATON_SHARED(float4, buffer, [32]);
  gpu::AsyncCopy16(&buffer[threadIdx.x], out + 4 * threadIdx.x);
  gpu::AsyncCommit();
  __syncthreads();
  out[128 + threadIdx.x] = buffer[threadIdx.x].x;
}
void AsyncCopyWaitsForTooFew(float* out) {
  BATON_SHARED(float4, buffer, [2][32]);
  for (int stage = 0; stage < 2; ++stage) {
    gpu::AsyncCopy16(&buffer[stage][threadIdx.x], out + 4 * threadIdx.x);
    gpu::AsyncCommit();
  }
  gpu::AsyncWait<1>();
  __syncthreads();
  out[128 + threadIdx.x] = buffer[1][threadIdx.x].x;
}
void UninitialisedShared(float* out) {
  BATON_SHARED(float, buffer, [32]);
  if (threadIdx.x < 31) buffer[threadIdx.x] = 1;
  __syncthreads();
  out[128 + threadIdx.x] = buffer[threadIdx.x];
}
void UnwrittenOutput(float* out) {
  if (threadIdx.x < 31) out[128 + threadIdx.x] = 1;
}
void ReadsPastShared(float* out) {
  BATON_SHARED(float, buffer, [32]);
  buffer[threadIdx.x] = 1;
  __syncthreads();
  out[128 + threadIdx.x] = Hide(&buffer[0])[threadIdx.x + 1];
}

void WritesPastShared(float* out) {
  BATON_SHARED(float, buffer, [32]);
  Hide(&buffer[0])[threadIdx.x + 1] = 1;
  out[threadIdx.x] = 1;
}
void WritesPastDynamicShared(float* out) {
  BATON_DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x + 1] = 1;
  out[threadIdx.x] = 1;
}

void MissingBlockBarrier(float* out) {
  BATON_SHARED(float, buffer, [64]);
  buffer[threadIdx.x] = static_cast<float>(threadIdx.x);
  out[128 + threadIdx.x] = buffer[63 - threadIdx.x];
}
void MissingBarrierAfterReads(float* out) {
  BATON_SHARED(float, buffer, [64]);
  buffer[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  const float value = buffer[(threadIdx.x + 1) % 64];
  buffer[threadIdx.x] = -1;
  out[128 + threadIdx.x] = value;
}
void MissingWarpBarrier(float* out) {
  BATON_SHARED(float, buffer, [32]);
  buffer[threadIdx.x] = static_cast<float>(threadIdx.x);
  out[128 + threadIdx.x] = buffer[31 - threadIdx.x];
}
// A shuffle orders no memory; here it happens to be a meeting of the lanes, so only the thread
// sanitizer sees the fault.
[[maybe_unused]] void ShuffleForABarrier(float* out) {
  BATON_SHARED(float, buffer, [32]);
  buffer[threadIdx.x % 32] = static_cast<float>(threadIdx.x);
  const float zero = __shfl_sync(0xffffffffu, 0.0f, 0);
  out[128 + threadIdx.x] = buffer[31 - threadIdx.x % 32] + zero;
}
void BlocksWriteOneWord(float* out) {
  if (threadIdx.x == 0) out[128] = static_cast<float>(blockIdx.x);
}

void WritesPastGlobal(float* out) { Hide(out)[threadIdx.x + 225] = 1; }
void MisalignedVector(float* out) {
  const uint4 words = *reinterpret_cast<const uint4*>(Hide(out) + threadIdx.x);
  out[128 + threadIdx.x] = static_cast<float>(words.x & 1);
}
void CleanKernel(float* out) {
  BATON_SHARED(float, buffer, [64]);
  buffer[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[128 + threadIdx.x] = buffer[63 - threadIdx.x];
}

using Kernel = void (*)(float*);

class FaultsTest : public ScheduleTest {
 protected:
  // out: the first 128 floats are 2, the rest poison.
  cudaError_t Run(Kernel kernel, int threads, int blocks = 1, size_t shared_bytes = 0) {
    out_.Fill();
    out_.Set(std::vector<float>(128, 2.0f));
    const cudaError_t launched =
        gpu::Launch(kernel, dim3(blocks), dim3(threads), shared_bytes, nullptr, out_.data());
    return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
  }
  bool PoisonSeen(int threads) {
    const std::vector<float> values = out_.Get();
    for (int i = 0; i < threads; ++i) {
      if (std::isnan(values[128 + i])) return true;
    }
    return false;
  }
  DeviceArray<float> out_{256};
};
BATON_INSTANTIATE_SCHEDULES(FaultsTest);

TEST_P(FaultsTest, ReportsSayWhatIsWrong) {
  struct Case {
    Kernel kernel;
    int threads;
    const char* report;
  };
  const Case cases[] = {
      {EarlyReturn, 64, "44 of 64 threads have already returned"},
      {BarrierAtTwoSites, 64, "divergent __syncthreads: some threads at line"},
      {BarrierMissedByAWarp, 64, "32 threads"},
      {HalfWarpShuffle, 32, "wait in __shfl_sync mask ffffffff"},
      {MaskWithoutCaller, 32, "does not name the calling lane"},
      {ShuffleFromReturnedLane, 32, "does not take part"},
      {LanesInDifferentOperations, 32, "meet in different operations"},
      {NamedBarrierCountsDiffer, 64, "threads expected, here"},
      {Trap, 32, "__trap"},
      {AsyncCopyMisaligned, 32, "misaligned"},
      {AsyncCopyToGlobal, 32, "not in shared memory"},
      {LdMatrixMisaligned, 32, "misaligned"},
      {LdMatrixOfGlobal, 32, "not in shared memory"},
      {MmaByHalfAWarp, 32, "mma"},
  };
  for (const Case& c : cases) {
    EXPECT_NE(Run(c.kernel, c.threads), cudaSuccess) << c.report;
    EXPECT_THAT(LastReport(), HasSubstr(c.report));
    EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess) << "the error sticks: " << c.report;
    ClearDeviceError();
  }
  GetConfig().yield_limit = 10000;
  EXPECT_NE(Run(Livelock, 32), cudaSuccess);
  EXPECT_THAT(LastReport(), HasSubstr("livelock"));
  ClearDeviceError();
  ASSERT_EQ(Run(CleanKernel, 64), cudaSuccess) << LastReport();
  EXPECT_FALSE(PoisonSeen(64));
}

TEST_P(FaultsTest, WhatWasNotWrittenReadsAsPoison) {
  for (const Kernel kernel :
       {AsyncCopyWithoutWait, AsyncCopyWaitsForTooFew, UninitialisedShared, UnwrittenOutput}) {
    ASSERT_EQ(Run(kernel, 32), cudaSuccess) << LastReport();
    EXPECT_TRUE(PoisonSeen(32));
    out_.Set(std::vector<float>(256, NAN));
  }
}

#if defined(BATON_SIMT_MSAN)
// The memory sanitizer ends the process where a kernel acts on it, or the host reads it back.
TEST_P(FaultsTest, TheMemorySanitizerCatchesWhatWasNotWritten) {
  const auto run = [](Unwritten fault) {
    DeviceArray<int> fresh(32), out(32);
    EXPECT_EQ(RunUnwritten(fault, fresh.data(), out.data()), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << LastReport();
    if (fault == Unwritten::kOutput) out.Get();
  };
  run(Unwritten::kNothing);
  for (const Unwritten fault :
       {Unwritten::kSharedBranch, Unwritten::kDeviceBranch, Unwritten::kDeviceIndex,
        Unwritten::kShuffledBranch, Unwritten::kAsyncCopyBranch, Unwritten::kOutput}) {
    EXPECT_DEATH(run(fault), "use-of-uninitialized-value") << static_cast<int>(fault);
  }
}
#endif

TEST_P(FaultsTest, TooManyThreadsAndTooMuchSharedMemoryAreRefused) {
  EXPECT_EQ(Run(CleanKernel, 1025), cudaErrorInvalidConfiguration);
  EXPECT_EQ(Run(CleanKernel, 64, 1, 49 * 1024), cudaErrorInvalidValue);
}

#if defined(__SANITIZE_ADDRESS__)
// The sanitizers end the process, with the line of the kernel.
TEST_P(FaultsTest, SanitizersCatchEveryAccessOutOfBounds) {
  EXPECT_DEATH(Run(ReadsPastShared, 32), "use-after-poison");
  EXPECT_DEATH(Run(WritesPastShared, 32), "use-after-poison");
  EXPECT_DEATH(Run(WritesPastDynamicShared, 32, 1, 128), "use-after-poison");
  EXPECT_DEATH(Run(WritesPastGlobal, 32), "AddressSanitizer");
  EXPECT_DEATH(Run(MisalignedVector, 32), "misaligned address");
}
#elif !defined(__SANITIZE_THREAD__)
TEST_P(FaultsTest, AccessesOutOfBoundsShowWithoutSanitizersToo) {
  ASSERT_EQ(Run(ReadsPastShared, 32), cudaSuccess);
  EXPECT_TRUE(PoisonSeen(32));
  EXPECT_EQ(Run(WritesPastShared, 32), cudaErrorIllegalAddress);
  ClearDeviceError();
  EXPECT_EQ(Run(WritesPastDynamicShared, 32, 1, 128), cudaErrorIllegalAddress);
  ClearDeviceError();
  EXPECT_DEATH(Run(WritesPastGlobal, 32), "");  // the unmapped page
}
#endif

#if defined(__SANITIZE_THREAD__)
TEST_P(FaultsTest, TheThreadSanitizerReportsEveryRace) {
  struct Case {
    Kernel kernel;
    int threads, blocks;
  };
  for (const Case& c : {Case{MissingBlockBarrier, 64, 1}, Case{MissingBarrierAfterReads, 64, 1},
                        Case{MissingWarpBarrier, 32, 1}, Case{ShuffleForABarrier, 32, 1},
                        Case{BlocksWriteOneWord, 32, 4}}) {
    EXPECT_DEATH(Run(c.kernel, c.threads, c.blocks), "data race");
  }
  EXPECT_EQ(Run(CleanKernel, 64), cudaSuccess);
}
#else
// Without the thread sanitizer a race shows as poison or as a difference between schedules.
TEST(RacesTest, DependOnTheSchedule) {
  struct Case {
    Kernel kernel;
    int threads, blocks;
  };
  for (const Case& c : {Case{MissingBlockBarrier, 64, 1}, Case{MissingBarrierAfterReads, 64, 1},
                        Case{MissingWarpBarrier, 32, 1}, Case{BlocksWriteOneWord, 32, 4}}) {
    std::set<std::string> results;
    for (const Order order : kOrders) {
      GetConfig().order = order;
      DeviceArray<float> out(256);
      out.Fill();
      out.Set(std::vector<float>(128, 2.0f));
      ASSERT_EQ(gpu::Launch(c.kernel, dim3(c.blocks), dim3(c.threads), 0, nullptr, out.data()),
                cudaSuccess);
      const std::vector<float> values = out.Get();
      results.insert(std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4));
    }
    EXPECT_GT(results.size(), 1u);
  }
  GetConfig() = Config();
}
#endif

// What a tester of bank conflicts must see.
void ConflictKernel(float* out, int row_bytes) {
  BATON_SHARED(uint4, rows, [32 * 8]);
  for (int i = 0; i < 8; ++i) rows[threadIdx.x * 8 + i] = uint4{1, 2, 3, 4};
  __syncwarp();
  uint32_t words[4];
  gpu::LdMatrixX4(words, reinterpret_cast<const char*>(rows) + threadIdx.x * row_bytes);
  out[128 + threadIdx.x] = static_cast<float>(words[0]);
}

TEST(BankConflictsTest, AreCounted) {
  DeviceArray<float> out(256);
  for (const auto& [row_bytes, conflicts] : {std::pair{16, 0}, {128, 28}, {32, 16}}) {
    GetStats() = Stats();
    ASSERT_EQ(gpu::Launch(ConflictKernel, dim3(1), dim3(32), 0, nullptr, out.data(), row_bytes),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(GetStats().ldmatrix_conflicts, static_cast<uint64_t>(conflicts)) << row_bytes;
  }
}

}  // namespace
}  // namespace baton::simt
