// The JSON reader on any bytes: no crash, and what it reads it can print and read again.

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

#include "engine/base/json.h"
#include "engine/base/log.h"
#include "engine/text/chat_record.h"
#include "engine/text/python_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto value = baton::base::ParseJson(text);
  if (!value.ok()) return 0;
  const std::string printed = baton::text::PythonJson(*value);
  // The one thing that Python prints and JSON has no word for.
  if (printed.find("Infinity") == std::string::npos) {
    const auto again = baton::base::ParseJson(printed);
    BATON_CHECK(again.ok() && baton::text::PythonJson(*again) == printed);
  }
  const auto record = baton::text::ReadChatRecord(*value);
  if (!record.ok()) return 0;
  for (const char* name :
       {"qwen3", "qwen3-2025-04", "qwen3-instruct-2507", "qwen3-thinking-2507", "smollm2"}) {
    const auto prompt =
        baton::text::ChatTemplate::FromName(name)->Render(record->messages, record->options);
    if (!prompt.ok()) continue;
    size_t end = 0;
    for (const auto& range : prompt->trusted) {
      BATON_CHECK(range.begin < range.end && range.end <= prompt->text.size());
      end = range.end;
    }
    BATON_CHECK(end > 0);
  }
  return 0;
}
