#pragma once

// Writes small model files for tests, right ones and broken ones: raw files in a directory of the
// test's own, safetensors, GGUF.

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"

namespace baton::testing_support {

// An empty directory that is gone with its content when the test ends.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "baton_test.XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string File(absl::string_view name) const { return absl::StrCat(path_, "/", name); }
  std::string Write(absl::string_view name, absl::string_view bytes) const {
    std::ofstream file(File(name), std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return File(name);
  }

 private:
  std::string path_;
};

inline std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// The bytes of a number or of floats as they lie in a file.
template <typename T>
std::string Raw(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}
inline std::string RawFloats(const std::vector<float>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
}

// Builds the bytes of a safetensors file.
class SafetensorsBytes {
 public:
  SafetensorsBytes& Add(absl::string_view name,
                        absl::string_view dtype,
                        const std::vector<int64_t>& shape,
                        absl::string_view data) {
    entries_.push_back(absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":[",
                                    absl::StrJoin(shape, ","), "],\"data_offsets\":[", data_.size(),
                                    ",", data_.size() + data.size(), "]}"));
    absl::StrAppend(&data_, data);
    return *this;
  }
  std::string Build() const {
    return WithHeader(absl::StrCat("{", absl::StrJoin(entries_, ","), "}"), data_);
  }
  // A file with any header.
  static std::string WithHeader(absl::string_view header, absl::string_view data) {
    return absl::StrCat(Raw(static_cast<uint64_t>(header.size())), header, data);
  }

 private:
  std::vector<std::string> entries_;
  std::string data_;
};

// Builds the bytes of a GGUF file.
class GgufBytes {
 public:
  enum Type : uint32_t {
    kU8 = 0,
    kU32 = 4,
    kI32 = 5,
    kF32 = 6,
    kBool = 7,
    kString = 8,
    kArray = 9,
    kU64 = 10
  };

  static std::string Text(absl::string_view text) {
    return absl::StrCat(Raw(static_cast<uint64_t>(text.size())), text);
  }
  GgufBytes& Add(absl::string_view key, uint32_t type, absl::string_view value) {
    absl::StrAppend(&metadata_, Text(key), Raw(type), value);
    ++num_keys_;
    return *this;
  }
  GgufBytes& AddString(absl::string_view key, absl::string_view value) {
    return Add(key, kString, Text(value));
  }
  GgufBytes& AddU32(absl::string_view key, uint32_t value) { return Add(key, kU32, Raw(value)); }
  GgufBytes& AddF32(absl::string_view key, float value) { return Add(key, kF32, Raw(value)); }
  GgufBytes& AddStrings(absl::string_view key, const std::vector<std::string>& values) {
    std::string value = Raw(uint32_t{kString}) + Raw(static_cast<uint64_t>(values.size()));
    for (const std::string& text : values) absl::StrAppend(&value, Text(text));
    return Add(key, kArray, value);
  }
  GgufBytes& AddI32s(absl::string_view key, const std::vector<int32_t>& values) {
    std::string value = Raw(uint32_t{kI32}) + Raw(static_cast<uint64_t>(values.size()));
    for (int32_t number : values) absl::StrAppend(&value, Raw(number));
    return Add(key, kArray, value);
  }
  // `shape` in GGUF's order: the length of a row first.
  GgufBytes& AddTensor(absl::string_view name,
                       uint32_t ggml_type,
                       const std::vector<uint64_t>& shape,
                       absl::string_view data) {
    AddTensorAt(name, ggml_type, shape, data_.size());
    absl::StrAppend(&data_, data);
    data_.resize((data_.size() + 31) / 32 * 32);
    return *this;
  }
  // The same without data, at any offset.
  GgufBytes& AddTensorAt(absl::string_view name,
                         uint32_t ggml_type,
                         const std::vector<uint64_t>& shape,
                         uint64_t offset) {
    absl::StrAppend(&tensors_, Text(name), Raw(static_cast<uint32_t>(shape.size())));
    for (uint64_t size : shape) absl::StrAppend(&tensors_, Raw(size));
    absl::StrAppend(&tensors_, Raw(ggml_type), Raw(offset));
    ++num_tensors_;
    return *this;
  }
  std::string Build(uint32_t version = 3) const {
    std::string bytes =
        absl::StrCat("GGUF", Raw(version), Raw(num_tensors_), Raw(num_keys_), metadata_, tensors_);
    bytes.resize((bytes.size() + 31) / 32 * 32);
    return bytes + data_;
  }

 private:
  std::string metadata_;
  std::string tensors_;
  std::string data_;
  uint64_t num_keys_ = 0;
  uint64_t num_tensors_ = 0;
};

}  // namespace baton::testing_support
