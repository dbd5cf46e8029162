#include "engine/ops/cuda/linear.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "engine/base/clock.h"
#include "engine/base/status_macros.h"

namespace baton::ops::cuda {
namespace {

// What NVIDIA advises for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

absl::Status LtStatus(int status, absl::string_view what) {
  if (status == kCublasSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cublasLt: ", what, ": status=", status));
}

cudaDataType TypeOf(Element element) {
  if (element == Element::kFp8) return CUDA_R_8F_E4M3;
  return element == Element::kF32 ? CUDA_R_32F : CUDA_R_16BF;
}

std::string NameOf(const LinearShape& shape) {
  return absl::StrCat("T=", shape.tokens, " N=", shape.rows, " K=", shape.cols);
}

// Products with a larger result are bound by arithmetic, where the first suggestion is good; and
// timing them would take as much memory again.
constexpr size_t kTimedResultMax = size_t{16} << 20;
constexpr int kSuggestions = 8, kTimedRuns = 5;

}  // namespace

absl::StatusOr<std::unique_ptr<Linear>> Linear::Create(const Options& options) {
  BATON_ASSIGN_OR_RETURN(const CublasLtApi* api, LoadCublasLt());
  std::unique_ptr<Linear> linear(new Linear(api, options));
  BATON_RETURN_IF_ERROR(LtStatus(api->create(&linear->handle_), "create"));
  BATON_ASSIGN_OR_RETURN(linear->workspace_, DeviceBuffer::Allocate(kWorkspaceBytes));
  return linear;
}

Linear::~Linear() {
  for (const auto& [shape, plan] : plans_) Destroy(plan);
  if (handle_ != nullptr) api_.destroy(handle_);
}

void Linear::Destroy(const Plan& plan) {
  if (plan.desc != nullptr) api_.desc_destroy(plan.desc);
  for (CublasLtMatrixLayout* layout : {plan.w, plan.x, plan.out}) {
    if (layout != nullptr) api_.layout_destroy(layout);
  }
}

std::string Linear::KeyOf(const LinearShape& shape) const {
  return absl::StrReplaceAll(
      absl::StrCat(device_, "/", api_.version(), "/", shape.tokens, "x", shape.rows, "x",
                   shape.cols, "/", static_cast<int>(shape.in), static_cast<int>(shape.out),
                   shape.accumulate ? "+" : "", shape.bias ? "b" : ""),
      {{" ", "_"}});
}

absl::StatusOr<Linear::Plan> Linear::MakePlan(const LinearShape& shape, const Call& call) {
  Plan plan;
  absl::Status status = Describe(shape, &plan);
  if (status.ok()) status = SetPointers(shape, call, plan);
  if (status.ok()) status = ChooseAlgo(shape, call, &plan);
  if (!status.ok()) {
    Destroy(plan);
    return status;
  }
  return plan;
}

// cuBLASLt counts columns first: row-major w [N][K] is its K x N matrix, so out^T = w * x^T is
// op(A) * B with A = w transposed and B = x.
absl::Status Linear::Describe(const LinearShape& shape, Plan* plan) {
  const uint64_t tokens = shape.tokens, rows = shape.rows, cols = shape.cols;
  BATON_RETURN_IF_ERROR(
      LtStatus(api_.desc_create(&plan->desc, kCublasCompute32F, CUDA_R_32F), "descriptor"));
  const auto set = [&](int attribute, int value, absl::string_view what) {
    return LtStatus(api_.desc_set(plan->desc, attribute, &value, sizeof(value)), what);
  };
  BATON_RETURN_IF_ERROR(set(kDescTransposeA, kCublasOpTranspose, "transpose"));
  if (shape.bias) BATON_RETURN_IF_ERROR(set(kDescEpilogue, kEpilogueBias, "bias"));
  if (shape.in == Element::kFp8) {
    BATON_RETURN_IF_ERROR(set(kDescScaleModeA, kScaleBlock128, "scales of w"));
    BATON_RETURN_IF_ERROR(set(kDescScaleModeB, kScaleVector128, "scales of x"));
  }
  BATON_RETURN_IF_ERROR(
      LtStatus(api_.layout_create(&plan->w, TypeOf(shape.in), cols, rows, shape.cols), "weights"));
  BATON_RETURN_IF_ERROR(
      LtStatus(api_.layout_create(&plan->x, TypeOf(shape.in), cols, tokens, shape.cols), "input"));
  return LtStatus(api_.layout_create(&plan->out, TypeOf(shape.out), rows, tokens, shape.rows),
                  "output");
}

absl::Status Linear::ChooseAlgo(const LinearShape& shape, const Call& call, Plan* plan) {
  const std::string key = KeyOf(shape);
  if (const std::optional<CublasLtAlgo> kept = cache_.Find(key)) {
    CublasLtHeuristic checked = {};
    if (api_.algo_check(handle_, plan->desc, plan->w, plan->x, plan->out, plan->out, &*kept,
                        &checked) == kCublasSuccess &&
        checked.workspace_bytes <= workspace_.size()) {
      plan->algo = *kept;
      return absl::OkStatus();
    }
  }
  CublasLtPreference* preference = nullptr;
  BATON_RETURN_IF_ERROR(LtStatus(api_.preference_create(&preference), "preference"));
  const uint64_t bytes = workspace_.size();
  absl::Status status =
      LtStatus(api_.preference_set(preference, kPreferenceMaxWorkspaceBytes, &bytes, sizeof(bytes)),
               "workspace");
  std::array<CublasLtHeuristic, kSuggestions> suggested = {};
  int found = 0;
  if (status.ok()) {
    status = LtStatus(api_.heuristic(handle_, plan->desc, plan->w, plan->x, plan->out, plan->out,
                                     preference, kSuggestions, suggested.data(), &found),
                      absl::StrCat("heuristic ", NameOf(shape)));
  }
  api_.preference_destroy(preference);
  BATON_RETURN_IF_ERROR(status);
  if (found == 0)
    return absl::InternalError(absl::StrCat("cublasLt: no algorithm for ", NameOf(shape)));
  plan->algo = suggested[0].algo;
  const size_t result = size_t{4} * shape.tokens * shape.rows;
  if (found == 1 || result > kTimedResultMax) return absl::OkStatus();
  BATON_ASSIGN_OR_RETURN(plan->algo,
                         Fastest(shape, call, *plan, absl::MakeConstSpan(suggested.data(), found)));
  cache_.Add(key, plan->algo);
  return absl::OkStatus();
}

absl::StatusOr<CublasLtAlgo> Linear::Fastest(const LinearShape& shape,
                                             Call call,
                                             const Plan& plan,
                                             absl::Span<const CublasLtHeuristic> suggested) {
  BATON_ASSIGN_OR_RETURN(const DeviceBuffer scratch,
                         DeviceBuffer::Allocate(size_t{4} * shape.tokens * shape.rows));
  call.out = scratch.data();
  const auto wait = [&] { return CudaStatus(cudaStreamSynchronize(call.stream), "timing"); };
  // Whatever is there, and NaN, is added to.
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(scratch.data(), 0, scratch.size(), call.stream), "timing"));
  absl::Duration best = absl::InfiniteDuration();
  CublasLtAlgo fastest = suggested[0].algo;
  for (const CublasLtHeuristic& candidate : suggested) {
    if (candidate.status != kCublasSuccess) continue;
    if (!Multiply(shape, call, plan, candidate.algo).ok()) continue;  // and warms up
    BATON_RETURN_IF_ERROR(wait());
    const absl::Duration start = base::Clock::Real().Now();
    for (int i = 0; i < kTimedRuns; ++i)
      BATON_RETURN_IF_ERROR(Multiply(shape, call, plan, candidate.algo));
    BATON_RETURN_IF_ERROR(wait());
    const absl::Duration took = base::Clock::Real().Now() - start;
    if (took < best) {
      best = took;
      fastest = candidate.algo;
    }
  }
  return fastest;
}

// A descriptor names the bias and the scales; suggestions may depend on how they are aligned.
absl::Status Linear::SetPointers(const LinearShape& shape, const Call& call, const Plan& plan) {
  const auto set = [&](int attribute, const void* pointer, absl::string_view what) {
    return LtStatus(api_.desc_set(plan.desc, attribute, &pointer, sizeof(pointer)), what);
  };
  if (shape.bias) BATON_RETURN_IF_ERROR(set(kDescBiasPointer, call.bias, "bias"));
  if (shape.in != Element::kFp8) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(set(kDescScalePointerA, call.w.scales, "scales of w"));
  return set(kDescScalePointerB, call.x.scales, "scales of x");
}

absl::Status Linear::Multiply(const LinearShape& shape,
                              const Call& call,
                              const Plan& plan,
                              const CublasLtAlgo& algo) {
  const float alpha = 1.0f, beta = shape.accumulate ? 1.0f : 0.0f;
  return LtStatus(api_.matmul(handle_, plan.desc, &alpha, call.w.data, plan.w, call.x.data, plan.x,
                              &beta, call.out, plan.out, call.out, plan.out, &algo,
                              workspace_.data(), workspace_.size(), call.stream),
                  absl::StrCat("matmul ", NameOf(shape)));
}

absl::Status Linear::Run(const LinearShape& shape,
                         const LinearOperand& x,
                         const LinearOperand& w,
                         const void* bias,
                         void* out,
                         cudaStream_t stream) {
  if (shape.tokens == 0) return absl::OkStatus();
  const Call call = {x, w, bias, out, stream};
  auto found = plans_.find(shape);
  if (found == plans_.end()) {
    BATON_ASSIGN_OR_RETURN(const Plan plan, MakePlan(shape, call));
    found = plans_.emplace(shape, plan).first;
  }
  BATON_RETURN_IF_ERROR(SetPointers(shape, call, found->second));
  return Multiply(shape, call, found->second, found->second.algo);
}

}  // namespace baton::ops::cuda
