#include "engine/ops/cuda/linear.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::ops::cuda {
namespace {

// What NVIDIA advises for Hopper.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

absl::Status LtStatus(int status, absl::string_view what) {
  if (status == kCublasSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("cublasLt: ", what, ": status=", status));
}

cudaDataType TypeOf(Element element) { return element == Element::kF32 ? CUDA_R_32F : CUDA_R_16BF; }

std::string Describe(const LinearShape& shape) {
  return absl::StrCat("T=", shape.tokens, " N=", shape.rows, " K=", shape.cols);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Linear>> Linear::Create() {
  BATON_ASSIGN_OR_RETURN(const CublasLtApi* api, LoadCublasLt());
  std::unique_ptr<Linear> linear(new Linear(api));
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

// cuBLASLt counts columns first: row-major w [N][K] is its K x N matrix, so out^T = w * x^T is
// op(A) * B with A = w transposed and B = x.
absl::StatusOr<Linear::Plan> Linear::MakePlan(const LinearShape& shape) {
  Plan plan;
  const uint64_t tokens = shape.tokens, rows = shape.rows, cols = shape.cols;
  const int transpose = kCublasOpTranspose, epilogue = kEpilogueBias;
  absl::Status status =
      LtStatus(api_.desc_create(&plan.desc, kCublasCompute32F, CUDA_R_32F), "descriptor");
  const auto then = [&](int result, absl::string_view what) {
    status.Update(LtStatus(result, what));
  };
  if (status.ok())
    then(api_.desc_set(plan.desc, kDescTransposeA, &transpose, sizeof(transpose)), "transpose");
  if (status.ok() && shape.bias)
    then(api_.desc_set(plan.desc, kDescEpilogue, &epilogue, sizeof(epilogue)), "bias");
  if (status.ok())
    then(api_.layout_create(&plan.w, TypeOf(shape.in), cols, rows, shape.cols), "weights");
  if (status.ok())
    then(api_.layout_create(&plan.x, TypeOf(shape.in), cols, tokens, shape.cols), "input");
  if (status.ok())
    then(api_.layout_create(&plan.out, TypeOf(shape.out), rows, tokens, shape.rows), "output");
  if (status.ok()) status = ChooseAlgo(shape, &plan);
  if (!status.ok()) {
    Destroy(plan);
    return status;
  }
  return plan;
}

absl::Status Linear::ChooseAlgo(const LinearShape& shape, Plan* plan) {
  CublasLtPreference* preference = nullptr;
  BATON_RETURN_IF_ERROR(LtStatus(api_.preference_create(&preference), "preference"));
  const uint64_t bytes = workspace_.size();
  absl::Status status =
      LtStatus(api_.preference_set(preference, kPreferenceMaxWorkspaceBytes, &bytes, sizeof(bytes)),
               "workspace");
  CublasLtHeuristic best = {};
  int found = 0;
  if (status.ok()) {
    status = LtStatus(api_.heuristic(handle_, plan->desc, plan->w, plan->x, plan->out, plan->out,
                                     preference, 1, &best, &found),
                      absl::StrCat("heuristic ", Describe(shape)));
  }
  api_.preference_destroy(preference);
  if (status.ok() && found == 0)
    status = absl::InternalError(absl::StrCat("cublasLt: no algorithm for ", Describe(shape)));
  plan->algo = best.algo;
  return status;
}

absl::Status Linear::Run(const LinearShape& shape,
                         const void* x,
                         const void* w,
                         const void* bias,
                         void* out,
                         cudaStream_t stream) {
  if (shape.tokens == 0) return absl::OkStatus();
  auto found = plans_.find(shape);
  if (found == plans_.end()) {
    BATON_ASSIGN_OR_RETURN(const Plan plan, MakePlan(shape));
    found = plans_.emplace(shape, plan).first;
  }
  const Plan& plan = found->second;
  if (shape.bias) {
    BATON_RETURN_IF_ERROR(
        LtStatus(api_.desc_set(plan.desc, kDescBiasPointer, &bias, sizeof(bias)), "bias"));
  }
  const float alpha = 1.0f, beta = shape.accumulate ? 1.0f : 0.0f;
  return LtStatus(
      api_.matmul(handle_, plan.desc, &alpha, w, plan.w, x, plan.x, &beta, out, plan.out, out,
                  plan.out, &plan.algo, workspace_.data(), workspace_.size(), stream),
      absl::StrCat("matmul ", Describe(shape)));
}

}  // namespace baton::ops::cuda
