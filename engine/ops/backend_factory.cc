#include <cstring>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "engine/base/mutex.h"
#include "engine/base/status_macros.h"
#include "engine/ops/backend.h"
#include "engine/ops/cpu/cpu_backend.h"
#include "engine/ops/cuda_version.h"
#include "engine/ops/ref/ref_backend.h"
#include "engine/ops/self_test.h"

namespace baton::ops {

namespace cuda {
// engine/ops/cuda/cuda_backend.h. Defined in programs that link the CUDA backend, null in others.
[[gnu::weak]] absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(
    WeightDtype dtype, const BackendOptions& options);
// engine/ops/cuda/cuda_device.h; the same.
[[gnu::weak]] absl::StatusOr<std::string> ProbeCuda(int num_devices);
[[gnu::weak]] std::string ToolkitVersion();
}  // namespace cuda

namespace {

struct DtypeName {
  WeightDtype dtype;
  absl::string_view name;
};
constexpr DtypeName kDtypeNames[] = {{WeightDtype::kF32, "f32"},
                                     {WeightDtype::kBf16, "bf16"},
                                     {WeightDtype::kInt8, "int8"},
                                     {WeightDtype::kQ4, "q4"},
                                     {WeightDtype::kFp8, "fp8"}};

// What a host backend computes kFp8 in: the source gives the weights that the codes stand for.
WeightDtype HostDtype(WeightDtype dtype) {
  return dtype == WeightDtype::kFp8 ? WeightDtype::kBf16 : dtype;
}

constexpr absl::string_view kNotBuilt =
    "cuda: this program was built without the CUDA backend (it needs a CUDA 13 toolkit)";

BackendChoice Choose(int num_devices) {
  if (&cuda::ProbeCuda == nullptr) return {"cpu", std::string(kNotBuilt)};
  const absl::StatusOr<std::string> device = cuda::ProbeCuda(num_devices);
  if (device.ok()) return {"cuda", *device};
  return {"cpu", std::string(device.status().message())};
}

}  // namespace

const BackendChoice& AutoBackend(int num_devices) {
  struct Choices {
    base::Mutex mutex;
    std::map<int, BackendChoice> by_count ABSL_GUARDED_BY(mutex);
  };
  static auto* choices = new Choices;
  base::MutexLock lock(&choices->mutex);
  const auto [found, is_new] = choices->by_count.try_emplace(num_devices);
  if (is_new) found->second = Choose(num_devices);
  return found->second;
}

std::string CudaVersion() {
  return &cuda::ToolkitVersion == nullptr ? "none" : cuda::ToolkitVersion();
}

absl::string_view WeightDtypeName(WeightDtype dtype) {
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.dtype == dtype) return entry.name;
  }
  return "?";
}

absl::StatusOr<WeightDtype> ParseWeightDtype(absl::string_view name) {
  for (const DtypeName& entry : kDtypeNames) {
    if (entry.name == name) return entry.dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("weight dtype \"", name, "\": accepted: auto, f32, bf16, int8, q4, fp8"));
}

absl::Status Backend::JoinGroup(parallel::TpGroup* group) {
  return absl::UnimplementedError(absl::StrCat("backend \"", name(), "\": tp=", group->size(),
                                               ": tensor parallelism is not supported by it"));
}

absl::StatusOr<base::Buffer> Backend::NewPool(size_t bytes, bool shared) {
  return shared ? base::Buffer::AllocateShared("baton-kv", bytes) : base::Buffer::Allocate(bytes);
}

absl::Status Backend::CopyInPool(uint8_t* to, const uint8_t* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::Status Backend::CopyFromPool(uint8_t* host, const uint8_t* pool, size_t bytes) {
  return CopyInPool(host, pool, bytes);
}

absl::Status Backend::CopyToPool(uint8_t* pool, const uint8_t* host, size_t bytes) {
  return CopyInPool(pool, host, bytes);
}

absl::StatusOr<std::unique_ptr<Backend>> CreateBackend(absl::string_view name,
                                                       WeightDtype dtype,
                                                       const BackendOptions& options) {
  if (name == "ref") return CreateRefBackend(HostDtype(dtype));
  if (name == "cpu") {
    BATON_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                           cpu::CreateCpuBackend(HostDtype(dtype), options));
    BATON_RETURN_IF_ERROR(CompareWithRef(backend.get()));
    return backend;
  }
  if (name == "cuda") {
    if (&cuda::CreateCudaBackend != nullptr) return cuda::CreateCudaBackend(dtype, options);
    return absl::UnavailableError(kNotBuilt);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("backend \"", name, "\": accepted: ref, cpu, cuda"));
}

}  // namespace baton::ops
