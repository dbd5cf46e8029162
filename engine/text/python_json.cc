#include "engine/text/python_json.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace baton::text {
namespace {

using base::JsonMember;
using base::JsonValue;

// repr(value) of Python: the shortest digits that read back equal, as 123.4 for exponents from -4
// to 15, else as 1.234e+20.
void AppendFloat(double value, std::string* out) {
  if (!std::isfinite(value)) {
    out->append(value > 0 ? "Infinity" : "-Infinity");
    return;
  }
  char buffer[40];
  const auto end =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  absl::string_view text(buffer, static_cast<size_t>(end - buffer));
  const size_t e = text.find('e');
  int exponent = 0;
  const bool exponent_read = absl::SimpleAtoi(text.substr(e + 1), &exponent);
  if (!exponent_read || exponent < -4 || exponent >= 16) {
    out->append(text.data(), text.size());  // to_chars too writes a sign and two digits at least
    return;
  }
  std::string digits;
  for (const char c : text.substr(0, e)) {
    if (c == '-') out->push_back('-');
    if (c >= '0' && c <= '9') digits.push_back(c);
  }
  if (exponent < 0) {
    absl::StrAppend(out, "0.", std::string(static_cast<size_t>(-exponent - 1), '0'), digits);
    return;
  }
  const size_t point = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= point) digits.append(point + 1 - digits.size(), '0');
  absl::StrAppend(out, absl::string_view(digits).substr(0, point), ".",
                  absl::string_view(digits).substr(point));
}

void AppendNumber(const std::string& text, std::string* out) {
  if (text.find_first_of(".eE") == std::string::npos) {
    out->append(text == "-0" ? "0" : text);
    return;
  }
  // strtod and not from_chars: too large and too small become infinity and zero, as in Python.
  AppendFloat(std::strtod(text.c_str(), nullptr), out);
}

void AppendValue(const JsonValue& value, std::string* out) {
  switch (value.type()) {
    case JsonValue::Type::kNull:
      out->append("null");
      return;
    case JsonValue::Type::kFalse:
      out->append("false");
      return;
    case JsonValue::Type::kTrue:
      out->append("true");
      return;
    case JsonValue::Type::kNumber:
      AppendNumber(value.text(), out);
      return;
    case JsonValue::Type::kString:
      base::AppendJsonString(value.text(), out);
      return;
    case JsonValue::Type::kArray: {
      const char* separator = "[";
      for (const JsonValue& item : value.items()) {
        out->append(separator);
        AppendValue(item, out);
        separator = ", ";
      }
      out->append(value.items().empty() ? "[]" : "]");
      return;
    }
    case JsonValue::Type::kObject: {
      const char* separator = "{";
      for (const JsonMember& member : value.members()) {
        out->append(separator);
        base::AppendJsonString(member.key, out);
        out->append(": ");
        AppendValue(member.value, out);
        separator = ", ";
      }
      out->append(value.members().empty() ? "{}" : "}");
      return;
    }
  }
}

}  // namespace

std::string PythonJson(const base::JsonValue& value) {
  std::string text;
  AppendValue(value, &text);
  return text;
}

}  // namespace baton::text
