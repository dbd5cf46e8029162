#include "engine/base/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"

namespace baton::base {
namespace {

// A recursive reader. Recursion is bounded by JsonLimits::max_depth.
class Reader {
 public:
  Reader(absl::string_view text, const JsonLimits& limits) : text_(text), limits_(limits) {}

  absl::StatusOr<JsonValue> ReadDocument() {
    JsonValue value;
    BATON_RETURN_IF_ERROR(ReadValue(0, &value));
    SkipSpace();
    if (pos_ != text_.size()) return Fail("text after the value");
    return value;
  }

 private:
  absl::Status Fail(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat("json: ", what, " at byte ", pos_));
  }

  void SkipSpace() {
    while (pos_ < text_.size()) {
      const char c = text_[pos_];
      if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
      ++pos_;
    }
  }

  bool Accept(char c) {
    if (pos_ >= text_.size() || text_[pos_] != c) return false;
    ++pos_;
    return true;
  }

  absl::Status ReadValue(int depth, JsonValue* out) {
    if (++num_values_ > limits_.max_values) {
      return absl::ResourceExhaustedError(
          absl::StrCat("json: more than ", limits_.max_values, " values"));
    }
    SkipSpace();
    if (pos_ >= text_.size()) return Fail("the text ends where a value is needed");
    switch (text_[pos_]) {
      case '{':
        return ReadObject(depth, out);
      case '[':
        return ReadArray(depth, out);
      case '"': {
        std::string text;
        BATON_RETURN_IF_ERROR(ReadString(&text));
        *out = JsonValue::String(std::move(text));
        return absl::OkStatus();
      }
      case 't':
        return ReadWord("true", JsonValue(true), out);
      case 'f':
        return ReadWord("false", JsonValue(false), out);
      case 'n':
        return ReadWord("null", JsonValue(), out);
      default:
        return ReadNumber(out);
    }
  }

  absl::Status ReadWord(absl::string_view word, JsonValue value, JsonValue* out) {
    if (text_.substr(pos_, word.size()) != word) return Fail("unknown word");
    pos_ += word.size();
    *out = std::move(value);
    return absl::OkStatus();
  }

  bool SkipDigits() {
    const size_t begin = pos_;
    while (pos_ < text_.size() && text_[pos_] >= '0' && text_[pos_] <= '9') ++pos_;
    return pos_ > begin;
  }

  absl::Status ReadNumber(JsonValue* out) {
    const size_t begin = pos_;
    Accept('-');
    if (!Accept('0') && !SkipDigits()) return Fail("unexpected character");
    if (Accept('.') && !SkipDigits()) return Fail("a digit is missing");
    if (Accept('e') || Accept('E')) {
      if (!Accept('+')) Accept('-');
      if (!SkipDigits()) return Fail("a digit is missing");
    }
    *out = JsonValue::Number(std::string(text_.substr(begin, pos_ - begin)));
    return absl::OkStatus();
  }

  absl::Status Enter(int depth) {
    if (depth >= limits_.max_depth) {
      return absl::ResourceExhaustedError(
          absl::StrCat("json: nested deeper than ", limits_.max_depth, " at byte ", pos_));
    }
    ++pos_;
    SkipSpace();
    return absl::OkStatus();
  }

  absl::Status ReadArray(int depth, JsonValue* out) {
    BATON_RETURN_IF_ERROR(Enter(depth));
    std::vector<JsonValue> items;
    if (!Accept(']')) {
      do {
        BATON_RETURN_IF_ERROR(ReadValue(depth + 1, &items.emplace_back()));
        SkipSpace();
      } while (Accept(','));
      if (!Accept(']')) return Fail("',' or ']' is missing");
    }
    *out = JsonValue::Array(std::move(items));
    return absl::OkStatus();
  }

  absl::Status ReadObject(int depth, JsonValue* out) {
    BATON_RETURN_IF_ERROR(Enter(depth));
    std::vector<JsonMember> members;
    if (!Accept('}')) {
      do {
        SkipSpace();
        if (pos_ >= text_.size() || text_[pos_] != '"') return Fail("a member name is missing");
        JsonMember& member = members.emplace_back();
        BATON_RETURN_IF_ERROR(ReadString(&member.key));
        SkipSpace();
        if (!Accept(':')) return Fail("':' is missing");
        BATON_RETURN_IF_ERROR(ReadValue(depth + 1, &member.value));
        SkipSpace();
      } while (Accept(','));
      if (!Accept('}')) return Fail("',' or '}' is missing");
    }
    BATON_RETURN_IF_ERROR(MergeDuplicates(&members));
    *out = JsonValue::Object(std::move(members));
    return absl::OkStatus();
  }

  absl::Status MergeDuplicates(std::vector<JsonMember>* members) const {
    if (members->size() < 2) return absl::OkStatus();
    absl::flat_hash_map<absl::string_view, size_t> first;
    first.reserve(members->size());
    std::vector<bool> drop;
    for (size_t i = 0; i < members->size(); ++i) {
      const auto [it, inserted] = first.try_emplace((*members)[i].key, i);
      if (inserted) continue;
      if (limits_.reject_duplicate_keys) {
        return Fail("a member name occurs twice in the object that ends");
      }
      drop.resize(members->size(), false);
      drop[i] = true;
      (*members)[it->second].value = std::move((*members)[i].value);
    }
    if (drop.empty()) return absl::OkStatus();
    std::vector<JsonMember> kept;
    for (size_t i = 0; i < members->size(); ++i) {
      if (!drop[i]) kept.push_back(std::move((*members)[i]));
    }
    *members = std::move(kept);
    return absl::OkStatus();
  }

  absl::Status ReadString(std::string* out) {
    ++pos_;  // the opening quote
    while (true) {
      const size_t begin = pos_;
      while (pos_ < text_.size() && IsPlain(text_[pos_])) ++pos_;
      out->append(text_.data() + begin, pos_ - begin);
      if (pos_ >= text_.size()) return Fail("a string does not end");
      if (Accept('"')) return absl::OkStatus();
      if (!Accept('\\')) return Fail("a control character in a string");
      BATON_RETURN_IF_ERROR(ReadEscape(out));
    }
  }

  static bool IsPlain(char c) { return static_cast<uint8_t>(c) >= 0x20 && c != '"' && c != '\\'; }

  absl::Status ReadEscape(std::string* out) {
    static constexpr absl::string_view kNames = "\"\\/bfnrt";
    static constexpr absl::string_view kValues = "\"\\/\b\f\n\r\t";
    if (pos_ >= text_.size()) return Fail("a string does not end");
    const char c = text_[pos_++];
    if (c == 'u') return ReadUnicodeEscape(out);
    const size_t index = kNames.find(c);
    if (index == absl::string_view::npos) return Fail("unknown escape");
    out->push_back(kValues[index]);
    return absl::OkStatus();
  }

  // Four hexadecimal digits, or a value above 0xFFFF when they are not there.
  uint32_t ReadHex4() {
    uint32_t value = 0;
    if (text_.size() - pos_ < 4) return UINT32_MAX;
    const char* begin = text_.data() + pos_;
    const auto [end, error] = std::from_chars(begin, begin + 4, value, 16);
    if (error != std::errc() || end != begin + 4) return UINT32_MAX;
    pos_ += 4;
    return value;
  }

  absl::Status ReadUnicodeEscape(std::string* out) {
    uint32_t c = ReadHex4();
    if (c > 0xFFFF) return Fail("\\u needs four hexadecimal digits");
    if (c >= 0xD800 && c < 0xDC00) {
      uint32_t low = 0;
      if (Accept('\\') && Accept('u')) low = ReadHex4();
      if (low < 0xDC00 || low > 0xDFFF) return Fail("a lone surrogate");
      c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
    } else if (c >= 0xDC00 && c < 0xE000) {
      return Fail("a lone surrogate");
    }
    AppendUtf8(c, out);
    return absl::OkStatus();
  }

  const absl::string_view text_;
  const JsonLimits& limits_;
  size_t pos_ = 0;
  size_t num_values_ = 0;
};

}  // namespace

JsonValue JsonValue::Array(std::vector<JsonValue> items) {
  JsonValue value;
  value.type_ = Type::kArray;
  value.content_ = std::move(items);
  return value;
}

JsonValue JsonValue::Object(std::vector<JsonMember> members) {
  JsonValue value;
  value.type_ = Type::kObject;
  value.content_ = std::move(members);
  return value;
}

const std::string& JsonValue::text() const {
  static const std::string* const kEmpty = new std::string();
  const auto* text = std::get_if<std::string>(&content_);
  return text ? *text : *kEmpty;
}

const std::vector<JsonValue>& JsonValue::items() const {
  static const auto* const kEmpty = new std::vector<JsonValue>();
  const auto* items = std::get_if<std::vector<JsonValue>>(&content_);
  return items ? *items : *kEmpty;
}

const std::vector<JsonMember>& JsonValue::members() const {
  static const auto* const kEmpty = new std::vector<JsonMember>();
  const auto* members = std::get_if<std::vector<JsonMember>>(&content_);
  return members ? *members : *kEmpty;
}

const JsonValue* JsonValue::Find(absl::string_view key) const {
  for (const JsonMember& member : members()) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

absl::StatusOr<int64_t> JsonValue::AsInt64() const {
  int64_t value = 0;
  const std::string& digits = text();
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (!is_number() || error != std::errc() || end != digits.data() + digits.size()) {
    return absl::InvalidArgumentError("json: not a 64-bit integer");
  }
  return value;
}

absl::StatusOr<double> JsonValue::AsDouble() const {
  double value = 0;
  const std::string& digits = text();
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (!is_number() || error != std::errc() || end != digits.data() + digits.size()) {
    return absl::InvalidArgumentError("json: not a number that fits a double");
  }
  return value;
}

absl::StatusOr<JsonValue> ParseJson(absl::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("json: ", text.size(), " bytes, accepted are ", limits.max_bytes));
  }
  if (!IsValidUtf8(text)) return absl::InvalidArgumentError("json: not valid UTF-8");
  return Reader(text, limits).ReadDocument();
}

void AppendJsonString(absl::string_view text, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  out->push_back('"');
  for (const char c : text) {
    switch (c) {
      case '"':
        out->append("\\\"");
        break;
      case '\\':
        out->append("\\\\");
        break;
      case '\b':
        out->append("\\b");
        break;
      case '\f':
        out->append("\\f");
        break;
      case '\n':
        out->append("\\n");
        break;
      case '\r':
        out->append("\\r");
        break;
      case '\t':
        out->append("\\t");
        break;
      default:
        if (static_cast<uint8_t>(c) < 0x20) {
          out->append("\\u00");
          out->push_back(kHex[c >> 4]);
          out->push_back(kHex[c & 15]);
        } else {
          out->push_back(c);
        }
    }
  }
  out->push_back('"');
}

}  // namespace baton::base
