#include "engine/ops/cuda/cuda_backend.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"
#include "engine/ops/cuda/cuda_device.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {

CudaBackend::~CudaBackend() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

absl::Status CudaBackend::Init() {
  BATON_ASSIGN_OR_RETURN(const CudaDevice device, OpenDevice(device_));
  name_ = device.name;
  pci_id_ = device.pci_id;
  num_sms_ = device.num_sms;
  BATON_RETURN_IF_ERROR(ChoosePrefill(device.major, device.minor));
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"));
  BATON_ASSIGN_OR_RETURN(linear_, Linear::Create({.device = name_, .cache = gemm_cache_}));
  const size_t partial_bytes = DecodeAttentionWorkspace(1, 1, 1, kMaxPartials, 128);
  BATON_ASSIGN_OR_RETURN(attention_workspace_, DeviceBuffer::Allocate(partial_bytes));
  BATON_ASSIGN_OR_RETURN(attention_counters_,
                         DeviceBuffer::Allocate(kMaxPartials * sizeof(int32_t)));
  return CudaStatus(
      cudaMemsetAsync(attention_counters_.data(), 0, attention_counters_.size(), stream_),
      "counters");
}

std::string CudaBackend::description() const {
  return absl::StrCat("cuda ", name_, " sms=", num_sms_,
                      " prefill=", flash_ ? "flashinfer" : "own");
}

absl::StatusOr<DeviceMemory> CudaBackend::device_memory() {
  const OnDevice here(device_);
  size_t free = 0, total = 0;
  BATON_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "device memory"));
  return DeviceMemory{.total_bytes = total, .free_bytes = free};
}

absl::StatusOr<std::unique_ptr<Activation>> CudaBackend::NewActivation(ActivationKind kind,
                                                                       int max_tokens,
                                                                       int width) {
  BATON_RETURN_IF_ERROR(CheckAtMost("activation", "max_tokens", max_tokens, int64_t{1} << 24));
  BATON_RETURN_IF_ERROR(CheckAtMost("activation", "width", width, int64_t{1} << 24));
  if (width % 8 != 0)
    return absl::InvalidArgumentError(
        absl::StrCat("cuda: width=", width, ": a multiple of 8 is needed"));
  auto activation = std::make_unique<CudaActivation>();
  activation->kind = kind;
  activation->element = kind == ActivationKind::kResidual ? Element::kF32 : linear_element_;
  if (kind == ActivationKind::kLinearInput && IsFp8Width(width)) {
    activation->element = Element::kFp8;
    BATON_ASSIGN_OR_RETURN(
        activation->scales,
        DeviceBuffer::Allocate(sizeof(float) * (width / kFp8Block) * PaddedTokens(max_tokens)));
  }
  activation->q_element = dtype_ == WeightDtype::kF32 ? Element::kF32 : Element::kF16;
  activation->max_tokens = max_tokens;
  max_tokens_ = std::min(max_tokens_, max_tokens);
  activation->width = width;
  const size_t count = static_cast<size_t>(PaddedTokens(max_tokens)) * width;
  BATON_ASSIGN_OR_RETURN(activation->data,
                         DeviceBuffer::Allocate(count * ElementSize(activation->element)));
  if (kind == ActivationKind::kResidual && group_ != nullptr)
    BATON_RETURN_IF_ERROR(group_->Reserve(PaddedTokens(max_tokens), width));
  if (kind == ActivationKind::kProjected) {
    BATON_ASSIGN_OR_RETURN(activation->queries,
                           DeviceBuffer::Allocate(count * ElementSize(activation->q_element)));
  }
  return std::unique_ptr<Activation>(std::move(activation));
}

absl::Status CudaBackend::JoinGroup(parallel::TpGroup* group) {
  BATON_ASSIGN_OR_RETURN(group_, DeviceGroup::Join(group, device_, stream_));
  return absl::OkStatus();
}

absl::Status CudaBackend::Synchronize() {
  BATON_RETURN_IF_ERROR(Drain());
  return group_ == nullptr ? absl::OkStatus() : group_->Barrier();
}

absl::Status CudaBackend::Grow(size_t bytes, DeviceBuffer* buffer) {
  if (buffer->size() >= bytes) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(Drain());
  graphs_.Clear();  // they point to what is given back here
  BATON_ASSIGN_OR_RETURN(*buffer, DeviceBuffer::Allocate(bytes));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(WeightDtype dtype,
                                                           const BackendOptions& options) {
  if (dtype != WeightDtype::kF32 && dtype != WeightDtype::kBf16 && dtype != WeightDtype::kFp8) {
    return absl::InvalidArgumentError(absl::StrCat("cuda: weight dtype \"", WeightDtypeName(dtype),
                                                   "\": accepted: f32, bf16, fp8"));
  }
  const std::string& prefill = options.prefill_attention;
  if (prefill != "auto" && prefill != "own" && prefill != "flashinfer") {
    return absl::InvalidArgumentError(
        absl::StrCat("cuda: prefill attention \"", prefill, "\": accepted: auto, own, flashinfer"));
  }
  auto backend = std::make_unique<CudaBackend>(dtype, options);
  BATON_RETURN_IF_ERROR(backend->Init());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace baton::ops::cuda
