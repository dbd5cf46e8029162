// A pass as a whole: padding, graphs, and what comes back to the host.

#include <algorithm>

#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {

absl::Status CudaBackend::RunPass(const PassInputs& inputs,
                                  absl::FunctionRef<absl::Status(bool whole)> issue,
                                  float* logits) {
  if (group_ == nullptr) return RunPassOfRank(inputs, issue, logits);
  unsummed_ = nullptr;
  BATON_RETURN_IF_ERROR(group_->BeginPass(stream_));
  const absl::Status status = RunPassOfRank(inputs, issue, logits);
  if (!status.ok()) group_->CallOff();
  return status;
}

absl::Status CudaBackend::RunPassOfRank(const PassInputs& inputs,
                                        absl::FunctionRef<absl::Status(bool whole)> issue,
                                        float* logits) {
  if (inputs.draws != nullptr) BATON_RETURN_IF_ERROR(CheckDraws(inputs, draw_limits_));
  const PassShape shape = inputs.in_one_go ? ShapeOfPass(inputs, max_tokens_) : PassShape();
  if (shape.tokens == 0 && inputs.draws == nullptr) return issue(false);
  BATON_ASSIGN_OR_RETURN(const bool moved, pass_arrays_.Send(inputs, shape, stream_));
  if (moved) graphs_.Clear();
  const auto issue_padded = [&]() -> absl::Status {
    if (group_ != nullptr) group_->RestartPass();  // a capture that failed has come this way
    unsummed_ = nullptr;
    pass_ = &pass_arrays_;
    const absl::Status issued = issue(true);
    pass_ = nullptr;
    return issued;
  };
  if (shape.tokens == 0) {
    BATON_RETURN_IF_ERROR(issue(false));
  } else {
    BATON_RETURN_IF_ERROR(eager_ ? issue_padded()
                                 : graphs_.Run({inputs.model, shape}, issue_padded, stream_));
  }
  if (inputs.draws != nullptr) return Draw(*inputs.draws);
  return CopyLogits(inputs.logit_rows.size(), logits);
}

absl::StatusOr<bool> CudaBackend::ReserveDraws(const DrawLimits& limits) {
  if (group_ != nullptr) return false;
  const OnDevice here(device_);
  const size_t bytes = limits.rows * sizeof(SampleResult);
  BATON_RETURN_IF_ERROR(pass_arrays_.ReserveDraws(limits));
  BATON_ASSIGN_OR_RETURN(results_, DeviceBuffer::Allocate(bytes));
  BATON_ASSIGN_OR_RETURN(results_on_host_, DeviceBuffer::AllocatePinned(bytes));
  draw_limits_ = limits;
  return true;
}

// Its launch is not part of the pass's graph: then it has as many rows as are wanted, not as many
// as the shape has, and a pass without draws needs no graph of its own. It is issued while the
// graph runs.
absl::Status CudaBackend::Draw(const Draws& draws) {
  if (draws.rows.empty()) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(CheckAtMost("draw", "num_tokens", draws.num_tokens, vocab_));
  BATON_RETURN_IF_ERROR(CudaStatus(Sample({.logits = logits_.as<float>(),
                                           .rows = pass_arrays_.sample_rows(),
                                           .edits = pass_arrays_.edits(),
                                           .results = results_.as<SampleResult>(),
                                           .num_rows = static_cast<int>(draws.rows.size()),
                                           .vocab = static_cast<int>(vocab_),
                                           .num_tokens = draws.num_tokens},
                                          stream_),
                                   "draw"));
  BATON_RETURN_IF_ERROR(CudaStatus(
      cudaMemcpyAsync(results_on_host_.data(), results_.data(),
                      draws.rows.size() * sizeof(SampleResult), cudaMemcpyDeviceToHost, stream_),
      "draw results"));
  BATON_RETURN_IF_ERROR(Synchronize());
  std::copy_n(results_on_host_.as<SampleResult>(), draws.rows.size(), draws.results.begin());
  return absl::OkStatus();
}

absl::Status CudaBackend::CopyLogits(size_t num_rows, float* logits) {
  BATON_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpy2DAsync(logits + first_logit_, vocab_ * sizeof(float), logits_.data(),
                                   num_logits_ * sizeof(float), num_logits_ * sizeof(float),
                                   num_rows, cudaMemcpyDeviceToHost, stream_),
                 "logits"));
  return Synchronize();
}

}  // namespace baton::ops::cuda
