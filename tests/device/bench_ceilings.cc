// The device's ceilings and the products of the models' layers.

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/gpu_stats.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cublaslt.h"
#include "engine/ops/cuda/cuda_device.h"
#include "engine/ops/cuda/device_buffer.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear.h"
#include "tests/device/device_bench.h"

namespace baton::device {
namespace {

using ops::cuda::CublasLtApi;
using ops::cuda::CudaDevice;
using ops::cuda::CudaStatus;
using ops::cuda::DeviceBuffer;
using ops::cuda::Element;
using ops::cuda::kFp8Multiple;
using ops::cuda::Linear;
using ops::cuda::LinearShape;
using ops::cuda::LoadCublasLt;
using ops::cuda::OpenDevice;

constexpr int kRuns = 7;

absl::Status Wait() { return CudaStatus(cudaDeviceSynchronize(), "wait"); }

// Operands of a product [T][K] x [N][K], filled with made-up numbers, and their scales with ones.
struct Operands {
  DeviceBuffer x, w, out, x_scales, w_scales;

  static absl::StatusOr<Operands> Make(Element element, int tokens, int rows, int cols) {
    Operands operands;
    const size_t size = element == Element::kFp8 ? 1 : 2;
    BATON_ASSIGN_OR_RETURN(operands.x, Filled(element, tokens, cols, size, 1));
    BATON_ASSIGN_OR_RETURN(operands.w, Filled(element, rows, cols, size, 2));
    BATON_ASSIGN_OR_RETURN(operands.out, DeviceBuffer::Allocate(size_t{4} * tokens * rows));
    if (element != Element::kFp8) return operands;
    BATON_ASSIGN_OR_RETURN(operands.x_scales, Ones(size_t{1} * cols / 128 * tokens));
    BATON_ASSIGN_OR_RETURN(operands.w_scales,
                           Ones(size_t{1} * ((rows + 127) / 128) * ops::cuda::Fp8ScalePitch(cols)));
    return operands;
  }

 private:
  static absl::StatusOr<DeviceBuffer> Filled(
      Element element, int rows, int cols, size_t size, uint64_t seed) {
    BATON_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(size * rows * cols));
    BATON_RETURN_IF_ERROR(CudaStatus(ops::cuda::HashFill({.out = buffer.data(),
                                                          .element = element,
                                                          .rows = rows,
                                                          .cols = cols,
                                                          .seed = seed,
                                                          .std = 1},
                                                         nullptr),
                                     "fill"));
    return buffer;
  }
  static absl::StatusOr<DeviceBuffer> Ones(size_t count) {
    BATON_ASSIGN_OR_RETURN(DeviceBuffer buffer, DeviceBuffer::Allocate(count * sizeof(float)));
    const std::vector<float> ones(count, 1.0f);
    BATON_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpy(buffer.data(), ones.data(), buffer.size(), cudaMemcpyHostToDevice), "scales"));
    return buffer;
  }
};

// Seconds of one product, several behind one another.
absl::StatusOr<double> ProductSeconds(
    Linear* linear, Element element, int tokens, int rows, int cols, int repeat) {
  BATON_ASSIGN_OR_RETURN(const Operands operands, Operands::Make(element, tokens, rows, cols));
  const LinearShape shape = {
      .tokens = tokens, .rows = rows, .cols = cols, .in = element, .out = Element::kBf16};
  BATON_ASSIGN_OR_RETURN(const double seconds, MedianSeconds(kRuns, [&]() -> absl::Status {
                           for (int i = 0; i < repeat; ++i) {
                             BATON_RETURN_IF_ERROR(linear->Run(
                                 shape, {operands.x.data(), operands.x_scales.as<float>()},
                                 {operands.w.data(), operands.w_scales.as<float>()}, nullptr,
                                 operands.out.data(), nullptr));
                           }
                           return Wait();
                         }));
  return seconds / repeat;
}

Json ErrorOf(const absl::Status& status) { return {{"error", status.ToString()}}; }

const char* Name(Element element) { return element == Element::kFp8 ? "fp8_block" : "bf16"; }

}  // namespace

absl::StatusOr<Json> Info(const BenchOptions& options) {
  BATON_ASSIGN_OR_RETURN(const CudaDevice device, OpenDevice(0));
  BATON_ASSIGN_OR_RETURN(const CublasLtApi* api, LoadCublasLt());
  size_t free = 0, total = 0;
  BATON_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "memory"));
  Json json = {{"name", device.name},
               {"compute_capability", absl::StrCat(device.major, ".", device.minor)},
               {"sms", device.num_sms},
               {"bus", device.pci_id},
               {"memory_bytes", total},
               {"memory_free_bytes", free},
               {"cublaslt", api->version()}};
  void* nccl = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  auto* version =
      nccl == nullptr ? nullptr : reinterpret_cast<int (*)(int*)>(dlsym(nccl, "ncclGetVersion"));
  int number = 0;
  if (version != nullptr && version(&number) == 0) json["nccl"] = number;
  const auto gpu = base::GpuStats::Open({device.pci_id});
  if (gpu.ok()) {
    const base::GpuSample sample = (*gpu)->Sample(0);
    if (sample.power_watts) json["power_watts"] = *sample.power_watts;
    if (sample.memory_used_bytes) json["memory_used_bytes"] = *sample.memory_used_bytes;
  } else {
    json["nvml"] = gpu.status().ToString();
  }
  return json;
}

absl::StatusOr<Json> Ceilings(const BenchOptions& options) {
  BATON_ASSIGN_OR_RETURN(const CudaDevice device, OpenDevice(0));
  const size_t bytes = options.tiny ? size_t{1} << 16 : size_t{4} << 30;
  Json json;
  {
    BATON_ASSIGN_OR_RETURN(const DeviceBuffer from, DeviceBuffer::Allocate(bytes));
    BATON_ASSIGN_OR_RETURN(const DeviceBuffer to, DeviceBuffer::Allocate(bytes));
    BATON_RETURN_IF_ERROR(CudaStatus(cudaMemset(from.data(), 1, bytes), "fill"));
    BATON_ASSIGN_OR_RETURN(
        const double seconds, MedianSeconds(kRuns, [&]() -> absl::Status {
          BATON_RETURN_IF_ERROR(CudaStatus(
              cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice, nullptr),
              "copy"));
          return Wait();
        }));
    json["copy"] = {{"bytes", bytes}, {"gb_per_s", 2 * bytes / seconds / 1e9}};
  }
  {
    const size_t host_bytes = options.tiny ? bytes : size_t{1} << 28;
    BATON_ASSIGN_OR_RETURN(const DeviceBuffer host, DeviceBuffer::AllocatePinned(host_bytes));
    BATON_ASSIGN_OR_RETURN(const DeviceBuffer to, DeviceBuffer::Allocate(host_bytes));
    BATON_ASSIGN_OR_RETURN(
        const double seconds, MedianSeconds(kRuns, [&]() -> absl::Status {
          BATON_RETURN_IF_ERROR(CudaStatus(
              cudaMemcpyAsync(to.data(), host.data(), host_bytes, cudaMemcpyHostToDevice, nullptr),
              "copy"));
          return Wait();
        }));
    json["host_to_device"] = {{"bytes", host_bytes}, {"gb_per_s", host_bytes / seconds / 1e9}};
  }
  BATON_ASSIGN_OR_RETURN(const auto linear, Linear::Create({}));
  const int side = options.tiny ? 128 : 8192;
  for (const Element element : {Element::kBf16, Element::kFp8}) {
    const absl::StatusOr<double> seconds =
        ProductSeconds(linear.get(), element, side, side, side, options.tiny ? 1 : 10);
    json[absl::StrCat("product_", Name(element))] =
        seconds.ok() ? Json{{"side", side}, {"tflops", 2.0 * side * side * side / *seconds / 1e12}}
                     : ErrorOf(seconds.status());
  }
  return json;
}

absl::StatusOr<Json> Products(const BenchOptions& options) {
  BATON_ASSIGN_OR_RETURN(const CudaDevice device, OpenDevice(0));
  BATON_ASSIGN_OR_RETURN(const auto linear, Linear::Create({}));
  using Shape = std::pair<int, int>;  // N, K
  const std::vector<Shape> shapes =
      options.tiny ? std::vector<Shape>{{128, 128}}
                   : std::vector<Shape>{{6144, 2560},  {2560, 4096},  {19456, 2560},
                                        {2560, 9728},  {6144, 4096},  {4096, 4096},
                                        {24576, 4096}, {4096, 12288}, {151936, 4096}};
  const std::vector<int> tokens =
      options.tiny ? std::vector<int>{16} : std::vector<int>{1, 4, 16, 64, 256, 1024, 4096};
  Json rows = Json::array();
  for (const auto& [n, k] : shapes) {
    for (const Element element : {Element::kBf16, Element::kFp8}) {
      for (const int t : tokens) {
        const bool fp8 = element == Element::kFp8;
        if (n > 100000 && (fp8 || t > 256)) continue;  // the head
        const int padded = fp8 ? ops::cuda::RoundUp(t, kFp8Multiple) : t;
        Json row = {{"n", n}, {"k", k}, {"tokens", t}, {"mode", Name(element)}};
        const absl::StatusOr<double> seconds =
            ProductSeconds(linear.get(), element, padded, n, k, options.tiny ? 1 : 20);
        if (seconds.ok()) {
          row["us"] = *seconds * 1e6;
          row["tflops"] = 2.0 * t * n * k / *seconds / 1e12;
          row["weight_gb_per_s"] = (fp8 ? 1.0 : 2.0) * n * k / *seconds / 1e9;
        } else {
          row["error"] = seconds.status().ToString();
        }
        rows.push_back(std::move(row));
      }
    }
  }
  return Json{{"products", rows}};
}

}  // namespace baton::device
