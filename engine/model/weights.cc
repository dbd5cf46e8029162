#include "engine/model/weights.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::model {
namespace {

// Says how far a load is, once per tenth, and nothing where all of it takes less than a second.
class Progress {
 public:
  explicit Progress(int64_t total)
      : total_(total), start_(base::Clock::Real().Now()), last_(start_) {}

  void Add(int64_t count) {
    done_ += count;
    const int64_t tenth = done_ * 10 / total_;
    const absl::Duration now = base::Clock::Real().Now();
    if (tenth == logged_tenth_ || now - last_ < absl::Seconds(1)) return;
    logged_tenth_ = tenth;
    last_ = now;
    BATON_LOG(Info, "load weights done_percent=", tenth * 10,
              " elapsed_s=", static_cast<int64_t>(absl::ToDoubleSeconds(now - start_)));
  }

 private:
  int64_t total_;
  int64_t done_ = 0;
  int64_t logged_tenth_ = 0;
  absl::Duration start_;
  absl::Duration last_;
};

// Several matrices of one layer with the same number of columns, one below the other; of each the
// rank's share of rows or columns.
class StackedSource {
 public:
  StackedSource(const Checkpoint& checkpoint,
                const ShardPlan& shard,
                int layer,
                const std::vector<TensorRole>& roles)
      : checkpoint_(checkpoint),
        layer_(layer),
        whole_cols_(checkpoint.shape(roles.front(), layer).cols),
        cols_(shard.ColsOf(roles.front(), whole_cols_)) {
    for (const TensorRole role : roles) {
      parts_.push_back({role, shard.RowsOf(role, checkpoint_.shape(role, layer_).rows)});
      rows_ += parts_.back().rows.size();
    }
  }

  // Borrows this object.
  ops::MatrixSource AsMatrixSource() const {
    ops::MatrixSource source;
    source.rows = static_cast<int>(rows_);
    source.cols = static_cast<int>(cols_.size());
    source.whole_cols = static_cast<int>(whole_cols_);
    source.first_col = static_cast<int>(cols_.begin);
    source.read_row = [this](int row, float* out) {
      const Place place = Find(row);
      checkpoint_.ReadRow(place.role, layer_, place.row, out);
    };
    source.read_row_q4 = [this](int row, uint8_t* codes, float* scales, float* mins) {
      const Place place = Find(row);
      return checkpoint_.ReadRowQ4(place.role, layer_, place.row, codes, scales, mins);
    };
    return source;
  }

  int64_t num_values() const { return rows_ * cols_.size(); }
  std::string Name() const {
    return absl::StrCat("layer=", layer_, " tensor=", NameOf(parts_.front().role));
  }

 private:
  struct Part {
    TensorRole role;
    ShardRange rows;
  };
  struct Place {
    TensorRole role;
    int64_t row;
  };

  Place Find(int64_t row) const {
    for (const Part& part : parts_) {
      if (row < part.rows.size()) return {part.role, part.rows.begin + row};
      row -= part.rows.size();
    }
    BATON_CHECK(false, "row beyond the matrix");
    return {};
  }

  const Checkpoint& checkpoint_;
  int layer_;
  int64_t whole_cols_;
  ShardRange cols_;
  std::vector<Part> parts_;
  int64_t rows_ = 0;
};

class Loader {
 public:
  Loader(const Checkpoint& checkpoint, const ShardPlan& shard, ops::Backend& backend)
      : checkpoint_(checkpoint),
        shard_(shard),
        backend_(backend),
        progress_(NumValues(checkpoint, shard)) {}

  absl::StatusOr<Weights> Load() {
    Weights weights;
    if (shard_.rank == 0) {
      BATON_ASSIGN_OR_RETURN(weights.embed, Pack(0, {TensorRole::kEmbed}));
      if (!checkpoint_.config().tied_head) {
        BATON_ASSIGN_OR_RETURN(weights.head, Pack(0, {TensorRole::kHead}));
      }
    }
    weights.final_norm = Vector(TensorRole::kFinalNorm, 0);
    for (int layer = 0; layer < checkpoint_.config().num_layers; ++layer) {
      BATON_ASSIGN_OR_RETURN(LayerWeights packed, LoadLayer(layer));
      weights.layers.push_back(std::move(packed));
    }
    return weights;
  }

 private:
  static int64_t NumValues(const Checkpoint& checkpoint, const ShardPlan& shard) {
    const ModelConfig c = shard.ConfigOf(checkpoint.config());
    const int64_t qkv = int64_t{c.num_heads + 2 * c.num_kv_heads} * c.head_dim;
    const int64_t o = int64_t{c.num_heads} * c.head_dim;
    const int64_t layer = (qkv + o + int64_t{3} * c.ffn) * c.hidden;
    return layer * c.num_layers + int64_t{c.vocab} * c.hidden * (c.tied_head ? 1 : 2);
  }

  absl::StatusOr<LayerWeights> LoadLayer(int layer) {
    LayerWeights weights;
    weights.attn_norm = Vector(TensorRole::kAttnNorm, layer);
    weights.ffn_norm = Vector(TensorRole::kFfnNorm, layer);
    weights.q_norm = Vector(TensorRole::kQNorm, layer);
    weights.k_norm = Vector(TensorRole::kKNorm, layer);
    weights.qkv_bias = QkvBias(layer);
    BATON_ASSIGN_OR_RETURN(weights.qkv,
                           Pack(layer, {TensorRole::kQ, TensorRole::kK, TensorRole::kV}));
    BATON_ASSIGN_OR_RETURN(weights.o, Pack(layer, {TensorRole::kO}));
    BATON_ASSIGN_OR_RETURN(weights.gate_up, Pack(layer, {TensorRole::kGate, TensorRole::kUp}));
    BATON_ASSIGN_OR_RETURN(weights.down, Pack(layer, {TensorRole::kDown}));
    return weights;
  }

  // Empty where the checkpoint has none.
  std::vector<float> Vector(TensorRole role, int layer) const {
    if (!checkpoint_.Has(role, layer)) return {};
    std::vector<float> values(checkpoint_.shape(role, layer).cols);
    checkpoint_.ReadRow(role, layer, 0, values.data());
    return values;
  }

  std::vector<float> QkvBias(int layer) const {
    std::vector<float> bias;
    for (const TensorRole role : {TensorRole::kQBias, TensorRole::kKBias, TensorRole::kVBias}) {
      const std::vector<float> all = Vector(role, layer);
      const ShardRange ours = shard_.RowsOf(role, static_cast<int64_t>(all.size()));
      if (!all.empty()) bias.insert(bias.end(), all.begin() + ours.begin, all.begin() + ours.end);
    }
    return bias;
  }

  absl::StatusOr<std::unique_ptr<ops::Matrix>> Pack(int layer,
                                                    const std::vector<TensorRole>& roles) {
    const bool interleave_half = roles.front() == TensorRole::kGate;
    const StackedSource source(checkpoint_, shard_, layer, roles);
    absl::StatusOr<std::unique_ptr<ops::Matrix>> matrix =
        backend_.Pack(source.AsMatrixSource(), interleave_half);
    if (!matrix.ok())
      return Annotate(matrix.status(), absl::StrCat(checkpoint_.path(), ": ", source.Name()));
    if (shard_.rank == 0) progress_.Add(source.num_values());
    return matrix;
  }

  const Checkpoint& checkpoint_;
  const ShardPlan& shard_;
  ops::Backend& backend_;
  Progress progress_;
};

}  // namespace

size_t Weights::bytes() const {
  return layer_bytes() + embed->bytes() + (head != nullptr ? head->bytes() : 0);
}

size_t Weights::layer_bytes() const {
  size_t total = 0;
  for (const LayerWeights& layer : layers) {
    total += layer.qkv->bytes() + layer.o->bytes() + layer.gate_up->bytes() + layer.down->bytes();
  }
  return total;
}

absl::StatusOr<ops::WeightDtype> ResolveWeightDtype(const Checkpoint& checkpoint,
                                                    absl::string_view requested) {
  if (requested != "auto") return ops::ParseWeightDtype(requested);
  switch (checkpoint.main_format()) {
    case base::WeightFormat::kF32:
    case base::WeightFormat::kF16:
    case base::WeightFormat::kBf16:
      return ops::WeightDtype::kBf16;
    case base::WeightFormat::kQ8_0:
    case base::WeightFormat::kQ6_K:
      return ops::WeightDtype::kInt8;
    case base::WeightFormat::kQ4_0:
    case base::WeightFormat::kQ4_1:
    case base::WeightFormat::kQ4_K:
      return ops::WeightDtype::kQ4;
  }
  return absl::InternalError("weight format without a dtype");
}

absl::StatusOr<Weights> LoadWeights(const Checkpoint& checkpoint,
                                    const ShardPlan& shard,
                                    ops::Backend& backend) {
  return Loader(checkpoint, shard, backend).Load();
}

}  // namespace baton::model
