#include "engine/ops/ref/ref_backend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/ops/canonical_math.h"
#include "engine/ops/flush_denormals.h"
#include "engine/ops/quantize.h"
#include "engine/ops/ref/ref_attention.h"
#include "engine/ops/ref/ref_tensors.h"
#include "engine/ops/validate.h"

namespace baton::ops {
namespace {

RefActivation& Mutable(Activation* activation) { return static_cast<RefActivation&>(*activation); }
const RefActivation& Const(const Activation& activation) {
  return static_cast<const RefActivation&>(activation);
}
const RefMatrix& Weights(const Matrix& matrix) { return static_cast<const RefMatrix&>(matrix); }

void NormRow(const float* x, absl::Span<const float> weight, float eps, float* out) {
  const int n = static_cast<int>(weight.size());
  float lanes[16] = {};
  for (int i = 0; i < n; ++i) lanes[i % 16] = std::fma(x[i], x[i], lanes[i % 16]);
  const float scale = RmsScale(ReduceLanes16(lanes), n, eps);
  for (int i = 0; i < n; ++i) out[i] = (x[i] * scale) * weight[i];
}

class RefBackend : public Backend {
 public:
  explicit RefBackend(WeightDtype dtype) : dtype_(dtype) {}

  absl::string_view name() const override { return "ref"; }
  std::string description() const override { return "ref"; }
  WeightDtype weight_dtype() const override { return dtype_; }

  absl::StatusOr<std::unique_ptr<Matrix>> Pack(const MatrixSource& source,
                                               bool interleave_half) override {
    BATON_RETURN_IF_ERROR(CheckPack(source, dtype_, interleave_half));
    const ScopedFlushDenormals flush;
    auto matrix = std::make_unique<RefMatrix>();
    matrix->num_rows = source.rows;
    matrix->num_cols = source.cols;
    matrix->dtype = dtype_;
    std::vector<float> row(source.source_cols());
    for (int r = 0; r < source.rows; ++r) PackRow(source, r, &row, matrix.get());
    return std::unique_ptr<Matrix>(std::move(matrix));
  }

  absl::StatusOr<std::unique_ptr<Activation>> NewActivation(ActivationKind kind,
                                                            int max_tokens,
                                                            int width) override {
    BATON_RETURN_IF_ERROR(CheckAtMost("activation", "max_tokens", max_tokens, int64_t{1} << 24));
    BATON_RETURN_IF_ERROR(CheckAtMost("activation", "width", width, int64_t{1} << 24));
    auto activation = std::make_unique<RefActivation>();
    activation->kind = kind;
    activation->dtype = kind == ActivationKind::kLinearInput ? dtype_ : WeightDtype::kF32;
    activation->max_tokens = max_tokens;
    activation->width = width;
    const size_t size = static_cast<size_t>(max_tokens) * width;
    activation->values.resize(size);
    if (activation->dtype == WeightDtype::kInt8) {
      activation->codes.resize(size);
      activation->scales.resize(max_tokens);
    } else if (activation->dtype == WeightDtype::kQ4) {
      activation->codes.resize(size);
      activation->scales.resize(static_cast<size_t>(max_tokens) * activation->num_groups());
      activation->sums.resize(activation->scales.size());
    }
    return std::unique_ptr<Activation>(std::move(activation));
  }

  absl::Status JoinGroup(parallel::TpGroup* group) override {
    group_ = group;
    return absl::OkStatus();
  }

  absl::Status Embed(const Matrix& table,
                     absl::Span<const int32_t> ids,
                     Activation* residual) override {
    RefActivation& out = Mutable(residual);
    const RefMatrix& w = Weights(table);
    BATON_RETURN_IF_ERROR(CheckAtMost("embed", "T", ids.size(), out.max_tokens));
    BATON_RETURN_IF_ERROR(CheckEqual("embed", "E", w.num_cols, out.width));
    BATON_RETURN_IF_ERROR(CheckIds(ids, w.num_rows));
    const ScopedFlushDenormals flush;
    for (size_t t = 0; t < ids.size(); ++t) {
      for (int i = 0; i < out.width; ++i) out.row(t)[i] = w.At(ids[t], i);
    }
    return absl::OkStatus();
  }

  absl::Status RmsNorm(const Activation& residual,
                       int num_tokens,
                       absl::Span<const float> weight,
                       float eps,
                       Activation* out) override {
    const RefActivation& x = Const(residual);
    RefActivation& y = Mutable(out);
    BATON_RETURN_IF_ERROR(CheckTokens("rms norm", num_tokens, x, y));
    BATON_RETURN_IF_ERROR(CheckEqual("rms norm", "weight", weight.size(), x.width));
    BATON_RETURN_IF_ERROR(CheckEqual("rms norm", "out E", y.width, x.width));
    const ScopedFlushDenormals flush;
    for (int t = 0; t < num_tokens; ++t) {
      NormRow(x.row(t), weight, eps, y.row(t));
      y.FinishLinearInput(t);
    }
    return absl::OkStatus();
  }

  absl::Status QkvProject(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          absl::Span<const float> bias,
                          Activation* qkv) override {
    const RefActivation& in = Const(x);
    const RefMatrix& w = Weights(weight);
    RefActivation& out = Mutable(qkv);
    BATON_RETURN_IF_ERROR(CheckTokens("qkv project", num_tokens, in, out));
    BATON_RETURN_IF_ERROR(CheckEqual("qkv project", "K", w.num_cols, in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("qkv project", "rows", w.num_rows, out.width));
    if (!bias.empty())
      BATON_RETURN_IF_ERROR(CheckEqual("qkv project", "bias", bias.size(), w.num_rows));
    const ScopedFlushDenormals flush;
    for (int t = 0; t < num_tokens; ++t) {
      for (int r = 0; r < w.num_rows; ++r) {
        const float sum = Dot(in, t, w, r, 0, w.num_cols);
        out.row(t)[r] = bias.empty() ? sum : sum + bias[r];
      }
    }
    return absl::OkStatus();
  }

  absl::Status QkNormRopeAppend(const QkNormRopeAppendArgs& args) override {
    const RefActivation& qkv = Mutable(args.qkv);
    BATON_RETURN_IF_ERROR(CheckQkNormRopeAppend(args, qkv.max_tokens, qkv.width));
    const ScopedFlushDenormals flush;
    RefQkNormRopeAppend(args);
    return absl::OkStatus();
  }

  absl::Status PagedAttention(const PagedAttentionArgs& args) override {
    RefActivation& out = Mutable(args.out);
    BATON_RETURN_IF_ERROR(
        CheckPagedAttention(args, out.max_tokens, Const(*args.qkv).width, out.width));
    const ScopedFlushDenormals flush;
    RefPagedAttention(args);
    return ShareScales(args.num_tokens, &out);
  }

  absl::Status ProjectAdd(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* residual) override {
    const RefActivation& in = Const(x);
    const RefMatrix& w = Weights(weight);
    RefActivation& out = Mutable(residual);
    BATON_RETURN_IF_ERROR(CheckTokens("project add", num_tokens, in, out));
    BATON_RETURN_IF_ERROR(CheckEqual("project add", "K", w.num_cols, in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("project add", "E", w.num_rows, out.width));
    const ScopedFlushDenormals flush;
    if (group_ != nullptr) return AddOverRanks(in, num_tokens, w, &out);
    const int cut = SplitK(w.num_cols, dtype_);
    for (int t = 0; t < num_tokens; ++t) {
      for (int r = 0; r < w.num_rows; ++r) {
        const float low = Dot(in, t, w, r, 0, cut);
        const float high = Dot(in, t, w, r, cut, w.num_cols);
        out.row(t)[r] += low + high;
      }
    }
    return absl::OkStatus();
  }

  absl::Status GateUpSilu(const Activation& x,
                          int num_tokens,
                          const Matrix& weight,
                          Activation* out) override {
    const RefActivation& in = Const(x);
    const RefMatrix& w = Weights(weight);
    RefActivation& y = Mutable(out);
    BATON_RETURN_IF_ERROR(CheckTokens("gate up", num_tokens, in, y));
    BATON_RETURN_IF_ERROR(CheckEqual("gate up", "K", w.num_cols, in.width));
    BATON_RETURN_IF_ERROR(CheckEqual("gate up", "rows", w.num_rows, 2 * int64_t{y.width}));
    const ScopedFlushDenormals flush;
    for (int t = 0; t < num_tokens; ++t) {
      for (int r = 0; r < y.width; ++r) {
        const float gate = Dot(in, t, w, r, 0, w.num_cols);
        const float up = Dot(in, t, w, r + y.width, 0, w.num_cols);
        y.row(t)[r] = CanonicalSilu(gate) * up;
      }
      y.FinishLinearInput(t);
    }
    return ShareScales(num_tokens, &y);
  }

  absl::Status Logits(const Activation& residual,
                      absl::Span<const int32_t> rows,
                      absl::Span<const float> weight,
                      float eps,
                      const Matrix& head,
                      float* logits) override {
    const RefActivation& x = Const(residual);
    const RefMatrix& w = Weights(head);
    BATON_RETURN_IF_ERROR(CheckEqual("logits", "weight", weight.size(), x.width));
    BATON_RETURN_IF_ERROR(CheckEqual("logits", "head E", w.num_cols, x.width));
    for (const int32_t row : rows)
      BATON_RETURN_IF_ERROR(CheckAtMost("logits", "row", row, x.max_tokens - 1));
    const ScopedFlushDenormals flush;
    BATON_ASSIGN_OR_RETURN(std::unique_ptr<Activation> normed,
                           NewActivation(ActivationKind::kLinearInput, 1, x.width));
    RefActivation& y = Mutable(normed.get());
    for (size_t r = 0; r < rows.size(); ++r) {
      NormRow(x.row(rows[r]), weight, eps, y.row(0));
      y.FinishLinearInput(0);
      for (int v = ShareBegin(w.num_rows, 0); v < ShareBegin(w.num_rows, 1); ++v)
        logits[r * w.num_rows + v] = Dot(y, 0, w, v, 0, w.num_cols);
    }
    return absl::OkStatus();
  }

  absl::Status Synchronize() override {
    return group_ != nullptr ? group_->Barrier() : absl::OkStatus();
  }

  absl::StatusOr<std::vector<float>> Read(const Activation& activation,
                                          int num_tokens,
                                          int width) override {
    const RefActivation& x = Const(activation);
    BATON_RETURN_IF_ERROR(CheckAtMost("read", "T", num_tokens, x.max_tokens));
    BATON_RETURN_IF_ERROR(CheckEqual("read", "width", width, x.width));
    std::vector<float> out;
    out.reserve(static_cast<size_t>(num_tokens) * width);
    const ScopedFlushDenormals flush;
    for (int t = 0; t < num_tokens; ++t) {
      for (int i = 0; i < width; ++i) out.push_back(x.At(t, i));
    }
    return out;
  }

 private:
  static absl::Status CheckTokens(absl::string_view what,
                                  int num_tokens,
                                  const RefActivation& in,
                                  const RefActivation& out) {
    BATON_RETURN_IF_ERROR(CheckAtMost(what, "T", num_tokens, in.max_tokens));
    return CheckAtMost(what, "T", num_tokens, out.max_tokens);
  }

  // Of `count`, where this rank's share begins (next = 0) or the next one's.
  int ShareBegin(int count, int next) const {
    if (group_ == nullptr) return next * count;
    return static_cast<int>(int64_t{count} * (group_->rank() + next) / group_->size());
  }

  // The rows of `out` are shares of wider ones, which have one scale.
  absl::Status ShareScales(int num_tokens, RefActivation* out) {
    if (group_ == nullptr || dtype_ != WeightDtype::kInt8) return absl::OkStatus();
    std::vector<uint32_t> ours(num_tokens), all(ours.size() * group_->size());
    for (int t = 0; t < num_tokens; ++t) ours[t] = out->LargestOf(t);
    BATON_RETURN_IF_ERROR(group_->AllGather(ours.data(), all.data(), ours.size()));
    for (int t = 0; t < num_tokens; ++t) {
      uint32_t largest = 0;
      for (size_t i = t; i < all.size(); i += ours.size()) largest = std::max(largest, all[i]);
      out->FinishLinearInput(t, largest);
    }
    return absl::OkStatus();
  }

  absl::Status AddOverRanks(const RefActivation& in,
                            int num_tokens,
                            const RefMatrix& w,
                            RefActivation* residual) {
    std::vector<float> part(static_cast<size_t>(num_tokens) * w.num_rows), sum(part.size());
    for (int t = 0; t < num_tokens; ++t) {
      for (int r = 0; r < w.num_rows; ++r)
        part[static_cast<size_t>(t) * w.num_rows + r] = Dot(in, t, w, r, 0, w.num_cols);
    }
    BATON_RETURN_IF_ERROR(group_->AllReduceSum(part.data(), sum.data(), part.size()));
    for (size_t i = 0; i < sum.size(); ++i) residual->values[i] += sum[i];
    return absl::OkStatus();
  }

  void PackRow(const MatrixSource& source,
               int r,
               std::vector<float>* row,
               RefMatrix* matrix) const {
    if (dtype_ == WeightDtype::kQ4) {
      PackRowQ4(source, r, row, matrix);
      return;
    }
    source.read_row(r, row->data());
    const float* values = row->data() + source.first_col;
    if (dtype_ == WeightDtype::kF32) {
      matrix->f32.insert(matrix->f32.end(), values, values + source.cols);
    } else if (dtype_ == WeightDtype::kBf16) {
      for (int k = 0; k < source.cols; ++k) matrix->bf16.push_back(base::Bf16FromFloat(values[k]));
    } else {
      const size_t offset = matrix->codes.size();
      matrix->codes.resize(offset + source.cols);
      const uint32_t largest = LargestMagnitudeBits(row->data(), source.source_cols());
      matrix->scales.push_back(
          QuantizeRowInt8(values, source.cols, largest, matrix->codes.data() + offset));
    }
  }

  static void PackRowQ4(const MatrixSource& source,
                        int r,
                        std::vector<float>* row,
                        RefMatrix* matrix) {
    const int cols = source.source_cols();
    std::vector<uint8_t> codes(cols);
    std::vector<float> scales(cols / kQ4Group), minimums(cols / kQ4Group);
    if (!source.read_row_q4 ||
        !source.read_row_q4(r, codes.data(), scales.data(), minimums.data())) {
      source.read_row(r, row->data());
      QuantizeRowQ4(row->data(), cols, codes.data(), scales.data(), minimums.data());
    }
    const int first = source.first_col / kQ4Group, end = first + source.cols / kQ4Group;
    for (int k = first * kQ4Group; k < end * kQ4Group; ++k)
      matrix->codes.push_back(static_cast<int8_t>(codes[k] & 15));
    matrix->scales.insert(matrix->scales.end(), scales.begin() + first, scales.begin() + end);
    matrix->minimums.insert(matrix->minimums.end(), minimums.begin() + first,
                            minimums.begin() + end);
  }

  const WeightDtype dtype_;
  parallel::TpGroup* group_ = nullptr;  // null: one rank
};

}  // namespace

std::unique_ptr<Backend> CreateRefBackend(WeightDtype dtype) {
  return std::make_unique<RefBackend>(dtype);
}

}  // namespace baton::ops
