// Checkpoint::Open: finds the tensors of a model in its files, and checks that they are those its
// config asks for.

#include <sys/stat.h>

#include <cmath>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "engine/base/gguf.h"
#include "engine/base/safetensors.h"
#include "engine/base/status_macros.h"
#include "engine/model/checkpoint.h"
#include "engine/model/tensor_names.h"

namespace baton::model {
namespace {

using base::SafetensorsModel;
using base::WeightFormat;

// Per-layer names of KV scales in the checkpoints of the usual quantisers; the last one holds for
// both K and V.
constexpr const char* kKeyScaleNames[] = {"self_attn.k_scale", "self_attn.attn.k_scale",
                                          "self_attn.k_proj.k_scale",
                                          "self_attn.k_proj.output_scale", "self_attn.kv_scale"};
constexpr const char* kValueScaleNames[] = {"self_attn.v_scale", "self_attn.attn.v_scale",
                                            "self_attn.v_proj.v_scale",
                                            "self_attn.v_proj.output_scale", "self_attn.kv_scale"};

absl::Status TensorError(absl::string_view what,
                         const std::string& file,
                         absl::string_view tensor,
                         absl::string_view reason) {
  return absl::InvalidArgumentError(absl::StrCat(what, ": file=", file, " tensor=\"",
                                                 absl::CHexEscape(tensor), "\" reason=", reason));
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ","), "]");
}

std::optional<WeightFormat> FormatOfDtype(absl::string_view dtype) {
  if (dtype == "F32") return WeightFormat::kF32;
  if (dtype == "F16") return WeightFormat::kF16;
  if (dtype == "BF16") return WeightFormat::kBf16;
  if (dtype == "F8_E4M3") return WeightFormat::kF8E4m3;
  return std::nullopt;
}

// True for tensors of Hugging Face checkpoints that transformers does not read either.
bool MayBeIgnored(const ModelConfig& config, absl::string_view name) {
  if (absl::EndsWith(name, ".rotary_emb.inv_freq")) return true;
  return config.tied_head && name == "lm_head.weight";
}

}  // namespace

class CheckpointBuilder {
 public:
  CheckpointBuilder(const std::string& path, bool hash_all_data)
      : hash_all_data_(hash_all_data), checkpoint_(new Checkpoint()) {
    checkpoint_->path_ = path;
  }

  absl::StatusOr<std::unique_ptr<Checkpoint>> FromDirectory() {
    BATON_ASSIGN_OR_RETURN(checkpoint_->config_, LoadHfConfig(checkpoint_->path_));
    BATON_ASSIGN_OR_RETURN(checkpoint_->safetensors_, SafetensorsModel::Open(checkpoint_->path_));
    return Build();
  }

  absl::StatusOr<std::unique_ptr<Checkpoint>> MadeUp() {
    BATON_ASSIGN_OR_RETURN(checkpoint_->config_, LoadHfConfig(checkpoint_->path_));
    checkpoint_->layers_.resize(checkpoint_->config_.num_layers);
    for (const ExpectedTensor& expected : ExpectedTensors(checkpoint_->config_)) {
      Checkpoint::Tensor& tensor = TensorOf(expected);
      tensor.made = true;
      tensor.format = WeightFormat::kBf16;
      tensor.rows = expected.shape.rows;
      tensor.cols = expected.shape.cols;
      tensor.row_bytes = base::RowBytes(tensor.format, tensor.cols);
      if (expected.is_vector) continue;
      // As layers are initialised: what goes in and what comes out are of one size.
      tensor.std = static_cast<float>(1.0 / std::sqrt(static_cast<double>(tensor.cols)));
      tensor.seed = (static_cast<uint64_t>(expected.role) + 1) * 0x9e3779b97f4a7c15ull +
                    static_cast<uint64_t>(expected.layer + 1) * 0xd1b54a32d192ed03ull;
    }
    checkpoint_->ComputeFingerprint(false);
    return std::move(checkpoint_);
  }

  absl::StatusOr<std::unique_ptr<Checkpoint>> FromGguf() {
    BATON_ASSIGN_OR_RETURN(checkpoint_->gguf_, base::GgufFile::Open(checkpoint_->path_));
    BATON_ASSIGN_OR_RETURN(checkpoint_->config_, GgufConfig(*checkpoint_->gguf_));
    return Build();
  }

 private:
  // A tensor as the file has it; the shape in the order of Hugging Face, rows first.
  struct Found {
    const uint8_t* data;
    WeightFormat format;
    std::vector<int64_t> shape;
    const std::string* file;
  };

  absl::StatusOr<std::unique_ptr<Checkpoint>> Build() {
    checkpoint_->layers_.resize(checkpoint_->config_.num_layers);
    for (const ExpectedTensor& expected : ExpectedTensors(checkpoint_->config_)) {
      BATON_RETURN_IF_ERROR(Add(expected));
    }
    BATON_RETURN_IF_ERROR(AddKvScales());
    BATON_RETURN_IF_ERROR(RefuseUnknown());
    checkpoint_->ComputeFingerprint(hash_all_data_);
    return std::move(checkpoint_);
  }

  absl::StatusOr<Found> FindTensor(const std::string& name) {
    if (checkpoint_->gguf_ != nullptr) {
      const base::GgufTensor* tensor = checkpoint_->gguf_->FindTensor(name);
      if (tensor == nullptr)
        return TensorError("missing tensor", checkpoint_->path_, name, "the config needs it");
      return Found{tensor->data.data(), tensor->format,
                   std::vector<int64_t>(tensor->shape.rbegin(), tensor->shape.rend()),
                   &checkpoint_->path_};
    }
    const SafetensorsModel::Entry* entry = checkpoint_->safetensors_->Find(name);
    if (entry == nullptr)
      return TensorError("missing tensor", checkpoint_->path_, name, "the config needs it");
    const std::optional<WeightFormat> format = FormatOfDtype(entry->tensor.dtype);
    if (!format) {
      return TensorError(
          "unsupported dtype", entry->file->path(), name,
          absl::StrCat(entry->tensor.dtype, " is not supported, accepted: F32 F16 BF16 F8_E4M3"));
    }
    return Found{entry->tensor.data.data(), *format, entry->tensor.shape, &entry->file->path()};
  }

  Checkpoint::Tensor& TensorOf(const ExpectedTensor& expected) {
    const int role = static_cast<int>(expected.role);
    return expected.layer < 0 ? checkpoint_->globals_[role]
                              : checkpoint_->layers_[expected.layer][role];
  }

  absl::Status Add(const ExpectedTensor& expected) {
    const std::string& name = checkpoint_->gguf_ != nullptr ? expected.gguf_name : expected.hf_name;
    BATON_ASSIGN_OR_RETURN(const Found found, FindTensor(name));
    std::vector<int64_t> shape = {expected.shape.rows, expected.shape.cols};
    if (expected.is_vector) shape.erase(shape.begin());
    if (found.shape != shape) {
      return TensorError(
          "wrong shape", *found.file, name,
          absl::StrCat("shape=", ShapeText(found.shape), " the config needs ", ShapeText(shape)));
    }
    used_.insert(name);
    Checkpoint::Tensor& tensor = TensorOf(expected);
    tensor.data = found.data;
    tensor.format = found.format;
    tensor.rows = expected.shape.rows;
    tensor.cols = expected.shape.cols;
    tensor.row_bytes = base::RowBytes(found.format, tensor.cols);
    if (found.format == WeightFormat::kF8E4m3) {
      BATON_ASSIGN_OR_RETURN(tensor.block_scales, ReadBlockScales(name, *found.file, expected));
    }
    if (IsInterleaved(expected.role)) tensor.interleaved_head_dim = checkpoint_->config_.head_dim;
    return absl::OkStatus();
  }

  // Of an e4m3 matrix: `name` with "_scale_inv" behind it, [rows / 128][cols / 128].
  absl::StatusOr<std::vector<float>> ReadBlockScales(const std::string& name,
                                                     const std::string& file,
                                                     const ExpectedTensor& expected) {
    if (expected.is_vector)
      return TensorError("unsupported dtype", file, name, "F8_E4M3 is for matrices");
    const std::string scale_name = absl::StrCat(name, "_scale_inv");
    BATON_ASSIGN_OR_RETURN(const Found found, FindTensor(scale_name));
    const std::vector<int64_t> shape = {(expected.shape.rows + kFp8Block - 1) / kFp8Block,
                                        (expected.shape.cols + kFp8Block - 1) / kFp8Block};
    if (found.shape != shape || found.format == WeightFormat::kF8E4m3) {
      return TensorError("wrong shape", *found.file, scale_name,
                         absl::StrCat("shape=", ShapeText(found.shape), " want ", ShapeText(shape),
                                      ": one number for 128 x 128 weights"));
    }
    used_.insert(scale_name);
    std::vector<float> scales(shape[0] * shape[1]);
    base::DequantizeRow(found.format, found.data, static_cast<int64_t>(scales.size()),
                        scales.data());
    for (const float scale : scales) {
      if (!std::isfinite(scale) || scale < 0)
        return TensorError("bad weight scale", *found.file, scale_name,
                           absl::StrCat("value=", scale));
    }
    return scales;
  }

  // llama.cpp's converter reorders the rows of q and k of this architecture for its interleaved
  // RoPE, no other's.
  bool IsInterleaved(TensorRole role) const {
    return checkpoint_->gguf_ != nullptr && checkpoint_->config_.arch == Arch::kLlama &&
           (role == TensorRole::kQ || role == TensorRole::kK);
  }

  absl::Status AddKvScales() {
    if (checkpoint_->safetensors_ == nullptr) return absl::OkStatus();
    const int num_layers = checkpoint_->config_.num_layers;
    std::vector<KvScales> all(num_layers);
    int num_found = 0;
    std::string first_missing;
    for (int layer = 0; layer < num_layers; ++layer) {
      BATON_ASSIGN_OR_RETURN(all[layer].k, ReadScales(layer, kKeyScaleNames));
      BATON_ASSIGN_OR_RETURN(all[layer].v, ReadScales(layer, kValueScaleNames));
      num_found += !all[layer].k.empty();
      num_found += !all[layer].v.empty();
      if (!first_missing.empty()) continue;
      if (all[layer].v.empty()) first_missing = absl::StrCat("v_scale of layer ", layer);
      if (all[layer].k.empty()) first_missing = absl::StrCat("k_scale of layer ", layer);
    }
    if (num_found == 0) return absl::OkStatus();
    if (!first_missing.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("KV scales partly missing: file=", checkpoint_->path_, " found=", num_found,
                       " needed=", 2 * num_layers, " first_missing=", first_missing));
    }
    checkpoint_->kv_scales_ = std::move(all);
    return absl::OkStatus();
  }

  // One scale per KV head; empty when the layer has none under any of the names.
  absl::StatusOr<std::vector<float>> ReadScales(int layer, absl::Span<const char* const> names) {
    for (const char* candidate : names) {
      const std::string name = absl::StrCat("model.layers.", layer, ".", candidate);
      if (checkpoint_->safetensors_->Find(name) == nullptr) continue;
      BATON_ASSIGN_OR_RETURN(const Found found, FindTensor(name));
      used_.insert(name);
      return ScalesOf(name, found);
    }
    return std::vector<float>();
  }

  absl::StatusOr<std::vector<float>> ScalesOf(const std::string& name, const Found& found) {
    const int num_heads = checkpoint_->config_.num_kv_heads;
    int64_t count = 1;
    for (int64_t size : found.shape) count = size > num_heads ? size : count * size;
    if (count != 1 && count != num_heads) {
      return TensorError("wrong shape", *found.file, name,
                         absl::StrCat("shape=", ShapeText(found.shape), " but KV scales are 1 or ",
                                      num_heads, " numbers"));
    }
    std::vector<float> scales(count);
    base::DequantizeRow(found.format, found.data, count, scales.data());
    for (float scale : scales) {
      if (!std::isfinite(scale) || scale <= 0) {
        return TensorError("bad KV scale", *found.file, name, absl::StrCat("value=", scale));
      }
    }
    scales.resize(num_heads, scales[0]);
    return scales;
  }

  absl::Status RefuseUnknown() const {
    const auto refuse = [](const std::string& file, const std::string& name) {
      return TensorError("unknown tensor", file, name, "no part of this architecture reads it");
    };
    if (checkpoint_->gguf_ != nullptr) {
      for (const base::GgufTensor& tensor : checkpoint_->gguf_->tensors()) {
        if (used_.count(tensor.name) == 0) return refuse(checkpoint_->path_, tensor.name);
      }
      return absl::OkStatus();
    }
    for (const auto& [name, entry] : checkpoint_->safetensors_->tensors()) {
      if (used_.count(name) == 0 && !MayBeIgnored(checkpoint_->config_, name)) {
        return refuse(entry.file->path(), name);
      }
    }
    return absl::OkStatus();
  }

  const bool hash_all_data_;
  std::unique_ptr<Checkpoint> checkpoint_;
  std::set<std::string> used_;
};

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path,
                                                             bool hash_all_data) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    return absl::NotFoundError(absl::StrCat("no such model: file=", path));
  }
  CheckpointBuilder builder(path, hash_all_data);
  return S_ISDIR(info.st_mode) ? builder.FromDirectory() : builder.FromGguf();
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::OpenDummy(const std::string& path) {
  return CheckpointBuilder(path, false).MadeUp();
}

}  // namespace baton::model
