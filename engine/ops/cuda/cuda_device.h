#pragma once

// The devices that a process computes on.

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace baton::ops::cuda {

struct CudaDevice {
  std::string name;
  std::string pci_id;        // "0000:1b:00.0"
  int major = 0, minor = 0;  // compute capability
  int num_sms = 0;
};

// One of the visible devices, by number, made current for the calling thread. Says beforehand what
// a backend would run into: no such device, no driver, kernels that were not compiled for this
// device, no cuBLASLt. Errors: UNAVAILABLE saying which.
absl::StatusOr<CudaDevice> OpenDevice(int ordinal);

// Whether kernels on one device can read the memory of another.
// Errors: FAILED_PRECONDITION naming the two when they cannot.
absl::Status CheckPeerAccess(int device, int peer);

// Why --device auto does not take CUDA here, with one of the first devices for each rank; OK, and
// the first device in words, where it does. That is the calling thread's then.
absl::StatusOr<std::string> ProbeCuda(int num_devices);

// Of the toolkit that this was compiled with: "13.0".
std::string ToolkitVersion();

// Whether kernels compiled for `architectures` ("90a-real", "80-real;89-real", CMake's words) run
// on a device of this compute capability: machine code runs on the same major version from its
// minor version on, and with the suffix "a" on that one version alone.
bool IsCompiledFor(const std::string& architectures, int major, int minor);

}  // namespace baton::ops::cuda
