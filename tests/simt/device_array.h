#pragma once

// Device memory of a test: poisoned, filled from and read back to a std::vector.

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace baton::simt {

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, count * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(memory);
    EXPECT_EQ(cudaMemset(data_, 0xff, count * sizeof(T)), cudaSuccess);
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) { Set(values); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  void Set(const std::vector<T>& values) {
    ASSERT_LE(values.size(), count_);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  // Waits for the device.
  std::vector<T> Get() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << cudaGetErrorString(cudaGetLastError());
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
