#include "engine/ops/cuda/cuda_device.h"

#include <cuda_runtime.h>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cublaslt.h"
#include "engine/ops/cuda/device_buffer.h"

// What the kernels were compiled for; the emulated device has all that sm_90a has.
#ifndef BATON_CUDA_ARCHITECTURES
#define BATON_CUDA_ARCHITECTURES "90a-real"
#endif

namespace baton::ops::cuda {

bool IsCompiledFor(const std::string& architectures, int major, int minor) {
  for (absl::string_view entry : absl::StrSplit(architectures, ';')) {
    const absl::string_view code = entry.substr(0, entry.find('-'));
    const bool one_version = !code.empty() && absl::ascii_isalpha(code.back());
    int number = 0;
    if (!absl::SimpleAtoi(code.substr(0, code.size() - (one_version ? 1 : 0)), &number)) continue;
    if (number / 10 != major) continue;
    if (one_version ? number % 10 == minor : number % 10 <= minor) return true;
  }
  return false;
}

absl::StatusOr<CudaDevice> OpenDevice(int ordinal) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) {
    cudaGetLastError();  // whatever it is, a worker goes on without
    return absl::UnavailableError(absl::StrCat(
        "cuda: no device to compute on",
        counted == cudaSuccess ? "" : absl::StrCat(": ", cudaGetErrorString(counted))));
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::UnavailableError(
        absl::StrCat("cuda: there is no device ", ordinal, ": devices=", count));
  }
  const std::string what = absl::StrCat("device ", ordinal);
  BATON_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(ordinal), what));
  cudaDeviceProp properties;
  BATON_RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, ordinal), what));
  CudaDevice device;
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.num_sms = properties.multiProcessorCount;
  char pci_id[32] = "";
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetPCIBusId(pci_id, sizeof(pci_id), ordinal), "bus id"));
  device.pci_id = pci_id;
  if (!IsCompiledFor(BATON_CUDA_ARCHITECTURES, device.major, device.minor)) {
    return absl::UnavailableError(absl::StrCat("cuda: ", device.name, " has compute capability ",
                                               device.major, ".", device.minor,
                                               "; this build is for ", BATON_CUDA_ARCHITECTURES));
  }
  BATON_RETURN_IF_ERROR(LoadCublasLt().status());
  return device;
}

std::string ToolkitVersion() {
  return absl::StrCat(CUDART_VERSION / 1000, ".", CUDART_VERSION % 1000 / 10);
}

absl::Status CheckPeerAccess(int device, int peer) {
  int can = 0;
  BATON_RETURN_IF_ERROR(CudaStatus(cudaDeviceCanAccessPeer(&can, device, peer), "peer access"));
  if (can != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "cuda: device ", device, " has no peer access to device ", peer, ", which tp=2 needs"));
}

absl::StatusOr<std::string> ProbeCuda(int num_devices) {
  CudaDevice device;
  for (int ordinal = num_devices - 1; ordinal >= 0; --ordinal) {
    BATON_ASSIGN_OR_RETURN(device, OpenDevice(ordinal));
    for (int peer = ordinal + 1; peer < num_devices; ++peer)
      BATON_RETURN_IF_ERROR(CheckPeerAccess(ordinal, peer));
  }
  return absl::StrCat(device.name, " compute_capability=", device.major, ".", device.minor);
}

}  // namespace baton::ops::cuda
