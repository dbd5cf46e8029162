#include "engine/model/weights.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/fp8.h"
#include "engine/base/log.h"
#include "engine/base/parallel_for.h"
#include "engine/base/status_macros.h"
#include "engine/ops/quantize.h"

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

// The rows of a matrix in e4m3: as stored, or rounded with a scale for each square block, which is
// that of the whole matrix whatever part of it a rank has.
class Fp8Rows {
 public:
  Fp8Rows(const Checkpoint& checkpoint, TensorRole role, int layer)
      : checkpoint_(checkpoint),
        role_(role),
        layer_(layer),
        shape_(checkpoint.shape(role, layer)),
        blocks_across_((shape_.cols + kFp8Block - 1) / kFp8Block),
        stored_(checkpoint.format(role, layer) == base::WeightFormat::kF8E4m3) {}

  void ReadCodes(int64_t row, uint8_t* codes, float* scales) const {
    if (checkpoint_.ReadRowFp8(role_, layer_, row, codes, scales)) return;
    std::call_once(scales_chosen_, [this] { ChooseScales(); });
    std::vector<float> values(shape_.cols);
    checkpoint_.ReadRow(role_, layer_, row, values.data());
    const float* of_row = &scales_[row / kFp8Block * blocks_across_];
    for (int64_t block = 0; block < blocks_across_; ++block) {
      scales[block] = of_row[block];
      ops::QuantizeFp8(&values[block * kFp8Block], Width(block), of_row[block],
                       codes + block * kFp8Block);
    }
  }

  void Read(int64_t row, float* out) const {
    if (stored_) return checkpoint_.ReadRow(role_, layer_, row, out);
    std::vector<uint8_t> codes(shape_.cols);
    std::vector<float> scales(blocks_across_);
    ReadCodes(row, codes.data(), scales.data());
    for (int64_t i = 0; i < shape_.cols; ++i)
      out[i] = base::FloatFromFp8(codes[i]) * scales[i / kFp8Block];
  }

 private:
  int Width(int64_t block) const {
    return static_cast<int>(std::min(kFp8Block, shape_.cols - block * kFp8Block));
  }

  void ChooseScales() const {
    const int64_t blocks_down = (shape_.rows + kFp8Block - 1) / kFp8Block;
    scales_.resize(blocks_down * blocks_across_);
    base::ParallelFor(blocks_down, [&](int64_t block) { ChooseScales(block); });
  }

  void ChooseScales(int64_t block_row) const {
    std::vector<uint32_t> largest(blocks_across_);
    std::vector<float> values(shape_.cols);
    const int64_t end = std::min(shape_.rows, (block_row + 1) * kFp8Block);
    for (int64_t row = block_row * kFp8Block; row < end; ++row) {
      checkpoint_.ReadRow(role_, layer_, row, values.data());
      for (int64_t block = 0; block < blocks_across_; ++block) {
        largest[block] = std::max(
            largest[block], ops::LargestMagnitudeBits(&values[block * kFp8Block], Width(block)));
      }
    }
    for (int64_t block = 0; block < blocks_across_; ++block)
      scales_[block_row * blocks_across_ + block] = ops::Fp8BlockScale(largest[block]);
  }

  const Checkpoint& checkpoint_;
  const TensorRole role_;
  const int layer_;
  const Shape shape_;
  const int64_t blocks_across_;
  const bool stored_;
  // [blocks down][blocks across], where not stored; chosen when the first row is read, which a
  // device that makes its weights itself never does.
  mutable std::once_flag scales_chosen_;
  mutable std::vector<float> scales_;
};

// Several matrices of one layer with the same number of columns, one below the other; of each the
// rank's share of rows or columns.
class StackedSource {
 public:
  StackedSource(const Checkpoint& checkpoint,
                const ShardPlan& shard,
                int layer,
                const std::vector<TensorRole>& roles,
                bool fp8)
      : checkpoint_(checkpoint),
        layer_(layer),
        fp8_(fp8),
        whole_cols_(checkpoint.shape(roles.front(), layer).cols),
        cols_(shard.ColsOf(roles.front(), whole_cols_)) {
    for (const TensorRole role : roles) {
      parts_.push_back({role, shard.RowsOf(role, checkpoint_.shape(role, layer_).rows)});
      rows_ += parts_.back().rows.size();
      if (fp8_) parts_.back().fp8 = std::make_unique<Fp8Rows>(checkpoint_, role, layer_);
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
      if (fp8_) return place.part->fp8->Read(place.row, out);
      checkpoint_.ReadRow(place.part->role, layer_, place.row, out);
    };
    source.in_fp8 = fp8_;
    for (const Part& part : parts_) {
      ops::MatrixSource::MadeRows made;
      if (!checkpoint_.MadeUp(part.role, layer_, &made.seed, &made.std)) break;
      made.rows = static_cast<int>(part.rows.size());
      made.first_row = part.rows.begin;
      source.made.push_back(made);
    }
    if (fp8_ && BlocksLineUp()) {
      source.read_row_fp8 = [this](int row, uint8_t* codes, float* scales) {
        const Place place = Find(row);
        place.part->fp8->ReadCodes(place.row, codes, scales);
      };
    }
    source.read_row_q4 = [this](int row, uint8_t* codes, float* scales, float* mins) {
      const Place place = Find(row);
      return checkpoint_.ReadRowQ4(place.part->role, layer_, place.row, codes, scales, mins);
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
    std::unique_ptr<Fp8Rows> fp8;  // null: as stored
  };
  struct Place {
    const Part* part;
    int64_t row;
  };

  // Whether blocks of the tensors are blocks of the stacked matrix too.
  bool BlocksLineUp() const {
    int64_t first = 0;
    for (const Part& part : parts_) {
      if (first % kFp8Block != 0 || part.rows.begin % kFp8Block != 0) return false;
      first += part.rows.size();
    }
    return cols_.begin % kFp8Block == 0;
  }

  Place Find(int64_t row) const {
    for (const Part& part : parts_) {
      if (row < part.rows.size()) return {&part, part.rows.begin + row};
      row -= part.rows.size();
    }
    BATON_CHECK(false, "row beyond the matrix");
    return {};
  }

  const Checkpoint& checkpoint_;
  int layer_;
  bool fp8_;
  int64_t whole_cols_;
  ShardRange cols_;
  std::vector<Part> parts_;
  int64_t rows_ = 0;
};

class Loader {
 public:
  Loader(const Checkpoint& checkpoint,
         const ShardPlan& shard,
         ops::WeightDtype dtype,
         ops::Backend& backend)
      : checkpoint_(checkpoint),
        shard_(shard),
        fp8_(dtype == ops::WeightDtype::kFp8),
        backend_(backend),
        progress_(NumValues(checkpoint, shard)) {}

  absl::StatusOr<Weights> Load() {
    Weights weights;
    if (shard_.rank == 0 || !backend_.matrices_are_shared()) {
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
    const bool fp8 = fp8_ && IsPerLayer(roles.front());  // not embedding and head
    const StackedSource source(checkpoint_, shard_, layer, roles, fp8);
    absl::StatusOr<std::unique_ptr<ops::Matrix>> matrix =
        backend_.Pack(source.AsMatrixSource(), interleave_half);
    if (!matrix.ok())
      return Annotate(matrix.status(), absl::StrCat(checkpoint_.path(), ": ", source.Name()));
    if (shard_.rank == 0) progress_.Add(source.num_values());
    return matrix;
  }

  const Checkpoint& checkpoint_;
  const ShardPlan& shard_;
  const bool fp8_;
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
                                                    absl::string_view requested,
                                                    bool on_device) {
  if (requested != "auto") return ops::ParseWeightDtype(requested);
  switch (checkpoint.main_format()) {
    case base::WeightFormat::kF32:
    case base::WeightFormat::kF16:
    case base::WeightFormat::kBf16:
      return ops::WeightDtype::kBf16;
    case base::WeightFormat::kQ8_0:
    case base::WeightFormat::kQ6_K:
      return on_device ? ops::WeightDtype::kBf16 : ops::WeightDtype::kInt8;
    case base::WeightFormat::kQ4_0:
    case base::WeightFormat::kQ4_1:
    case base::WeightFormat::kQ4_K:
      return on_device ? ops::WeightDtype::kBf16 : ops::WeightDtype::kQ4;
    case base::WeightFormat::kF8E4m3:
      return ops::WeightDtype::kFp8;
  }
  return absl::InternalError("weight format without a dtype");
}

absl::StatusOr<Weights> LoadWeights(const Checkpoint& checkpoint,
                                    const ShardPlan& shard,
                                    ops::WeightDtype dtype,
                                    ops::Backend& backend) {
  return Loader(checkpoint, shard, dtype, backend).Load();
}

}  // namespace baton::model
