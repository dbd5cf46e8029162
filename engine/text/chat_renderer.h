#pragma once

// The templates themselves, line for line what the official ones do. Inside engine/text only:
// others use ChatTemplate.

#include <optional>
#include <vector>

#include "absl/status/statusor.h"

#include "engine/base/json.h"
#include "engine/text/chat_template.h"

namespace baton::text {

struct ChatInput {
  std::vector<ChatMessage> messages;  // at least one
  std::vector<base::JsonValue> tools;
  std::optional<bool> enable_thinking;
  bool add_generation_prompt = true;
  bool trust_assistant = false;  // all of its text, or only the markers of thinking and tool calls
};

// INVALID_ARGUMENT naming the message.
absl::Status BadMessage(size_t index, absl::string_view what);

// Errors: INVALID_ARGUMENT naming the message.
absl::StatusOr<RenderedPrompt> RenderChat(ChatTemplateKind kind, const ChatInput& input);

}  // namespace baton::text
