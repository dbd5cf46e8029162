#pragma once

// A bounded JSON reader (RFC 8259) for what comes from files and clients. Keeps the order of object
// members and the text of numbers, so that a value can be written again without loss.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace baton::base {

struct JsonLimits {
  size_t max_bytes = size_t{64} << 20;
  int max_depth = 64;  // of nested arrays and objects
  size_t max_values =
      size_t{4} << 20;  // every value and member counts; one costs about 50 bytes of memory
  // Otherwise the last one wins, in the place of the first, as in Python.
  bool reject_duplicate_keys = false;
};

struct JsonMember;

// One JSON value. A plain value type: copyable, movable, thread-compatible.
class JsonValue {
 public:
  enum class Type : uint8_t { kNull, kFalse, kTrue, kNumber, kString, kArray, kObject };

  // Defined below JsonMember: a vector of it can be made and destroyed only once it is complete.
  JsonValue();
  JsonValue(const JsonValue&);
  JsonValue(JsonValue&&) noexcept;
  JsonValue& operator=(const JsonValue&);
  JsonValue& operator=(JsonValue&&) noexcept;
  ~JsonValue();

  explicit JsonValue(bool value);
  static JsonValue String(std::string text);
  // `text` must follow JSON's grammar of numbers.
  static JsonValue Number(std::string text);
  static JsonValue Array(std::vector<JsonValue> items);
  static JsonValue Object(std::vector<JsonMember> members);

  Type type() const { return type_; }
  bool is_null() const { return type_ == Type::kNull; }
  bool is_bool() const { return type_ == Type::kTrue || type_ == Type::kFalse; }
  bool is_true() const { return type_ == Type::kTrue; }
  bool is_number() const { return type_ == Type::kNumber; }
  bool is_string() const { return type_ == Type::kString; }
  bool is_array() const { return type_ == Type::kArray; }
  bool is_object() const { return type_ == Type::kObject; }

  // The unescaped text of a string or the literal text of a number; empty for other types.
  const std::string& text() const;
  // The elements of an array; empty for other types.
  const std::vector<JsonValue>& items() const;
  // The members of an object in their order in the file; empty for other types.
  const std::vector<JsonMember>& members() const;

  // The member called `key`, or null when there is none or this is no object. Linear in the number
  // of members.
  const JsonValue* Find(absl::string_view key) const;

  // Errors: INVALID_ARGUMENT when this is not such a number (a fraction or exponent, as in 1.0, is
  // no integer) or it does not fit.
  absl::StatusOr<int64_t> AsInt64() const;
  absl::StatusOr<double> AsDouble() const;

 private:
  JsonValue(Type type, std::string text);

  Type type_ = Type::kNull;
  std::variant<std::string, std::vector<JsonValue>, std::vector<JsonMember>> content_;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

inline JsonValue::JsonValue() = default;
inline JsonValue::JsonValue(const JsonValue&) = default;
inline JsonValue::JsonValue(JsonValue&&) noexcept = default;
inline JsonValue& JsonValue::operator=(const JsonValue&) = default;
inline JsonValue& JsonValue::operator=(JsonValue&&) noexcept = default;
inline JsonValue::~JsonValue() = default;
inline JsonValue::JsonValue(bool value) : type_(value ? Type::kTrue : Type::kFalse) {}
inline JsonValue::JsonValue(Type type, std::string text)
    : type_(type), content_(std::move(text)) {}
inline JsonValue JsonValue::String(std::string text) {
  return JsonValue(Type::kString, std::move(text));
}
inline JsonValue JsonValue::Number(std::string text) {
  return JsonValue(Type::kNumber, std::move(text));
}

// Reads exactly one value, with white space around it. `text` must be valid UTF-8; an escaped lone
// surrogate is an error.
// Errors: INVALID_ARGUMENT with the byte offset, RESOURCE_EXHAUSTED when a limit is passed.
absl::StatusOr<JsonValue> ParseJson(absl::string_view text,
                                    const JsonLimits& limits = JsonLimits{});

// Appends `text` (valid UTF-8) as a JSON string with its quotes. Escapes only what JSON demands, as
// Python's json.dumps(ensure_ascii=False) does.
void AppendJsonString(absl::string_view text, std::string* out);

}  // namespace baton::base
