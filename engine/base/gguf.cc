#include "engine/base/gguf.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "engine/base/status_macros.h"

namespace baton::base {
namespace {

static_assert(std::endian::native == std::endian::little,
              "values are read as they lie in the file");

// The type numbers of the format.
enum ValueType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
  kNumTypes
};
// Bytes of one value; 0 where the size is not fixed.
constexpr uint8_t kValueBytes[kNumTypes] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

constexpr absl::string_view kMagic = "GGUF";
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kAlignmentMax = 1 << 20;
constexpr uint64_t kNameBytesMax = 4096;
constexpr uint64_t kTensorsMax = 1 << 20;
constexpr uint64_t kKeysMax = 1 << 20;
constexpr uint32_t kDimensionsMax = 4;

template <typename T>
T LoadAs(const uint8_t* data) {
  T value;
  memcpy(&value, data, sizeof(value));
  return value;
}

bool IsInteger(uint32_t type) { return type <= kI32 || type == kU64 || type == kI64; }

// Empty when it is no integer or does not fit.
std::optional<int64_t> LoadInteger(uint32_t type, const uint8_t* data) {
  switch (type) {
    case kU8:
      return LoadAs<uint8_t>(data);
    case kI8:
      return LoadAs<int8_t>(data);
    case kU16:
      return LoadAs<uint16_t>(data);
    case kI16:
      return LoadAs<int16_t>(data);
    case kU32:
      return LoadAs<uint32_t>(data);
    case kI32:
      return LoadAs<int32_t>(data);
    case kI64:
      return LoadAs<int64_t>(data);
    case kU64: {
      const uint64_t value = LoadAs<uint64_t>(data);
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    default:
      return std::nullopt;
  }
}

std::string Printable(absl::string_view name) {
  return absl::StrCat("\"", absl::CHexEscape(name), "\"");
}

}  // namespace

// Walks the file once, front to back.
class GgufParser {
 public:
  GgufParser(GgufFile* file, absl::Span<const uint8_t> bytes) : file_(*file), bytes_(bytes) {}

  absl::Status Parse() {
    BATON_RETURN_IF_ERROR(ParseHeader());
    for (uint64_t i = 0; i < num_keys_; ++i) BATON_RETURN_IF_ERROR(ParseKey());
    BATON_RETURN_IF_ERROR(FindAlignment());
    for (uint64_t i = 0; i < num_tensors_; ++i) BATON_RETURN_IF_ERROR(ParseTensor());
    BATON_RETURN_IF_ERROR(PlaceTensors());
    return CheckNoOverlap();
  }

 private:
  template <typename... Args>
  absl::Status Bad(const Args&... what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("bad GGUF file: file=", file_.path_, " offset=", pos_, " reason=", what...));
  }

  uint64_t left() const { return bytes_.size() - pos_; }
  absl::Status Truncated(absl::string_view what) const { return Bad("truncated in ", what); }

  template <typename T>
  absl::StatusOr<T> Take(absl::string_view what) {
    if (left() < sizeof(T)) return Truncated(what);
    const T value = LoadAs<T>(bytes_.data() + pos_);
    pos_ += sizeof(T);
    return value;
  }

  absl::StatusOr<absl::string_view> TakeString(absl::string_view what, uint64_t max_bytes) {
    BATON_ASSIGN_OR_RETURN(const uint64_t size, Take<uint64_t>(what));
    if (size > left()) return Truncated(what);
    if (size > max_bytes)
      return Bad(what, " of ", size, " bytes, at most ", max_bytes, " are accepted");
    const char* text = reinterpret_cast<const char*>(bytes_.data() + pos_);
    pos_ += size;
    return absl::string_view(text, size);
  }

  absl::Status ParseHeader() {
    if (left() < kMagic.size() || memcmp(bytes_.data(), kMagic.data(), kMagic.size()) != 0) {
      return Bad("does not start with \"GGUF\"");
    }
    pos_ = kMagic.size();
    BATON_ASSIGN_OR_RETURN(const uint32_t version, Take<uint32_t>("the version"));
    if (version == 0x03000000 || version == 0x02000000)
      return Bad("big-endian files are not supported");
    if (version != 2 && version != 3)
      return Bad("version ", version, " is not supported, 2 and 3 are");
    BATON_ASSIGN_OR_RETURN(num_tensors_, Take<uint64_t>("the number of tensors"));
    BATON_ASSIGN_OR_RETURN(num_keys_, Take<uint64_t>("the number of keys"));
    if (num_tensors_ > kTensorsMax) return Bad(num_tensors_, " tensors, at most ", kTensorsMax);
    if (num_keys_ > kKeysMax) return Bad(num_keys_, " keys, at most ", kKeysMax);
    return absl::OkStatus();
  }

  absl::Status ParseKey() {
    BATON_ASSIGN_OR_RETURN(const absl::string_view key, TakeString("a key", kNameBytesMax));
    GgufFile::Value value = {};
    BATON_ASSIGN_OR_RETURN(value.type, Take<uint32_t>("the type of a value"));
    if (value.type == kArray) {
      BATON_ASSIGN_OR_RETURN(value.element_type, Take<uint32_t>("the type of an array"));
      BATON_ASSIGN_OR_RETURN(value.count, Take<uint64_t>("the length of an array"));
    } else {
      value.element_type = value.type;
      value.count = 1;
    }
    if (value.element_type >= kNumTypes || value.element_type == kArray) {
      return Bad("key ", Printable(key), " has type ", value.element_type,
                 ", which is not supported");
    }
    value.data = bytes_.data() + pos_;
    BATON_RETURN_IF_ERROR(SkipValues(value.element_type, value.count));
    if (!file_.metadata_.try_emplace(std::string(key), value).second) {
      return Bad("key ", Printable(key), " occurs twice");
    }
    return absl::OkStatus();
  }

  absl::Status SkipValues(uint32_t type, uint64_t count) {
    if (type == kString) {
      // Each string takes 8 bytes at least, so a false count ends at the end of the file.
      for (uint64_t i = 0; i < count; ++i) {
        BATON_RETURN_IF_ERROR(TakeString("a string", left()).status());
      }
      return absl::OkStatus();
    }
    if (count > left() / kValueBytes[type]) return Truncated("a value");
    pos_ += count * kValueBytes[type];
    return absl::OkStatus();
  }

  absl::Status FindAlignment() {
    if (!file_.HasKey("general.alignment")) return absl::OkStatus();
    const int64_t value = file_.FindInt("general.alignment").value_or(0);
    if (value < 8 || value > static_cast<int64_t>(kAlignmentMax) ||
        !std::has_single_bit(static_cast<uint64_t>(value))) {
      return Bad("general.alignment must be a power of two from 8 to ", kAlignmentMax);
    }
    alignment_ = static_cast<uint64_t>(value);
    return absl::OkStatus();
  }

  absl::Status ParseTensor() {
    BATON_ASSIGN_OR_RETURN(const absl::string_view name,
                           TakeString("a tensor name", kNameBytesMax));
    GgufTensor tensor;
    tensor.name = std::string(name);
    BATON_ASSIGN_OR_RETURN(tensor.shape, TakeShape(name));
    BATON_ASSIGN_OR_RETURN(const uint32_t type, Take<uint32_t>("the type of a tensor"));
    const std::optional<WeightFormat> format = WeightFormatFromGgml(type);
    if (!format) {
      return Bad("tensor ", Printable(name), " has GGML type ", type,
                 ", accepted: ", AcceptedWeightFormats());
    }
    tensor.format = *format;
    BATON_ASSIGN_OR_RETURN(const uint64_t offset, Take<uint64_t>("the offset of a tensor"));
    if (offset % alignment_ != 0) {
      return Bad("tensor ", Printable(name), " lies at offset ", offset, ", no multiple of ",
                 alignment_);
    }
    if (!file_.tensor_index_.try_emplace(tensor.name, file_.tensors_.size()).second) {
      return Bad("tensor ", Printable(name), " occurs twice");
    }
    offsets_.push_back(offset);
    file_.tensors_.push_back(std::move(tensor));
    return absl::OkStatus();
  }

  // No shape is accepted that has more values than the file has bits, so that products of its sizes
  // cannot overflow.
  absl::StatusOr<std::vector<int64_t>> TakeShape(absl::string_view name) {
    BATON_ASSIGN_OR_RETURN(const uint32_t num_dimensions, Take<uint32_t>("the shape of a tensor"));
    if (num_dimensions == 0 || num_dimensions > kDimensionsMax) {
      return Bad("tensor ", Printable(name), " has ", num_dimensions, " dimensions, 1 to ",
                 kDimensionsMax, " are accepted");
    }
    std::vector<int64_t> shape;
    uint64_t values_max = 8 * static_cast<uint64_t>(bytes_.size());
    for (uint32_t i = 0; i < num_dimensions; ++i) {
      BATON_ASSIGN_OR_RETURN(const uint64_t size, Take<uint64_t>("the shape of a tensor"));
      if (size == 0 || size > values_max) {
        return Bad("tensor ", Printable(name), " has size ", size, " in dimension ", i,
                   ", which cannot fit in the file");
      }
      values_max /= size;
      shape.push_back(static_cast<int64_t>(size));
    }
    return shape;
  }

  absl::Status PlaceTensors() {
    const uint64_t start = (pos_ + alignment_ - 1) / alignment_ * alignment_;
    const uint64_t available = start <= bytes_.size() ? bytes_.size() - start : 0;
    for (size_t i = 0; i < offsets_.size(); ++i) {
      GgufTensor& tensor = file_.tensors_[i];
      const int64_t row = tensor.shape[0];
      if (row % InfoOf(tensor.format).block_values != 0) {
        return Bad("tensor ", Printable(tensor.name), " of type ", NameOf(tensor.format),
                   " has rows of ", row, " values, no multiple of ",
                   InfoOf(tensor.format).block_values);
      }
      uint64_t size = RowBytes(tensor.format, row);
      for (size_t d = 1; d < tensor.shape.size(); ++d)
        size *= static_cast<uint64_t>(tensor.shape[d]);
      if (offsets_[i] > available || size > available - offsets_[i]) {
        return Bad("tensor ", Printable(tensor.name), " needs ", size, " bytes at offset ",
                   offsets_[i], " of the data, the file holds ", available);
      }
      tensor.data = bytes_.subspan(start + offsets_[i], size);
    }
    return absl::OkStatus();
  }

  absl::Status CheckNoOverlap() {
    std::vector<const GgufTensor*> order;
    for (const GgufTensor& tensor : file_.tensors_) order.push_back(&tensor);
    std::sort(order.begin(), order.end(), [](const GgufTensor* a, const GgufTensor* b) {
      return a->data.data() < b->data.data();
    });
    for (size_t i = 1; i < order.size(); ++i) {
      if (order[i - 1]->data.data() + order[i - 1]->data.size() > order[i]->data.data()) {
        return Bad("tensors ", Printable(order[i - 1]->name), " and ", Printable(order[i]->name),
                   " overlap");
      }
    }
    return absl::OkStatus();
  }

  GgufFile& file_;
  absl::Span<const uint8_t> bytes_;
  uint64_t pos_ = 0;
  uint64_t num_tensors_ = 0;
  uint64_t num_keys_ = 0;
  uint64_t alignment_ = kDefaultAlignment;
  std::vector<uint64_t> offsets_;  // per tensor, from the start of the data
};

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> mapped, MappedFile::Open(path));
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<GgufFile> file, Parse(path, mapped->bytes()));
  file->file_ = std::move(mapped);
  return file;
}

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Parse(const std::string& path,
                                                          absl::Span<const uint8_t> bytes) {
  std::unique_ptr<GgufFile> file(new GgufFile());
  file->path_ = path;
  BATON_RETURN_IF_ERROR(GgufParser(file.get(), bytes).Parse());
  return file;
}

const GgufTensor* GgufFile::FindTensor(absl::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

const GgufFile::Value* GgufFile::Find(absl::string_view key, uint32_t type) const {
  const auto it = metadata_.find(key);
  return it == metadata_.end() || it->second.type != type ? nullptr : &it->second;
}

const GgufFile::Value* GgufFile::FindArray(absl::string_view key) const {
  return Find(key, kArray);
}

std::optional<absl::string_view> GgufFile::FindString(absl::string_view key) const {
  const Value* value = Find(key, kString);
  if (value == nullptr) return std::nullopt;
  return absl::string_view(reinterpret_cast<const char*>(value->data + 8),
                           LoadAs<uint64_t>(value->data));
}

std::optional<int64_t> GgufFile::FindInt(absl::string_view key) const {
  const auto it = metadata_.find(key);
  if (it == metadata_.end()) return std::nullopt;
  return LoadInteger(it->second.type, it->second.data);
}

std::optional<uint32_t> GgufFile::FindU32(absl::string_view key) const {
  const std::optional<int64_t> value = FindInt(key);
  if (!value || *value < 0 || *value > std::numeric_limits<uint32_t>::max()) return std::nullopt;
  return static_cast<uint32_t>(*value);
}

std::optional<double> GgufFile::FindFloat(absl::string_view key) const {
  if (const Value* value = Find(key, kF32)) return LoadAs<float>(value->data);
  if (const Value* value = Find(key, kF64)) return LoadAs<double>(value->data);
  return std::nullopt;
}

std::optional<bool> GgufFile::FindBool(absl::string_view key) const {
  const Value* value = Find(key, kBool);
  if (value == nullptr) return std::nullopt;
  return *value->data != 0;
}

std::optional<std::vector<absl::string_view>> GgufFile::FindStringArray(
    absl::string_view key) const {
  const Value* value = FindArray(key);
  if (value == nullptr || value->element_type != kString) return std::nullopt;
  std::vector<absl::string_view> strings;
  strings.reserve(value->count);
  const uint8_t* at = value->data;
  for (uint64_t i = 0; i < value->count; ++i) {
    const uint64_t size = LoadAs<uint64_t>(at);
    strings.emplace_back(reinterpret_cast<const char*>(at + 8), size);
    at += 8 + size;
  }
  return strings;
}

std::optional<std::vector<int64_t>> GgufFile::FindIntArray(absl::string_view key) const {
  const Value* value = FindArray(key);
  if (value == nullptr || !IsInteger(value->element_type)) return std::nullopt;
  std::vector<int64_t> numbers;
  numbers.reserve(value->count);
  for (uint64_t i = 0; i < value->count; ++i) {
    const std::optional<int64_t> number =
        LoadInteger(value->element_type, value->data + i * kValueBytes[value->element_type]);
    if (!number) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

std::optional<std::vector<float>> GgufFile::FindFloatArray(absl::string_view key) const {
  const Value* value = FindArray(key);
  if (value == nullptr || value->element_type != kF32) return std::nullopt;
  std::vector<float> numbers(value->count);
  if (value->count > 0) memcpy(numbers.data(), value->data, value->count * sizeof(float));
  return numbers;
}

}  // namespace baton::base
