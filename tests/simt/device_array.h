#pragma once

// Device memory of a test: poisoned, filled from and read back to a std::vector.

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "tests/simt/msan.h"

namespace baton::simt {

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(memory);
#if !defined(BATON_SIMT_MSAN)  // there it would count as writing, and the emulator has done it
    Fill();
#endif
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Set(values); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  // Poison that counts as written: what a kernel leaves alone may be read back.
  void Fill() { EXPECT_EQ(cudaMemset(data_, 0xff, count_ * sizeof(T)), cudaSuccess); }
  void Set(const std::vector<T>& values) {
    ASSERT_LE(values.size(), count_);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  // Waits for the device.
  std::vector<T> Get() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
    CheckMemory(data_, count_ * sizeof(T));
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }
  T* data() const { return data_; }
  size_t size() const { return count_; }

 private:
  size_t count_;
  T* data_ = nullptr;
};

}  // namespace baton::simt
