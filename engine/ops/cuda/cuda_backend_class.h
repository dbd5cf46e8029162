#pragma once

// The class behind CreateCudaBackend. Private to cuda_backend*.cc: life and activations in
// cuda_backend.cc, matrices and bytes of pools in cuda_backend_memory.cc, operations in
// cuda_backend_ops.cc and cuda_backend_attention.cc, prefill by FlashInfer's kernel in
// cuda_backend_flash.cc, passes with their graphs and draws in cuda_backend_pass.cc.

#include <cuda_runtime.h>

#include <climits>
#include <memory>
#include <string>
#include <vector>

#include "engine/ops/backend.h"
#include "engine/ops/cuda/attention_plan.h"
#include "engine/ops/cuda/cuda_tensors.h"
#include "engine/ops/cuda/device_draw_chain.h"
#include "engine/ops/cuda/device_group.h"
#include "engine/ops/cuda/flash_plan.h"
#include "engine/ops/cuda/graph_cache.h"
#include "engine/ops/cuda/kernels.h"
#include "engine/ops/cuda/linear.h"
#include "engine/ops/cuda/pass_arrays.h"
#include "engine/ops/cuda/step_upload.h"
#include "engine/ops/quantize.h"

namespace baton::ops::cuda {

class CudaBackend : public Backend {
 public:
  CudaBackend(WeightDtype dtype, const BackendOptions& options)
      : dtype_(dtype),
        device_(options.device),
        eager_(options.enforce_eager),
        gemm_cache_(options.gemm_cache),
        prefill_attention_(options.prefill_attention),
        linear_element_(dtype == WeightDtype::kF32 ? Element::kF32 : Element::kBf16) {}
  ~CudaBackend() override;
  absl::Status Init();
  absl::string_view name() const override { return "cuda"; }
  std::string description() const override;
  WeightDtype weight_dtype() const override { return dtype_; }
  uint32_t sum_order_version() const override {
    return flash_ ? kFlashSumOrderVersion : kDeviceSumOrderVersion;
  }
  std::string device_id() const override { return pci_id_; }
  absl::StatusOr<DeviceMemory> device_memory() override;
  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const MatrixSource& source,
                                               bool interleave_half) override;
  absl::StatusOr<std::unique_ptr<Activation>> NewActivation(ActivationKind kind,
                                                            int max_tokens,
                                                            int width) override;
  absl::Status JoinGroup(parallel::TpGroup* group) override;
  bool matrices_are_shared() const override { return false; }
  absl::StatusOr<base::Buffer> NewPool(size_t bytes, bool shared) override;
  absl::Status CopyInPool(uint8_t* to, const uint8_t* from, size_t bytes) override;
  bool pools_on_host() const override { return false; }
  absl::Status CopyFromPool(uint8_t* host, const uint8_t* pool, size_t bytes) override;
  absl::Status CopyToPool(uint8_t* pool, const uint8_t* host, size_t bytes) override;
  absl::StatusOr<bool> ReserveDraws(const DrawLimits& limits) override;
  absl::StatusOr<std::unique_ptr<DrawChain>> NewDrawChain(int max_draws) override;
  // A small pass is padded to one of few shapes, whether it becomes a graph or not: so its results
  // are the same either way.
  absl::Status RunPass(const PassInputs& inputs,
                       absl::FunctionRef<absl::Status(bool whole)> issue,
                       float* logits) override;
  absl::Status Embed(const Matrix& table,
                     absl::Span<const int32_t> ids,
                     Activation* residual) override;
  absl::Status RmsNorm(const Activation& residual,
                       int num_tokens,
                       absl::Span<const float> weight,
                       float eps,
                       Activation* out) override;
  absl::Status QkvProject(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          absl::Span<const float> bias,
                          Activation* qkv) override;
  absl::Status QkNormRopeAppend(const QkNormRopeAppendArgs& args) override;
  absl::Status PagedAttention(const PagedAttentionArgs& args) override;
  absl::Status ProjectAdd(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* residual) override;
  absl::Status GateUpSilu(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* out) override;
  absl::Status Logits(const Activation& residual,
                      absl::Span<const int32_t> rows,
                      absl::Span<const float> weight,
                      float eps,
                      const Matrix& head,
                      float* logits) override;
  absl::Status Synchronize() override;
  absl::StatusOr<std::vector<float>> Read(const Activation& activation,
                                          int num_tokens,
                                          int width) override;

 private:
  // In a padded pass the sizes are those of its shape, not of its inputs.
  int Padded(int num_tokens) const { return pass_ == nullptr ? num_tokens : pass_->shape().tokens; }
  absl::Status RunPassOfRank(const PassInputs& inputs,
                             absl::FunctionRef<absl::Status(bool whole)> issue,
                             float* logits);
  absl::Status CopyLogits(size_t num_rows, float* logits);
  // Of a pass that tokens are drawn from or that others have drawn tokens for.
  absl::Status CheckPass(const PassInputs& inputs) const;
  // Puts tokens that a chain has drawn among the ids of the pass.
  absl::Status TakeDrawn(const PassInputs& inputs, const int32_t* ids, int32_t* out);
  // Draws from the logits of the pass, behind its operations, and waits for the results unless it
  // is one of a chain.
  absl::Status Draw(const Draws& draws);
  // Whether what a linear layer of this many columns reads is e4m3; its weights are then, too.
  bool IsFp8Width(int width) const { return dtype_ == WeightDtype::kFp8 && width % kFp8Block == 0; }
  int PaddedTokens(int max_tokens) const {
    return dtype_ == WeightDtype::kFp8 ? RoundUp(max_tokens, kFp8Multiple) : max_tokens;
  }
  // `shape` says what is written; what is read is x and the weight.
  absl::Status Multiply(const CudaActivation& x,
                        int num_tokens,
                        const Matrix& weight,
                        LinearShape shape,
                        const void* bias,
                        void* out);
  absl::Status ApplyScales(const CudaActivation& in, int num_tokens, std::vector<float>* values);
  // residual += the parts of both ranks, where that is still to be done.
  absl::Status Sum();
  absl::Status SumAndNorm(absl::Span<const float> weight, float eps, const LinearRows& out);
  absl::Status Reduce(AllReduceNormParams params);
  absl::Status Drain() { return CudaStatus(cudaStreamSynchronize(stream_), "synchronize"); }
  void EncodeRow(absl::Span<const float> row, uint8_t* out) const;
  absl::Status Norm(const CudaActivation& in,
                    const int32_t* rows,
                    int num_tokens,
                    absl::Span<const float> weight,
                    float eps,
                    const LinearRows& out);
  absl::StatusOr<CacheLayer> Cache(const KvCacheView& view);
  absl::Status UploadPlan(PagedAttentionParams* params);
  // The sequences of `params`, none of which has more than `query_max` queries.
  absl::Status Decode(const PagedAttentionParams& params,
                      int query_max,
                      int num_splits,
                      bool tensor_cores);
  // `flash_scale`: of the queries, where prefill is FlashInfer's; else 0.
  absl::Status AttendStep(const PagedAttentionArgs& args,
                          PagedAttentionParams params,
                          bool tensor_cores,
                          float flash_scale);
  absl::Status AttendPass(PagedAttentionParams params, bool tensor_cores);
  absl::Status Prefill(PagedAttentionParams params, bool tensor_cores);
  // Whether FlashInfer's kernel is to be used at all, which is said in the log.
  // Errors: UNAVAILABLE where it is asked for and cannot be.
  absl::Status ChoosePrefill(int major, int minor);
  // The scale of its queries, where the prefill of this step is to be its; 0: it is our own.
  float FlashScale(const PagedAttentionArgs& args, const CudaActivation& qkv, bool tensor_cores);
  absl::Status FlashPrefillStep(const PagedAttentionArgs& args,
                                const PagedAttentionParams& params,
                                float scale);
  // Scratch memory grows to the largest step there is, which is at the start.
  absl::Status Grow(size_t bytes, DeviceBuffer* buffer);
  absl::Status ReadRows(const DeviceBuffer& data,
                        Element element,
                        int num_tokens,
                        int width,
                        std::vector<float>* values);
  // f16 bits, exactly.
  static float HalfToFloat(uint32_t bits);

  const WeightDtype dtype_;
  const int device_;
  const bool eager_;
  const std::string gemm_cache_;
  const std::string prefill_attention_;
  const Element linear_element_;
  std::string name_, pci_id_;
  int num_sms_ = 0;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Linear> linear_;
  DeviceConstants constants_;
  AttentionPlan plan_;
  bool flash_ = false, flash_missed_ = false;  // in use; a step that it does not fit was logged
  FlashPlan flash_plan_;
  UploadedArray flash_work_;
  DeviceBuffer flash_queries_;  // [max_tokens][Hq * D], e4m3
  PassArrays pass_arrays_;
  GraphCache graphs_;
  const PassArrays* pass_ = nullptr;   // while the operations of a padded pass are issued
  const PassInputs* drawn_ = nullptr;  // while those of another are, which has drawn tokens
  DeviceBuffer taken_ids_;             // of such a pass
  int max_tokens_ = INT_MAX;           // what every activation holds
  size_t vocab_ = 0, first_logit_ = 0, num_logits_ = 0;  // logits_ has [first, first + num) of V
  std::unique_ptr<DeviceGroup> group_;                   // null: one rank
  const CudaActivation* unsummed_ = nullptr;  // a residual that the ranks' parts are to be added to
  int unsummed_tokens_ = 0;
  UploadedArray ids_, positions_, slots_, rows_;
  UploadedArray query_starts_, context_lens_, block_tables_, decode_, others_, tiles_;
  DeviceBuffer attention_workspace_, attention_counters_, gate_up_, logit_input_, logits_;
  DeviceBuffer attention_rows_;  // [max_tokens][Hq * D], where attention cannot write e4m3
  DrawLimits draw_limits_;       // what there is room for; no rows: nothing is drawn
  DeviceBuffer results_, results_on_host_;  // [draw_limits_.rows]
};

}  // namespace baton::ops::cuda
