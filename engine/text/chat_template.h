#pragma once

// Chat messages to the prompt a model was trained on. The known templates are rendered by code of
// our own, chosen by the SHA-256 of the template's source; no template language is interpreted.

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "engine/text/tokenizer.h"

namespace baton::text {

struct ToolCall {
  std::string id;
  std::string name;
  // JSON text: an object (printed anew as Python prints it), or a JSON string that holds one
  // (printed as it is).
  std::string arguments_json;
};

// The fields of baton.v1.ChatMessage.
struct ChatMessage {
  std::string role;  // system, user, assistant, tool
  std::optional<std::string> content;
  std::optional<std::string> reasoning_content;
  std::vector<ToolCall> tool_calls;
  std::string name;
  std::string tool_call_id;
};

struct ChatRenderOptions {
  std::string tools_json;  // JSON text of an array; empty, "null" and "[]" mean no tools
  std::optional<bool> enable_thinking;  // absent: as the template decides
  bool add_generation_prompt = true;
  // False, for a server: roles, tools and tool calls that the template would silently drop are
  // refused; absent content is empty text, also where the template would fail; in the assistant's
  // text only the markers of thinking and tool calls count as added tokens. True: exactly as the
  // official template, and all of the assistant's text is trusted.
  bool like_reference = false;
};

struct RenderedPrompt {
  std::string text;
  // What the template itself and the assistant wrote: only there do added tokens count. Text of
  // system, user and tool messages and tool definitions lies outside, so that nothing written in it
  // becomes a control token.
  std::vector<TrustedRange> trusted;
};

enum class ChatTemplateKind {
  kQwen3,
  kQwen3Older,
  kQwen3Instruct2507,
  kQwen3Thinking2507,
  kSmolLm2,
  kChatMl
};

// Immutable, thread-safe.
class ChatTemplate {
 public:
  // By name: qwen3, qwen3-2025-04, qwen3-instruct-2507, qwen3-thinking-2507, smollm2, chatml.
  // Errors: INVALID_ARGUMENT with the accepted names.
  static absl::StatusOr<ChatTemplate> FromName(absl::string_view name);
  // By the template's source text, which has to be that of one of the first five.
  // Errors: NOT_FOUND when `source` is empty, FAILED_PRECONDITION when it is not known; both name
  // the flag --chat-template.
  static absl::StatusOr<ChatTemplate> FromSource(absl::string_view source);
  // FromName when `name` is not empty, else FromSource of the template in the tokenizer's files.
  static absl::StatusOr<ChatTemplate> Select(absl::string_view name, const Tokenizer& tokenizer);

  // Whether the answer begins inside a thinking block that the prompt opened.
  bool PromptOpensThinking(const ChatRenderOptions& options) const;
  ChatTemplateKind kind() const { return kind_; }
  absl::string_view name() const;

  // Errors: INVALID_ARGUMENT naming the message and what is wrong with it: no messages, a role that
  // is not known, content that the template needs, JSON that does not parse, text that is not
  // UTF-8.
  absl::StatusOr<RenderedPrompt> Render(const std::vector<ChatMessage>& messages,
                                        const ChatRenderOptions& options) const;

 private:
  explicit ChatTemplate(ChatTemplateKind kind) : kind_(kind) {}

  ChatTemplateKind kind_;
};

}  // namespace baton::text
