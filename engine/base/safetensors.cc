#include "engine/base/safetensors.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "engine/base/json.h"
#include "engine/base/status_macros.h"

namespace baton::base {
namespace {

constexpr char kSingleName[] = "model.safetensors";
constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr size_t kDimensionsMax = 8;
constexpr size_t kShardsMax = 4096;

struct DtypeSize {
  const char* name;
  uint64_t bytes;
};
// Every dtype whose size is known, so that files with tensors that are not used can be read.
constexpr DtypeSize kDtypes[] = {
    {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
    {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
    {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},
};

uint64_t BytesOfDtype(absl::string_view dtype) {
  for (const DtypeSize& known : kDtypes) {
    if (dtype == known.name) return known.bytes;
  }
  return 0;
}

JsonLimits HeaderLimits() {
  JsonLimits limits;
  limits.max_bytes = kSafetensorsHeaderBytesMax;
  limits.max_depth = 8;
  limits.reject_duplicate_keys = true;
  return limits;
}

// A tensor of the header with its place in the data, before the data is looked at.
struct HeaderEntry {
  SafetensorsTensor tensor;
  uint64_t begin = 0;
  uint64_t end = 0;
};

class HeaderParser {
 public:
  HeaderParser(const std::string& path, absl::Span<const uint8_t> bytes)
      : path_(path), bytes_(bytes) {}

  absl::StatusOr<std::vector<SafetensorsTensor>> Parse() {
    BATON_ASSIGN_OR_RETURN(const absl::string_view header, HeaderText());
    absl::StatusOr<JsonValue> json = ParseJson(header, HeaderLimits());
    if (!json.ok()) {
      return Annotate(json.status(),
                      absl::StrCat("bad safetensors file: file=", path_, " reason=header"));
    }
    if (!json->is_object()) return Bad("", "the header is no JSON object");
    std::vector<HeaderEntry> entries;
    for (const JsonMember& member : json->members()) {
      if (member.key == "__metadata__") continue;
      BATON_ASSIGN_OR_RETURN(HeaderEntry entry, ParseEntry(member));
      entries.push_back(std::move(entry));
    }
    return PlaceTensors(std::move(entries), 8 + header.size());
  }

 private:
  template <typename... Args>
  absl::Status Bad(absl::string_view tensor, const Args&... reason) const {
    return absl::InvalidArgumentError(
        absl::StrCat("bad safetensors file: file=", path_, tensor.empty() ? "" : " tensor=\"",
                     absl::CHexEscape(tensor), tensor.empty() ? "" : "\"", " reason=", reason...));
  }

  absl::StatusOr<absl::string_view> HeaderText() const {
    if (bytes_.size() < 8)
      return Bad("", "the file has ", bytes_.size(), " bytes, the length of the header takes 8");
    uint64_t size;
    memcpy(&size, bytes_.data(), sizeof(size));
    if (size > kSafetensorsHeaderBytesMax) {
      return Bad("", "header_bytes=", size, " is above the limit of ", kSafetensorsHeaderBytesMax);
    }
    if (size > bytes_.size() - 8) {
      return Bad("", "header_bytes=", size, " but the file has ", bytes_.size(), " bytes");
    }
    return absl::string_view(reinterpret_cast<const char*>(bytes_.data()) + 8, size);
  }

  absl::StatusOr<HeaderEntry> ParseEntry(const JsonMember& member) const {
    const JsonValue* dtype = member.value.Find("dtype");
    const JsonValue* shape = member.value.Find("shape");
    const JsonValue* offsets = member.value.Find("data_offsets");
    if (dtype == nullptr || !dtype->is_string() || shape == nullptr || !shape->is_array() ||
        offsets == nullptr || !offsets->is_array() || offsets->items().size() != 2) {
      return Bad(member.key, "needs dtype, shape and data_offsets of two numbers");
    }
    HeaderEntry entry;
    entry.tensor.name = member.key;
    entry.tensor.dtype = dtype->text();
    BATON_ASSIGN_OR_RETURN(entry.begin, ToSize(member.key, offsets->items()[0]));
    BATON_ASSIGN_OR_RETURN(entry.end, ToSize(member.key, offsets->items()[1]));
    BATON_ASSIGN_OR_RETURN(const uint64_t size, ParseShape(*shape, &entry.tensor));
    if (entry.begin > entry.end || entry.end - entry.begin != size) {
      return Bad(member.key, "data_offsets [", entry.begin, ",", entry.end,
                 "] but shape and dtype need ", size, " bytes");
    }
    return entry;
  }

  absl::StatusOr<uint64_t> ToSize(const std::string& name, const JsonValue& value) const {
    absl::StatusOr<int64_t> number = value.AsInt64();
    if (!number.ok() || *number < 0)
      return Bad(name, "a size or offset is no number from 0 to 2^63-1");
    return static_cast<uint64_t>(*number);
  }

  // Fills the shape; returns the bytes it takes.
  absl::StatusOr<uint64_t> ParseShape(const JsonValue& shape, SafetensorsTensor* tensor) const {
    uint64_t size = BytesOfDtype(tensor->dtype);
    if (size == 0)
      return Bad(tensor->name, "unknown dtype \"", absl::CHexEscape(tensor->dtype), "\"");
    if (shape.items().size() > kDimensionsMax) {
      return Bad(tensor->name, shape.items().size(), " dimensions, at most ", kDimensionsMax);
    }
    for (const JsonValue& item : shape.items()) {
      BATON_ASSIGN_OR_RETURN(const uint64_t dimension, ToSize(tensor->name, item));
      if (__builtin_mul_overflow(size, dimension, &size))
        return Bad(tensor->name, "its size overflows");
      tensor->shape.push_back(static_cast<int64_t>(dimension));
    }
    return size;
  }

  absl::StatusOr<std::vector<SafetensorsTensor>> PlaceTensors(std::vector<HeaderEntry> entries,
                                                              uint64_t data_start) const {
    std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    const uint64_t available = bytes_.size() - data_start;
    std::vector<SafetensorsTensor> tensors;
    uint64_t covered = 0;
    for (HeaderEntry& entry : entries) {
      if (entry.end > available) {
        return Bad(entry.tensor.name, "its data ends at ", entry.end, " but the file holds ",
                   available, " bytes of data");
      }
      if (entry.begin != covered) {
        return Bad(entry.tensor.name, "its data begins at ", entry.begin, " where ", covered,
                   " is expected");
      }
      covered = entry.end;
      entry.tensor.data = bytes_.subspan(data_start + entry.begin, entry.end - entry.begin);
      tensors.push_back(std::move(entry.tensor));
    }
    if (covered != available) {
      return Bad("", "the tensors take ", covered, " bytes of data, the file holds ", available);
    }
    return tensors;
  }

  const std::string& path_;
  absl::Span<const uint8_t> bytes_;
};

// The index file: which shard holds which tensor.
struct Index {
  absl::flat_hash_map<std::string, std::string> shard_of_tensor;
  std::set<std::string> shards;
};

absl::StatusOr<Index> ReadIndex(const std::string& path) {
  BATON_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, kSafetensorsHeaderBytesMax));
  absl::StatusOr<JsonValue> json = ParseJson(text, HeaderLimits());
  if (!json.ok()) return Annotate(json.status(), absl::StrCat("bad index: file=", path));
  const JsonValue* map = json->Find("weight_map");
  if (map == nullptr || !map->is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("bad index: file=", path, " reason=no weight_map"));
  }
  Index index;
  for (const JsonMember& member : map->members()) {
    if (!member.value.is_string()) {
      return absl::InvalidArgumentError(absl::StrCat("bad index: file=", path, " tensor=\"",
                                                     absl::CHexEscape(member.key),
                                                     "\" reason=its shard is no string"));
    }
    index.shard_of_tensor[member.key] = member.value.text();
    index.shards.insert(member.value.text());
  }
  if (index.shards.size() > kShardsMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "bad index: file=", path, " shards=", index.shards.size(), " at most ", kShardsMax));
  }
  return index;
}

}  // namespace

absl::StatusOr<std::vector<SafetensorsTensor>> ParseSafetensors(const std::string& path,
                                                                absl::Span<const uint8_t> bytes) {
  return HeaderParser(path, bytes).Parse();
}

absl::StatusOr<std::unique_ptr<SafetensorsModel>> SafetensorsModel::Open(
    const std::string& directory) {
  std::unique_ptr<SafetensorsModel> model(new SafetensorsModel());
  absl::StatusOr<std::string> index_path = ResolveInDirectory(directory, kIndexName);
  if (absl::IsNotFound(index_path.status())) {
    BATON_RETURN_IF_ERROR(model->AddShard(directory, kSingleName));
    return model;
  }
  BATON_RETURN_IF_ERROR(index_path.status());
  BATON_ASSIGN_OR_RETURN(const Index index, ReadIndex(*index_path));
  // All names are judged before the first shard is opened.
  for (const std::string& shard : index.shards) {
    BATON_RETURN_IF_ERROR(ResolveInDirectory(directory, shard).status());
  }
  for (const std::string& shard : index.shards) {
    BATON_RETURN_IF_ERROR(model->AddShard(directory, shard));
  }
  for (const auto& [name, shard] : index.shard_of_tensor) {
    if (model->Find(name) == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("bad index: file=", *index_path, " tensor=\"",
                                                     absl::CHexEscape(name),
                                                     "\" reason=not in shard ", shard));
    }
  }
  if (index.shard_of_tensor.size() != model->tensors_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "bad index: file=", *index_path, " reason=it names ", index.shard_of_tensor.size(),
        " tensors, the shards hold ", model->tensors_.size()));
  }
  return model;
}

absl::Status SafetensorsModel::AddShard(const std::string& directory,
                                        absl::string_view shard_name) {
  BATON_ASSIGN_OR_RETURN(const std::string path, ResolveInDirectory(directory, shard_name));
  BATON_ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  BATON_ASSIGN_OR_RETURN(std::vector<SafetensorsTensor> tensors,
                         ParseSafetensors(path, file->bytes()));
  for (SafetensorsTensor& tensor : tensors) {
    const std::string name = tensor.name;
    if (!tensors_.try_emplace(name, Entry{std::move(tensor), file.get()}).second) {
      return absl::InvalidArgumentError(absl::StrCat("tensor in two shards: file=", path,
                                                     " tensor=\"", absl::CHexEscape(name), "\""));
    }
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

const SafetensorsModel::Entry* SafetensorsModel::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace baton::base
