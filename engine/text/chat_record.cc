#include "engine/text/chat_record.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/text/python_json.h"

namespace baton::text {
namespace {

using base::JsonValue;

absl::Status BadField(absl::string_view field, absl::string_view accepted) {
  return absl::InvalidArgumentError(absl::StrCat("chat record: ", field, " is not ", accepted));
}

// Absent and null leave `out` as it is.
absl::Status ReadText(const JsonValue& object,
                      absl::string_view key,
                      std::optional<std::string>* out) {
  const JsonValue* value = object.Find(key);
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  if (!value->is_string()) return BadField(key, "text");
  *out = value->text();
  return absl::OkStatus();
}

absl::Status ReadText(const JsonValue& object, absl::string_view key, std::string* out) {
  std::optional<std::string> text;
  BATON_RETURN_IF_ERROR(ReadText(object, key, &text));
  if (text) *out = *std::move(text);
  return absl::OkStatus();
}

absl::Status ReadBool(const JsonValue& object, absl::string_view key, std::optional<bool>* out) {
  const JsonValue* value = object.Find(key);
  if (value == nullptr || value->is_null()) return absl::OkStatus();
  if (!value->is_bool()) return BadField(key, "true or false");
  *out = value->is_true();
  return absl::OkStatus();
}

absl::StatusOr<ToolCall> ReadToolCall(const JsonValue& json) {
  const JsonValue* function = json.Find("function");
  const JsonValue& body = function ? *function : json;
  if (!body.is_object()) return BadField("tool call", "an object");
  ToolCall call;
  BATON_RETURN_IF_ERROR(ReadText(json, "id", &call.id));
  BATON_RETURN_IF_ERROR(ReadText(body, "name", &call.name));
  const JsonValue* arguments = body.Find("arguments");
  if (arguments == nullptr) return BadField("arguments of a tool call", "there");
  call.arguments_json = PythonJson(*arguments);
  return call;
}

absl::StatusOr<ChatMessage> ReadMessage(const JsonValue& json) {
  if (!json.is_object()) return BadField("message", "an object");
  ChatMessage message;
  BATON_RETURN_IF_ERROR(ReadText(json, "role", &message.role));
  BATON_RETURN_IF_ERROR(ReadText(json, "content", &message.content));
  BATON_RETURN_IF_ERROR(ReadText(json, "reasoning_content", &message.reasoning_content));
  BATON_RETURN_IF_ERROR(ReadText(json, "name", &message.name));
  BATON_RETURN_IF_ERROR(ReadText(json, "tool_call_id", &message.tool_call_id));
  const JsonValue* calls = json.Find("tool_calls");
  if (calls == nullptr || calls->is_null()) return message;
  if (!calls->is_array()) return BadField("tool_calls", "a list");
  for (const JsonValue& item : calls->items()) {
    BATON_ASSIGN_OR_RETURN(ToolCall call, ReadToolCall(item));
    message.tool_calls.push_back(std::move(call));
  }
  return message;
}

}  // namespace

absl::StatusOr<ChatRecord> ReadChatRecord(const JsonValue& json) {
  if (!json.is_object()) return BadField("it", "an object");
  ChatRecord record;
  BATON_RETURN_IF_ERROR(ReadText(json, "template", &record.template_name));
  const JsonValue* messages = json.Find("messages");
  if (messages == nullptr || !messages->is_array()) return BadField("messages", "a list");
  for (const JsonValue& item : messages->items()) {
    BATON_ASSIGN_OR_RETURN(ChatMessage message, ReadMessage(item));
    record.messages.push_back(std::move(message));
  }
  if (const JsonValue* tools = json.Find("tools")) record.options.tools_json = PythonJson(*tools);
  std::optional<bool> add_generation_prompt;
  BATON_RETURN_IF_ERROR(ReadBool(json, "add_generation_prompt", &add_generation_prompt));
  // Absent is false, as for the official templates.
  record.options.add_generation_prompt = add_generation_prompt.value_or(false);
  BATON_RETURN_IF_ERROR(ReadBool(json, "enable_thinking", &record.options.enable_thinking));
  return record;
}

}  // namespace baton::text
