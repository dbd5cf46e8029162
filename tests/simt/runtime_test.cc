// The fake runtime: device memory keeps the host out, lazy streams show a forgotten
// synchronisation, errors stick.

#include <cstring>
#include <functional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/simt/device_array.h"
#include "tests/simt/device_memory.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/conformance_kernels.h"

namespace baton::simt {
namespace {

class RuntimeTest : public testing::Test {
 protected:
  void SetUp() override { ClearDeviceError(); }
  void TearDown() override { GetRuntimeConfig() = RuntimeConfig(); }
};

TEST_F(RuntimeTest, FreshMemoryIsPoison) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, 100), cudaSuccess);
  std::vector<uint8_t> bytes(100);
  ASSERT_EQ(cudaMemcpy(bytes.data(), memory, 100, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(bytes, std::vector<uint8_t>(100, 0xff));
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(RuntimeTest, CopiesStayInsideAndMatchTheirKind) {
  DeviceArray<int> device(4);
  int host[8] = {};
  EXPECT_EQ(cudaMemcpy(host, device.data(), 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.data(), host, 20, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.data() + 1, host, 12, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaFree(device.data() + 1), cudaErrorInvalidValue);
  cudaGetLastError();
}

TEST_F(RuntimeTest, AllocationsStopAtTheDevicesSize) {
  GetRuntimeConfig().total_bytes = 1 << 20;
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, (1 << 20) + 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_F(RuntimeTest, TheHostCannotTouchDeviceMemory) {
  if (!DeviceMemory::Get().guarded()) GTEST_SKIP() << "this CPU has no protection keys";
  DeviceArray<int> device(4);
  volatile int* value = device.data();
  EXPECT_DEATH(*value = 1, "");
}
#endif

TEST_F(RuntimeTest, LazyStreamsRunOnlyWhenWaitedFor) {
  GetRuntimeConfig().lazy = true;
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  DeviceArray<int> device(std::vector<int>{5});
  void* pinned = nullptr;
  ASSERT_EQ(cudaMallocHost(&pinned, sizeof(int)), cudaSuccess);
  auto* host = static_cast<int*>(pinned);
  ASSERT_EQ(cudaMemcpyAsync(host, device.data(), 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(*host, -1);  // too early
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(*host, 5);
  *host = 6;  // pinned memory is read when the stream gets there
  ASSERT_EQ(cudaMemcpyAsync(device.data(), host, 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
  *host = 7;
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(device.Get()[0], 7);
  int pageable = 8;  // pageable memory when the call is made
  ASSERT_EQ(cudaMemcpyAsync(device.data(), &pageable, 4, cudaMemcpyHostToDevice, stream),
            cudaSuccess);
  pageable = 9;
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(device.Get()[0], 8);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// Two streams write one word. An event orders them; without it some seed shows the wrong order.
TEST_F(RuntimeTest, EventsOrderStreamsAndTheirLackShows) {
  GetRuntimeConfig().lazy = true;
  cudaStream_t first, second;
  cudaEvent_t event;
  ASSERT_EQ(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  DeviceArray<int> device(1);
  const auto last_write = [&](uint64_t seed, bool ordered) {
    GetRuntimeConfig().seed = seed;
    const int one = 1, two = 2;
    cudaMemcpyAsync(device.data(), &one, 4, cudaMemcpyHostToDevice, first);
    cudaEventRecord(event, first);
    if (ordered) cudaStreamWaitEvent(second, event, 0);
    cudaMemcpyAsync(device.data(), &two, 4, cudaMemcpyHostToDevice, second);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return device.Get()[0];
  };
  bool wrong_order_seen = false;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(last_write(seed, true), 2);
    wrong_order_seen |= last_write(seed, false) == 1;
  }
  EXPECT_TRUE(wrong_order_seen);
  cudaEventDestroy(event);
  cudaStreamDestroy(first);
  cudaStreamDestroy(second);
}

// A graph is what was captured, not what happened to be in memory then, and its operations let
// those of other streams between them.
TEST_F(RuntimeTest, GraphsReplayWhatWasCaptured) {
  GetRuntimeConfig().lazy = true;
  cudaStream_t stream, other;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  DeviceArray<int> from(std::vector<int>{5}), middle(1), to(std::vector<int>{0});
  const auto copy = [&](const DeviceArray<int>& in, const DeviceArray<int>& out, cudaStream_t s) {
    return cudaMemcpyAsync(out.data(), in.data(), 4, cudaMemcpyDeviceToDevice, s);
  };
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(copy(from, middle, stream), cudaSuccess);
  ASSERT_EQ(copy(middle, to, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(to.Get()[0], 0) << "capturing runs nothing";
  from.Set({6});
  ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  EXPECT_EQ(to.Get()[0], 6);
  // The other stream's write lands before, between or behind the two copies.
  const DeviceArray<int> intruder(std::vector<int>{9});
  bool between = false;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    GetRuntimeConfig().seed = seed;
    from.Set({static_cast<int>(seed) + 100});
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(copy(intruder, middle, other), cudaSuccess);
    between |= to.Get()[0] == 9;
  }
  EXPECT_TRUE(between);
  cudaGraphExecDestroy(exec);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
}

TEST_F(RuntimeTest, WhatACaptureMustNotDoEndsIt) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  DeviceArray<int> device(1);
  int pageable = 1;
  void* memory = nullptr;
  const std::function<cudaError_t()> forbidden[] = {
      [&] { return cudaStreamSynchronize(stream); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaMalloc(&memory, 4); },
      [&] { return cudaMallocHost(&memory, 4); },
      [&] { return cudaFree(device.data()); },
      [&] { return cudaMemset(device.data(), 0, 4); },  // the stream named by null
      [&] { return cudaMemcpyAsync(device.data(), &pageable, 4, cudaMemcpyHostToDevice, stream); },
  };
  for (const auto& call : forbidden) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
  }
  cudaGetLastError();
  EXPECT_EQ(cudaMemset(device.data(), 0, 4), cudaSuccess) << "afterwards all is as before";
  EXPECT_EQ(device.Get()[0], 0);
  cudaStreamDestroy(stream);
}

TEST_F(RuntimeTest, LaunchShapesAreChecked) {
  DeviceArray<int> out(64);
  EXPECT_EQ(RunDynamicShared(out.data(), 300 * 1024), cudaErrorInvalidValue);
  EXPECT_EQ(RunBarriers(out.data(), 0), cudaErrorInvalidConfiguration);
  cudaGetLastError();
}

}  // namespace
}  // namespace baton::simt
