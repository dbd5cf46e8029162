// A pass as a whole: padding, graphs, and what comes back to the host.

#include <algorithm>

#include "engine/base/status_macros.h"
#include "engine/ops/cuda/cuda_backend_class.h"
#include "engine/ops/cuda/device_draw_chain.h"
#include "engine/ops/validate.h"

namespace baton::ops::cuda {
namespace {

// All chains are made by NewDrawChain of this file.
DeviceDrawChain* ChainOf(const PassInputs& inputs) {
  return inputs.draws == nullptr ? nullptr : static_cast<DeviceDrawChain*>(inputs.draws->chain);
}
const DeviceDrawChain* SourceOf(const PassInputs& inputs) {
  return inputs.drawn.empty() ? nullptr : static_cast<const DeviceDrawChain*>(inputs.source);
}

}  // namespace

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
  BATON_RETURN_IF_ERROR(CheckPass(inputs));
  const PassShape shape = inputs.in_one_go ? ShapeOfPass(inputs, max_tokens_) : PassShape();
  const DeviceDrawChain* source = SourceOf(inputs);
  if (shape.tokens == 0 && inputs.draws == nullptr && source == nullptr) return issue(false);
  DeviceDrawChain* chain = ChainOf(inputs);
  if (chain != nullptr) BATON_RETURN_IF_ERROR(chain->BeginPass());
  const bool is_first = chain == nullptr || chain->size() == 0;
  BATON_ASSIGN_OR_RETURN(const bool moved, pass_arrays_.Send(inputs, shape, is_first, stream_));
  if (moved) graphs_.Clear();
  if (source != nullptr) {
    BATON_RETURN_IF_ERROR(source->HoldBack(stream_));
    if (shape.tokens > 0)
      BATON_RETURN_IF_ERROR(TakeDrawn(inputs, pass_arrays_.ids(), pass_arrays_.ids()));
  }
  const auto issue_padded = [&]() -> absl::Status {
    if (group_ != nullptr) group_->RestartPass();  // a capture that failed has come this way
    unsummed_ = nullptr;
    pass_ = &pass_arrays_;
    const absl::Status issued = issue(true);
    pass_ = nullptr;
    return issued;
  };
  if (shape.tokens == 0) {
    drawn_ = source == nullptr ? nullptr : &inputs;
    const absl::Status issued = issue(false);
    drawn_ = nullptr;
    BATON_RETURN_IF_ERROR(issued);
  } else {
    BATON_RETURN_IF_ERROR(eager_ ? issue_padded()
                                 : graphs_.Run({inputs.model, shape}, issue_padded, stream_));
  }
  if (inputs.draws != nullptr) return Draw(*inputs.draws);
  return CopyLogits(inputs.logit_rows.size(), logits);
}

absl::Status CudaBackend::CheckPass(const PassInputs& inputs) const {
  BATON_RETURN_IF_ERROR(CheckDrawn(inputs));
  const DeviceDrawChain* source = SourceOf(inputs);
  if (source != nullptr) {
    BATON_RETURN_IF_ERROR(CheckEqual("drawn", "device", source->device(), device_));
    BATON_RETURN_IF_ERROR(CheckEqual("drawn", "tp", group_ == nullptr ? 1 : 2, 1));
  }
  if (inputs.draws == nullptr) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(CheckDraws(inputs, draw_limits_));
  const DeviceDrawChain* chain = ChainOf(inputs);
  return chain == nullptr
             ? absl::OkStatus()
             : CheckAtMost("draws", "chain", chain->size() + int64_t(inputs.draws->rows.size()),
                           chain->max_draws());
}

absl::Status CudaBackend::TakeDrawn(const PassInputs& inputs, const int32_t* ids, int32_t* out) {
  return CudaStatus(cuda::TakeDrawn({.ids = ids,
                                     .drawn = pass_arrays_.drawn(),
                                     .results = SourceOf(inputs)->results(),
                                     .out = out,
                                     .num_tokens = static_cast<int>(inputs.drawn.size())},
                                    stream_),
                    "take drawn");
}

absl::StatusOr<std::unique_ptr<DrawChain>> CudaBackend::NewDrawChain(int max_draws) {
  if (draw_limits_.rows == 0) return std::unique_ptr<DrawChain>();
  return DeviceDrawChain::Create(device_, stream_, max_draws);
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
  auto* chain = static_cast<DeviceDrawChain*>(draws.chain);
  SampleResult* results = chain != nullptr ? chain->next_results() : results_.as<SampleResult>();
  BATON_RETURN_IF_ERROR(CudaStatus(Sample({.logits = logits_.as<float>(),
                                           .rows = pass_arrays_.sample_rows(),
                                           .edits = pass_arrays_.edits(),
                                           .results = results,
                                           .num_rows = static_cast<int>(draws.rows.size()),
                                           .vocab = static_cast<int>(vocab_),
                                           .num_tokens = draws.num_tokens},
                                          stream_),
                                   "draw"));
  if (chain != nullptr) return chain->EndPass(draws.results);
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
