#pragma once

// Pools for tests of transports: on the host, or on a device, where only the driver may look. The
// programs of tests/simt have an emulated one.

#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "absl/types/span.h"
#include "engine/base/buffer.h"
#include "engine/base/cuda_memory.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {

// Memory that only a legacy handle names, for the transport of the first part of the name.
inline constexpr char kLegacyIpc[] = "cuda_ipc_legacy";

inline std::string NameOf(const std::string& transport) {
  return transport == kLegacyIpc ? std::string(kCudaIpc) : transport;
}
inline bool PeerWrites(const std::string& transport) {
  return transport != "tcp" && transport != kNccl;
}

// What the contract tests run over, in this program.
inline std::vector<std::string> TransportsUnderTest() {
#ifdef BATON_EMULATED_DEVICE
  return {std::string(kCudaIpc), std::string(kNccl)};
#else
  return {"shm", "tcp"};
#endif
}
// ... and those whose peers are other processes.
inline std::vector<std::string> CrossProcessTransports() {
  std::vector<std::string> transports = TransportsUnderTest();
#ifdef BATON_EMULATED_DEVICE
  transports.push_back(kLegacyIpc);
#endif
  return transports;
}

class TestPool {
 public:
  TestPool(const std::string& transport, size_t bytes)
      : on_device_(IsBetweenDevices(NameOf(transport))) {
    absl::StatusOr<base::Buffer> memory = transport == kLegacyIpc ? base::AllocateOnDevice(0, bytes)
                                          : on_device_
                                              ? base::AllocateExportable(0, bytes)
                                              : base::Buffer::AllocateShared("test-pool", bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    memory_ = *std::move(memory);
  }

  // What options take: null for the other place.
  base::Buffer* host() { return on_device_ ? nullptr : &memory_; }
  base::Buffer* device() { return on_device_ ? &memory_ : nullptr; }
  size_t size() const { return memory_.size(); }

  void Fill(uint8_t value, size_t bytes) { Write(std::vector<uint8_t>(bytes, value)); }
  void Fill(uint8_t value) { Fill(value, size()); }
  void Write(absl::Span<const uint8_t> bytes) {
    if (!on_device_) {
      std::memcpy(memory_.data(), bytes.data(), bytes.size());
      return;
    }
    const base::CudaDevice device = *base::CudaDevice::Open(0);
    EXPECT_TRUE(device.Use().ok());
    EXPECT_EQ(device.driver().copy_to_device(Address(), bytes.data(), bytes.size()), 0);
  }
  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> bytes(size());
    if (!on_device_) {
      std::memcpy(bytes.data(), memory_.data(), bytes.size());
      return bytes;
    }
    const base::CudaDevice device = *base::CudaDevice::Open(0);
    EXPECT_TRUE(device.Use().ok());
    EXPECT_EQ(device.driver().copy_to_host(bytes.data(), Address(), bytes.size()), 0);
    return bytes;
  }

 private:
  base::CuPointer Address() const { return reinterpret_cast<base::CuPointer>(memory_.data()); }

  bool on_device_;
  base::Buffer memory_;
};

}  // namespace baton::kvtransfer
