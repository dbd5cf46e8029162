#include "engine/model/checkpoint.h"

#include <openssl/sha.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/gguf.h"
#include "engine/base/hash_weights.h"
#include "engine/base/log.h"
#include "engine/base/safetensors.h"
#include "engine/model/tensor_names.h"

namespace baton::model {
namespace {

constexpr int kSamplesPerTensor = 4;
constexpr size_t kSampleBytes = 256;

std::string Sha256(absl::string_view bytes) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest);
  return absl::BytesToHexString({reinterpret_cast<const char*>(digest), sizeof(digest)});
}

// Evenly spread over the tensor, first and last bytes included.
void AppendSamples(const uint8_t* data, size_t size, std::string* out) {
  const size_t length = std::min(kSampleBytes, size);
  for (int i = 0; i < kSamplesPerTensor; ++i) {
    const size_t begin = (size - length) / (kSamplesPerTensor - 1) * i;
    out->append(reinterpret_cast<const char*>(data) + begin, length);
  }
}

}  // namespace

Checkpoint::Checkpoint() = default;
Checkpoint::~Checkpoint() = default;

const Checkpoint::Tensor& Checkpoint::At(TensorRole role, int layer) const {
  const int index = static_cast<int>(role);
  if (!IsPerLayer(role)) return globals_[index];
  BATON_CHECK(layer >= 0 && layer < static_cast<int>(layers_.size()), "layer=", layer);
  return layers_[layer][index];
}

Shape Checkpoint::shape(TensorRole role, int layer) const {
  const Tensor& tensor = At(role, layer);
  BATON_CHECK(tensor.is_there(), "role=", NameOf(role));
  return {tensor.rows, tensor.cols};
}

base::WeightFormat Checkpoint::format(TensorRole role, int layer) const {
  const Tensor& tensor = At(role, layer);
  BATON_CHECK(tensor.is_there(), "role=", NameOf(role));
  return tensor.format;
}

std::string Checkpoint::source_dtype(TensorRole role, int layer) const {
  return std::string(base::NameOf(format(role, layer)));
}

const uint8_t* Checkpoint::RowData(const Tensor& tensor, int64_t row) const {
  BATON_CHECK(tensor.data != nullptr && row >= 0 && row < tensor.rows, "row=", row);
  if (const int64_t head_dim = tensor.interleaved_head_dim; head_dim > 0) {
    const int64_t in_head = row % head_dim;
    const int64_t half = head_dim / 2;
    row = row - in_head + 2 * (in_head % half) + in_head / half;
  }
  return tensor.data + static_cast<size_t>(row) * tensor.row_bytes;
}

void Checkpoint::ReadRow(TensorRole role, int layer, int64_t row, float* out) const {
  const Tensor& tensor = At(role, layer);
  if (tensor.made) {
    for (int64_t i = 0; i < tensor.cols; ++i)
      out[i] = tensor.std == 0 ? 1.0f : base::HashWeight(tensor.seed, row, i, tensor.std);
    return;
  }
  base::DequantizeRow(tensor.format, RowData(tensor, row), tensor.cols, out);
  if (tensor.format != base::WeightFormat::kF8E4m3) return;
  const float* scales = BlockScales(tensor, row);
  for (int64_t i = 0; i < tensor.cols; ++i) out[i] *= scales[i / kFp8Block];
}

const float* Checkpoint::BlockScales(const Tensor& tensor, int64_t row) const {
  const int64_t across = (tensor.cols + kFp8Block - 1) / kFp8Block;
  return tensor.block_scales.data() + row / kFp8Block * across;
}

bool Checkpoint::MadeUp(TensorRole role, int layer, uint64_t* seed, float* std) const {
  const Tensor& tensor = At(role, layer);
  *seed = tensor.seed;
  *std = tensor.std;
  return tensor.made;
}

bool Checkpoint::ReadRowFp8(
    TensorRole role, int layer, int64_t row, uint8_t* codes, float* scales) const {
  const Tensor& tensor = At(role, layer);
  if (tensor.format != base::WeightFormat::kF8E4m3) return false;
  std::copy_n(RowData(tensor, row), tensor.cols, codes);
  std::copy_n(BlockScales(tensor, row), (tensor.cols + kFp8Block - 1) / kFp8Block, scales);
  return true;
}

bool Checkpoint::ReadRowQ4(
    TensorRole role, int layer, int64_t row, uint8_t* codes, float* scales, float* minimums) const {
  const Tensor& tensor = At(role, layer);
  if (tensor.made) return false;
  return base::UnpackRowQ4(tensor.format, RowData(tensor, row), tensor.cols, codes, scales,
                           minimums);
}

std::optional<KvScales> Checkpoint::kv_scales(int layer) const {
  if (kv_scales_.empty()) return std::nullopt;
  BATON_CHECK(layer >= 0 && layer < static_cast<int>(kv_scales_.size()), "layer=", layer);
  return kv_scales_[layer];
}

int64_t Checkpoint::weight_bytes() const {
  size_t total = 0;
  for (const Tensor& tensor : globals_) total += tensor.rows * tensor.row_bytes;
  for (const LayerTensors& layer : layers_) {
    for (const Tensor& tensor : layer) total += tensor.rows * tensor.row_bytes;
  }
  return static_cast<int64_t>(total);
}

base::WeightFormat Checkpoint::main_format() const {
  std::map<base::WeightFormat, size_t> bytes;
  for (const LayerTensors& layer : layers_) {
    for (const Tensor& tensor : layer) bytes[tensor.format] += tensor.rows * tensor.row_bytes;
  }
  base::WeightFormat best = base::WeightFormat::kF32;
  for (const auto& [format, size] : bytes) {
    if (size > bytes[best]) best = format;
  }
  return best;
}

void Checkpoint::ComputeFingerprint(bool hash_all_data) {
  std::string text = absl::StrCat("baton model 1\n", Describe(config_), "\n");
  const auto add = [&text, hash_all_data](absl::string_view role, int layer, const Tensor& tensor) {
    if (!tensor.is_there()) return;
    absl::StrAppend(&text, role, " ", layer, " ", base::NameOf(tensor.format), " ", tensor.rows,
                    " ", tensor.cols, " ", tensor.interleaved_head_dim, "\n");
    for (const float scale : tensor.block_scales) absl::StrAppend(&text, scale, " ");
    const size_t bytes = tensor.rows * tensor.row_bytes;
    if (tensor.made) {
      absl::StrAppend(&text, "made up\n");
    } else if (hash_all_data) {
      absl::StrAppend(&text, Sha256({reinterpret_cast<const char*>(tensor.data), bytes}), "\n");
    } else {
      AppendSamples(tensor.data, bytes, &text);
    }
  };
  for (int role = 0; role < kNumTensorRoles; ++role) {
    const absl::string_view name = NameOf(static_cast<TensorRole>(role));
    add(name, -1, globals_[role]);
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      add(name, static_cast<int>(layer), layers_[layer][role]);
    }
  }
  for (const KvScales& scales : kv_scales_) {
    for (float scale : scales.k) absl::StrAppend(&text, "k ", scale, "\n");
    for (float scale : scales.v) absl::StrAppend(&text, "v ", scale, "\n");
  }
  fingerprint_ = Sha256(text);
}

}  // namespace baton::model
