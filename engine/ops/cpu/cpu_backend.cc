#include "engine/ops/cpu/cpu_backend.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/buffer.h"
#include "engine/base/status_macros.h"
#include "engine/ops/cpu/attention_tasks.h"
#include "engine/ops/cpu/cpu_tensors.h"
#include "engine/ops/cpu/input_kernels.h"
#include "engine/ops/cpu/isa.h"
#include "engine/ops/cpu/thread_pool.h"
#include "engine/ops/flush_denormals.h"
#include "engine/ops/validate.h"

namespace baton::ops::cpu {
namespace {

constexpr int kMaxThreads = 256;
CpuActivation& Mutable(Activation* activation) { return static_cast<CpuActivation&>(*activation); }
const CpuActivation& Const(const Activation& activation) {
  return static_cast<const CpuActivation&>(activation);
}
const CpuMatrix& Packed(const Matrix& matrix) { return static_cast<const CpuMatrix&>(matrix); }

// What one thread computes in.
struct ThreadScratch {
  base::Buffer rows, attention;
};

class CpuBackend : public Backend {
 public:
  CpuBackend(WeightDtype dtype, const Kernels* kernels, int num_threads, bool pin)
      : dtype_(dtype), kernels_(*kernels), pool_(num_threads, pin), scratch_(num_threads) {}

  absl::Status Init() {
    for (ThreadScratch& scratch : scratch_) {
      BATON_ASSIGN_OR_RETURN(scratch.attention, base::Buffer::Allocate(kernels_.attention_bytes));
    }
    return ReserveLogitRows(1, 1);
  }

  absl::string_view name() const override { return "cpu"; }
  std::string description() const override {
    return absl::StrCat("cpu ", kernels_.name, " threads=", pool_.num_threads());
  }
  WeightDtype weight_dtype() const override { return dtype_; }

  int host_threads() const override { return pool_.num_threads(); }
  void ForEach(int count, absl::FunctionRef<void(int index, int thread)> f) override {
    const unsigned modes = ScopedFloatModes::Current();
    pool_.ParallelFor(count, 1, [&](int begin, int end, int thread) {
      const ScopedFloatModes as_caller(modes);
      for (int i = begin; i < end; ++i) f(i, thread);
    });
  }

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const MatrixSource& source,
                                               bool interleave_half) override {
    BATON_RETURN_IF_ERROR(CheckPack(source, dtype_, interleave_half));
    const ScopedFlushDenormals flush;
    BATON_RETURN_IF_ERROR(ReserveScratch(source.cols));
    return CpuMatrix::Pack(source, dtype_, interleave_half, &pool_);
  }

  absl::StatusOr<std::unique_ptr<Activation>> NewActivation(ActivationKind kind,
                                                            int max_tokens,
                                                            int width) override {
    BATON_RETURN_IF_ERROR(CheckAtMost("activation", "max_tokens", max_tokens, int64_t{1} << 24));
    BATON_RETURN_IF_ERROR(CheckAtMost("activation", "width", width, int64_t{1} << 24));
    if (group_ != nullptr) BATON_RETURN_IF_ERROR(ReserveExchange(kind, max_tokens, width));
    return CpuActivation::Create(kind, dtype_, kernels_, max_tokens, width);
  }

  absl::Status JoinGroup(parallel::TpGroup* group) override {
    group_ = group;
    return absl::OkStatus();
  }

  absl::Status Embed(const Matrix& table,
                     absl::Span<const int32_t> ids,
                     Activation* residual) override {
    const CpuActivation& out = Mutable(residual);
    BATON_RETURN_IF_ERROR(CheckAtMost("embed", "T", ids.size(), out.max_tokens()));
    BATON_RETURN_IF_ERROR(CheckEqual("embed", "E", table.cols(), out.width()));
    BATON_RETURN_IF_ERROR(CheckIds(ids, table.rows()));
    const ScopedFlushDenormals flush;
    for (size_t t = 0; t < ids.size(); ++t)
      Packed(table).ReadRow(ids[t], out.rows() + t * out.stride());
    return absl::OkStatus();
  }

  absl::Status RmsNorm(const Activation& residual,
                       int num_tokens,
                       absl::Span<const float> weight,
                       float eps,
                       Activation* out) override {
    const CpuActivation& x = Const(residual);
    const CpuActivation& y = Mutable(out);
    BATON_RETURN_IF_ERROR(CheckTokens("rms norm", num_tokens, x, y));
    BATON_RETURN_IF_ERROR(CheckEqual("rms norm", "weight", weight.size(), x.width()));
    BATON_RETURN_IF_ERROR(CheckEqual("rms norm", "out E", y.width(), x.width()));
    const ScopedFlushDenormals flush;
    Norm(x, nullptr, num_tokens, weight, eps, y.input());
    return absl::OkStatus();
  }

  absl::Status QkvProject(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          absl::Span<const float> bias,
                          Activation* qkv) override {
    const CpuActivation& out = Mutable(qkv);
    BATON_RETURN_IF_ERROR(CheckTokens("qkv project", num_tokens, Const(x), out));
    BATON_RETURN_IF_ERROR(CheckEqual("qkv project", "K", weight.cols(), Const(x).width()));
    BATON_RETURN_IF_ERROR(CheckEqual("qkv project", "rows", weight.rows(), out.width()));
    BATON_RETURN_IF_ERROR(CheckPacking("qkv project", weight, false));
    if (!bias.empty())
      BATON_RETURN_IF_ERROR(CheckEqual("qkv project", "bias", bias.size(), weight.rows()));
    GemmArgs args = Args(Const(x), num_tokens, Packed(weight), Epilogue::kStore);
    args.bias = bias.empty() ? nullptr : bias.data();
    args.out = out.rows();
    args.out_stride = out.stride();
    const ScopedFlushDenormals flush;
    RunGemm(args, Packed(weight).num_panels());
    return absl::OkStatus();
  }

  absl::Status QkNormRopeAppend(const QkNormRopeAppendArgs& args) override {
    const CpuActivation& qkv = Mutable(args.qkv);
    BATON_RETURN_IF_ERROR(CheckQkNormRopeAppend(args, qkv.max_tokens(), qkv.width()));
    const RopeArgs rope = {.qkv = qkv.rows(),
                           .stride = qkv.stride(),
                           .num_heads = args.num_heads,
                           .num_kv_heads = args.num_kv_heads,
                           .head_dim = args.head_dim,
                           .q_weight = args.q_weight.empty() ? nullptr : args.q_weight.data(),
                           .k_weight = args.k_weight.empty() ? nullptr : args.k_weight.data(),
                           .eps = args.eps,
                           .positions = args.positions.data(),
                           .slots = args.slots.data(),
                           .rope = args.rope.data(),
                           .cache = CacheOf(args.cache)};
    const ScopedFlushDenormals flush;
    pool_.ParallelFor(args.num_tokens, TokenGrain(args.num_tokens),
                      [&](int begin, int end, int) { kernels_.rope_append(rope, begin, end); });
    return absl::OkStatus();
  }

  absl::Status PagedAttention(const PagedAttentionArgs& args) override {
    const CpuActivation& qkv = Const(*args.qkv);
    const CpuActivation& out = Mutable(args.out);
    BATON_RETURN_IF_ERROR(CheckPagedAttention(args, out.max_tokens(), qkv.width(), out.width()));
    BATON_RETURN_IF_ERROR(CheckAtMost("paged attention", "D", args.head_dim, kMaxHeadDim));
    const ScopedFlushDenormals flush;
    RunAttention(args, {.qkv = qkv.rows(), .stride = qkv.stride(), .out = out.input()}, kernels_,
                 &pool_, [this](int thread) { return ScratchOf(thread); });
    return QuantizeShare(out.input(), args.num_tokens);
  }

  absl::Status ProjectAdd(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* residual) override {
    const CpuActivation& out = Mutable(residual);
    BATON_RETURN_IF_ERROR(CheckTokens("project add", num_tokens, Const(x), out));
    BATON_RETURN_IF_ERROR(CheckEqual("project add", "K", weight.cols(), Const(x).width()));
    BATON_RETURN_IF_ERROR(CheckEqual("project add", "E", weight.rows(), out.width()));
    BATON_RETURN_IF_ERROR(CheckPacking("project add", weight, false));
    const ScopedFlushDenormals flush;
    if (group_ != nullptr) return AddOverRanks(Const(x), num_tokens, Packed(weight), out);
    GemmArgs args = Args(Const(x), num_tokens, Packed(weight), Epilogue::kAdd);
    args.out = out.rows();
    args.out_stride = out.stride();
    RunGemm(args, Packed(weight).num_panels());
    return absl::OkStatus();
  }

  absl::Status GateUpSilu(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* out) override {
    const CpuActivation& y = Mutable(out);
    BATON_RETURN_IF_ERROR(CheckTokens("gate up", num_tokens, Const(x), y));
    BATON_RETURN_IF_ERROR(CheckEqual("gate up", "K", weight.cols(), Const(x).width()));
    BATON_RETURN_IF_ERROR(CheckEqual("gate up", "rows", weight.rows(), 2 * int64_t{y.width()}));
    BATON_RETURN_IF_ERROR(CheckPacking("gate up", weight, true));
    GemmArgs args = Args(Const(x), num_tokens, Packed(weight), Epilogue::kSiluMul);
    args.input_out = y.input();
    const ScopedFlushDenormals flush;
    RunGemm(args, Packed(weight).num_panels());
    return QuantizeShare(y.input(), num_tokens);
  }

  absl::Status Logits(const Activation& residual,
                      absl::Span<const int32_t> rows,
                      absl::Span<const float> weight,
                      float eps,
                      const Matrix& head,
                      float* logits) override {
    const CpuActivation& x = Const(residual);
    BATON_RETURN_IF_ERROR(CheckEqual("logits", "weight", weight.size(), x.width()));
    BATON_RETURN_IF_ERROR(CheckEqual("logits", "head E", head.cols(), x.width()));
    BATON_RETURN_IF_ERROR(CheckPacking("logits", head, false));
    for (const int32_t row : rows)
      BATON_RETURN_IF_ERROR(CheckAtMost("logits", "row", row, x.max_tokens() - 1));
    const int num_rows = static_cast<int>(rows.size());
    BATON_RETURN_IF_ERROR(ReserveLogitRows(num_rows, x.width()));
    const ScopedFlushDenormals flush;
    Norm(x, rows.data(), num_rows, weight, eps, logit_input_->input());
    GemmArgs args = Args(*logit_input_, num_rows, Packed(head), Epilogue::kStore);
    args.out = logits;
    args.out_stride = head.rows();
    const int panels = Packed(head).num_panels(), size = group_ != nullptr ? group_->size() : 1;
    const int rank = group_ != nullptr ? group_->rank() : 0;
    RunGemm(args, panels * (rank + 1) / size, panels * rank / size);
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    return group_ != nullptr ? group_->Barrier() : absl::OkStatus();
  }

  absl::StatusOr<std::vector<float>> Read(const Activation& activation,
                                          int num_tokens,
                                          int width) override {
    const CpuActivation& x = Const(activation);
    BATON_RETURN_IF_ERROR(CheckAtMost("read", "T", num_tokens, x.max_tokens()));
    BATON_RETURN_IF_ERROR(CheckEqual("read", "width", width, x.width()));
    std::vector<float> out(static_cast<size_t>(num_tokens) * width);
    for (int t = 0; t < num_tokens; ++t)
      x.ReadRow(t, kernels_, out.data() + static_cast<size_t>(t) * width);
    return out;
  }

 private:
  static absl::Status CheckTokens(absl::string_view what,
                                  int num_tokens,
                                  const CpuActivation& in,
                                  const CpuActivation& out) {
    BATON_RETURN_IF_ERROR(CheckAtMost(what, "T", num_tokens, in.max_tokens()));
    return CheckAtMost(what, "T", num_tokens, out.max_tokens());
  }

  static absl::Status CheckPacking(absl::string_view what, const Matrix& matrix, bool interleaved) {
    return CheckEqual(what, "interleave_half", Packed(matrix).interleaved(), interleaved);
  }

  static GemmArgs Args(const CpuActivation& x,
                       int num_tokens,
                       const CpuMatrix& w,
                       Epilogue epilogue) {
    return {.x = x.input(),
            .num_tokens = num_tokens,
            .w = w.weights(),
            .epilogue = epilogue,
            .num_rows = w.rows(),
            .bias = nullptr,
            .out = nullptr,
            .out_stride = 0,
            .input_out = {}};
  }

  Scratch ScratchOf(int thread) {
    ThreadScratch& scratch = scratch_[thread];
    return {.rows = reinterpret_cast<float*>(scratch.rows.data()),
            .attention = scratch.attention.data()};
  }

  // Room for an expanded row of `cols`; grows at load only.
  absl::Status ReserveScratch(int cols) {
    if (!kernels_.tiles) return absl::OkStatus();
    const size_t bytes = (static_cast<size_t>(cols) + 63) / 64 * 64 * sizeof(float);
    for (ThreadScratch& scratch : scratch_) {
      if (scratch.rows.size() >= bytes) continue;
      BATON_ASSIGN_OR_RETURN(scratch.rows, base::Buffer::Allocate(bytes));
    }
    return absl::OkStatus();
  }

  // Grows when more rows than ever before are asked for.
  absl::Status ReserveLogitRows(int num_rows, int width) {
    if (logit_input_ != nullptr && logit_input_->max_tokens() >= num_rows &&
        logit_input_->width() == width) {
      return absl::OkStatus();
    }
    BATON_ASSIGN_OR_RETURN(logit_input_, CpuActivation::Create(ActivationKind::kLinearInput, dtype_,
                                                               kernels_, num_rows, width));
    return absl::OkStatus();
  }

  // Pieces of work of one thread: small enough to even out, large enough to stream.
  int Grain(int count, int pieces_per_thread) const {
    return std::max(1, count / (pool_.num_threads() * pieces_per_thread));
  }
  int TokenGrain(int num_tokens) const { return std::max(4, Grain(num_tokens, 4)); }

  void RunGemm(const GemmArgs& args, int end_panel, int first_panel = 0) {
    const int num_panels = end_panel - first_panel;
    if (args.num_tokens == 0) return;
    const int64_t work = int64_t{args.num_tokens} * args.w.cols * num_panels * kPanelRows;
    const int grain = work < kParallelWork ? num_panels : Grain(num_panels, 8);
    pool_.ParallelFor(num_panels, grain, [&](int begin, int end, int thread) {
      kernels_.gemm(args, first_panel + begin, first_panel + end, ScratchOf(thread));
    });
  }

  void Norm(const CpuActivation& x,
            const int32_t* row_ids,
            int num_rows,
            absl::Span<const float> weight,
            float eps,
            const Input& out) {
    const NormArgs args = {.x = x.rows(),
                           .x_stride = x.stride(),
                           .row_ids = row_ids,
                           .weight = weight.data(),
                           .width = x.width(),
                           .eps = eps,
                           .out = out};
    pool_.ParallelFor(num_rows, TokenGrain(num_rows),
                      [&](int begin, int end, int) { kernels_.rms_norm(args, begin, end); });
  }

  // What the ranks show each other of activations of `max_tokens`.
  absl::Status ReserveExchange(ActivationKind kind, int max_tokens, int width) {
    if (kind == ActivationKind::kResidual) {
      BATON_ASSIGN_OR_RETURN(part_,
                             CpuActivation::Create(kind, dtype_, kernels_, max_tokens, width));
      BATON_ASSIGN_OR_RETURN(sum_,
                             CpuActivation::Create(kind, dtype_, kernels_, max_tokens, width));
    }
    const size_t tokens = std::max<size_t>(largest_.size(), max_tokens);
    largest_.resize(tokens);
    all_largest_.resize(tokens * group_->size());
    return absl::OkStatus();
  }

  // residual += the ranks' shares of x * W^T, rank 0's first.
  absl::Status AddOverRanks(const CpuActivation& x,
                            int num_tokens,
                            const CpuMatrix& weight,
                            const CpuActivation& residual) {
    BATON_RETURN_IF_ERROR(CheckAtMost("project add", "T", num_tokens, part_->max_tokens()));
    BATON_RETURN_IF_ERROR(CheckEqual("project add", "E", residual.width(), part_->width()));
    GemmArgs args = Args(x, num_tokens, weight, Epilogue::kStore);
    args.out = part_->rows();
    args.out_stride = part_->stride();
    RunGemm(args, weight.num_panels());
    const size_t count = num_tokens * part_->stride();
    BATON_RETURN_IF_ERROR(group_->AllReduceSum(part_->rows(), sum_->rows(), count));
    float* out = residual.rows();
    const float* sum = sum_->rows();
    for (size_t i = 0; i < count; ++i) out[i] = out[i] + sum[i];
    return absl::OkStatus();
  }

  // Rows that are this rank's shares of wider ones get the scales of those; groups of 32 have their
  // own.
  absl::Status QuantizeShare(const Input& input, int num_tokens) {
    if (!HasCodes(input)) return absl::OkStatus();
    const uint32_t* largest = nullptr;
    if (group_ != nullptr && input.format != InputFormat::kRowsGroups) {
      pool_.ParallelFor(num_tokens, TokenGrain(num_tokens), [&](int begin, int end, int) {
        kernels_.largest(input, begin, end, largest_.data());
      });
      BATON_RETURN_IF_ERROR(group_->AllGather(largest_.data(), all_largest_.data(), num_tokens));
      for (int t = 0; t < num_tokens; ++t) {
        largest_[t] = all_largest_[t];
        for (int rank = 1; rank < group_->size(); ++rank)
          largest_[t] = std::max(largest_[t], all_largest_[rank * num_tokens + t]);
      }
      largest = largest_.data();
    }
    pool_.ParallelFor(num_tokens, TokenGrain(num_tokens), [&](int begin, int end, int) {
      kernels_.quantize(input, largest, begin, end);
    });
    return absl::OkStatus();
  }

  const WeightDtype dtype_;
  const Kernels& kernels_;
  ThreadPool pool_;
  std::vector<ThreadScratch> scratch_;
  std::unique_ptr<CpuActivation> logit_input_;

  parallel::TpGroup* group_ = nullptr;           // null: one rank
  std::unique_ptr<CpuActivation> part_, sum_;    // of ProjectAdd, this rank's and all ranks'
  std::vector<uint32_t> largest_, all_largest_;  // by token; by rank and token
};

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateCpuBackend(WeightDtype dtype,
                                                          const BackendOptions& options) {
  BATON_RETURN_IF_ERROR(
      CheckAtMost("cpu backend", "num_threads", options.num_threads, kMaxThreads));
  BATON_ASSIGN_OR_RETURN(const Kernels* kernels, ChooseKernels(options.isa));
  const int num_threads =
      options.num_threads > 0 ? options.num_threads : std::min(kMaxThreads, NumUsableCpus());
  auto backend = std::make_unique<CpuBackend>(dtype, kernels, num_threads, options.pin_threads);
  BATON_RETURN_IF_ERROR(backend->Init());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace baton::ops::cpu
