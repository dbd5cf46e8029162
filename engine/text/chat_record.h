#pragma once

// Chat requests as JSON: the records of `baton render` and of the test vectors, in the shape of the
// OpenAI API.

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engine/base/json.h"
#include "engine/text/chat_template.h"

namespace baton::text {

struct ChatRecord {
  std::string template_name;  // empty when the record names none
  std::vector<ChatMessage> messages;
  ChatRenderOptions options;
};

// {"template": NAME, "messages": [{"role", "content", "reasoning_content", "tool_calls", "name",
// "tool_call_id"}],
//  "tools": LIST or null, "add_generation_prompt": BOOL, "enable_thinking": BOOL or null}; tool
//  calls as
// {"id", "function": {"name", "arguments"}} or bare, arguments as text or as an object.
// Errors: INVALID_ARGUMENT naming the field.
absl::StatusOr<ChatRecord> ReadChatRecord(const base::JsonValue& json);

}  // namespace baton::text
