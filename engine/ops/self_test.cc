#include "engine/ops/self_test.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "engine/ops/ref/ref_backend.h"

namespace baton::ops {
namespace {

constexpr int kHidden = 96, kFfn = 96, kVocab = 40, kHeads = 4, kKvHeads = 2, kDim = 32;
constexpr int kTokens = 5, kPositions = 8;
constexpr int kQkvWidth = (kHeads + 2 * kKvHeads) * kDim;
constexpr float kEps = 1e-6f;

// A fixed sequence of values in [-1, 1).
class Values {
 public:
  explicit Values(uint32_t seed) : state_(seed) {}
  float Next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state_) >> 8) / 8388608.0f;
  }
  std::vector<float> Vector(int n, float center) {
    std::vector<float> out(n);
    for (float& value : out) value = center + 0.5f * Next();
    return out;
  }

 private:
  uint32_t state_;
};

struct Result {
  const char* operation;
  std::vector<float> values;
};

// One layer on one backend.
class Layer {
 public:
  explicit Layer(Backend* backend) : backend_(*backend) {}

  absl::Status Init() {
    BATON_ASSIGN_OR_RETURN(table_, Weights(kVocab, kHidden, 1, false));
    BATON_ASSIGN_OR_RETURN(qkv_, Weights(kQkvWidth, kHidden, 2, false));
    BATON_ASSIGN_OR_RETURN(o_, Weights(kHidden, kHeads * kDim, 3, false));
    BATON_ASSIGN_OR_RETURN(gate_up_, Weights(2 * kFfn, kHidden, 4, true));
    BATON_ASSIGN_OR_RETURN(residual_,
                           backend_.NewActivation(ActivationKind::kResidual, kTokens, kHidden));
    BATON_ASSIGN_OR_RETURN(normed_,
                           backend_.NewActivation(ActivationKind::kLinearInput, kTokens, kHidden));
    BATON_ASSIGN_OR_RETURN(projected_,
                           backend_.NewActivation(ActivationKind::kProjected, kTokens, kQkvWidth));
    BATON_ASSIGN_OR_RETURN(
        attended_, backend_.NewActivation(ActivationKind::kLinearInput, kTokens, kHeads * kDim));
    BATON_ASSIGN_OR_RETURN(inner_,
                           backend_.NewActivation(ActivationKind::kLinearInput, kTokens, kFfn));
    pool_.assign(layout_.pool_bytes(), 0xff);
    return absl::OkStatus();
  }

  // Tokens [start, start + count) of one sequence.
  absl::Status Step(int start, int count, std::vector<Result>* results) {
    std::vector<int32_t> ids, positions, rows;
    std::vector<int64_t> slots;
    for (int t = 0; t < count; ++t) {
      ids.push_back((start + t) * 7 % kVocab);
      positions.push_back(start + t);
      slots.push_back(kv::kBlockTokens + start + t);
      rows.push_back(t);
    }
    const std::vector<kv::BlockId> blocks = {1};
    const SequenceView view = {
        .query_start = 0, .query_len = count, .context_len = start + count, .block_table = blocks};
    const KvCacheView cache = {.layout = &layout_, .layer_base = pool_.data(), .scales = scales_};
    BATON_RETURN_IF_ERROR(backend_.Embed(*table_, ids, residual_.get()));
    BATON_RETURN_IF_ERROR(backend_.RmsNorm(*residual_, count, norm_, kEps, normed_.get()));
    BATON_RETURN_IF_ERROR(Keep("RmsNorm", *normed_, count, kHidden, results));
    BATON_RETURN_IF_ERROR(backend_.QkvProject(*normed_, count, *qkv_, {}, projected_.get()));
    BATON_RETURN_IF_ERROR(Keep("QkvProject", *projected_, count, kQkvWidth, results));
    BATON_RETURN_IF_ERROR(backend_.QkNormRopeAppend({.qkv = projected_.get(),
                                                     .num_tokens = count,
                                                     .num_heads = kHeads,
                                                     .num_kv_heads = kKvHeads,
                                                     .head_dim = kDim,
                                                     .q_weight = head_norm_,
                                                     .k_weight = head_norm_,
                                                     .eps = kEps,
                                                     .positions = positions,
                                                     .slots = slots,
                                                     .rope = rope_,
                                                     .cache = cache}));
    results->push_back({"QkNormRopeAppend", std::vector<float>(pool_.begin(), pool_.end())});
    BATON_RETURN_IF_ERROR(backend_.PagedAttention({.qkv = projected_.get(),
                                                   .num_tokens = count,
                                                   .num_heads = kHeads,
                                                   .num_kv_heads = kKvHeads,
                                                   .head_dim = kDim,
                                                   .softmax_scale = 0.17677669f,
                                                   .sequences = absl::MakeConstSpan(&view, 1),
                                                   .cache = cache,
                                                   .out = attended_.get()}));
    BATON_RETURN_IF_ERROR(Keep("PagedAttention", *attended_, count, kHeads * kDim, results));
    BATON_RETURN_IF_ERROR(backend_.ProjectAdd(*attended_, count, *o_, residual_.get()));
    BATON_RETURN_IF_ERROR(Keep("ProjectAdd", *residual_, count, kHidden, results));
    BATON_RETURN_IF_ERROR(backend_.GateUpSilu(*normed_, count, *gate_up_, inner_.get()));
    BATON_RETURN_IF_ERROR(Keep("GateUpSilu", *inner_, count, kFfn, results));
    std::vector<float> logits(static_cast<size_t>(count) * kVocab);
    BATON_RETURN_IF_ERROR(backend_.Logits(*residual_, rows, norm_, kEps, *table_, logits.data()));
    results->push_back({"Logits", std::move(logits)});
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<std::unique_ptr<Matrix>> Weights(int rows,
                                                  int cols,
                                                  uint32_t seed,
                                                  bool interleave_half) {
    const MatrixSource source = {.rows = rows, .cols = cols, .read_row = [=](int row, float* out) {
                                   Values values(seed * 1000003u + row);
                                   for (int k = 0; k < cols; ++k) out[k] = 0.2f * values.Next();
                                 }};
    return backend_.Pack(source, interleave_half);
  }

  absl::Status Keep(const char* operation,
                    const Activation& activation,
                    int count,
                    int width,
                    std::vector<Result>* results) {
    BATON_ASSIGN_OR_RETURN(std::vector<float> values, backend_.Read(activation, count, width));
    results->push_back({operation, std::move(values)});
    return absl::OkStatus();
  }

  Backend& backend_;
  const kv::KvLayout layout_ = {.num_layers = 1,
                                .num_kv_heads = kKvHeads,
                                .head_dim = kDim,
                                .num_blocks = 2,
                                .format = kv::KvFormat::kFp8};
  const std::vector<float> norm_ = Values(11).Vector(kHidden, 1.0f),
                           head_norm_ = Values(12).Vector(kDim, 1.0f);
  const std::vector<float> rope_ = Values(13).Vector(kPositions * kDim, 0.5f),
                           scales_ = std::vector<float>(2 * kKvHeads, 0.0625f);
  std::vector<uint8_t> pool_;
  std::unique_ptr<Matrix> table_, qkv_, o_, gate_up_;
  std::unique_ptr<Activation> residual_, normed_, projected_, attended_, inner_;
};

absl::Status RunLayer(Backend* backend, std::vector<Result>* results) {
  Layer layer(backend);
  BATON_RETURN_IF_ERROR(layer.Init());
  BATON_RETURN_IF_ERROR(layer.Step(0, kTokens, results));
  return layer.Step(kTokens, 1, results);
}

}  // namespace

absl::Status CompareWithRef(Backend* backend) {
  const std::unique_ptr<Backend> ref = CreateRefBackend(backend->weight_dtype());
  std::vector<Result> expected, got;
  BATON_RETURN_IF_ERROR(RunLayer(ref.get(), &expected));
  BATON_RETURN_IF_ERROR(RunLayer(backend, &got));
  for (size_t i = 0; i < expected.size(); ++i) {
    const std::vector<float>&want = expected[i].values, &have = got[i].values;
    if (want.size() == have.size() &&
        std::memcmp(want.data(), have.data(), want.size() * sizeof(float)) == 0)
      continue;
    return absl::InternalError(absl::StrCat(
        "self-test of backend \"", backend->description(), "\": ", expected[i].operation,
        " differs from ref: this build or this CPU computes wrongly"));
  }
  return absl::OkStatus();
}

}  // namespace baton::ops
