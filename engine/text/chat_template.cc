#include "engine/text/chat_template.h"

#include <utility>

#include <openssl/sha.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "engine/base/json.h"
#include "engine/base/status_macros.h"
#include "engine/base/utf8.h"
#include "engine/text/chat_renderer.h"

namespace baton::text {
namespace {

struct KnownTemplate {
  ChatTemplateKind kind;
  absl::string_view name;
  absl::string_view sha256;  // of the source text; empty: only by name
};

constexpr KnownTemplate kKnown[] = {
    {ChatTemplateKind::kQwen3, "qwen3",
     "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"},
    {ChatTemplateKind::kQwen3Older, "qwen3-2025-04",
     "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5"},
    {ChatTemplateKind::kQwen3Instruct2507, "qwen3-instruct-2507",
     "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326"},
    {ChatTemplateKind::kQwen3Thinking2507, "qwen3-thinking-2507",
     "3802169b2a02b81e6adb7ab4f64f91ff02db753c8c3a64a01c35192d3a61d8d7"},
    {ChatTemplateKind::kSmolLm2, "smollm2",
     "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"},
    {ChatTemplateKind::kChatMl, "chatml", ""},
};

std::string KnownNames() {
  return absl::StrJoin(
      kKnown, ", ", [](std::string* out, const KnownTemplate& t) { absl::StrAppend(out, t.name); });
}

std::string Sha256Hex(absl::string_view text) {
  uint8_t digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), sizeof(digest)));
}

bool HasToolSupport(ChatTemplateKind kind) {
  return kind != ChatTemplateKind::kSmolLm2 && kind != ChatTemplateKind::kChatMl;
}

absl::Status CheckUtf8(size_t index, const ChatMessage& message) {
  bool valid = base::IsValidUtf8(message.role) && base::IsValidUtf8(message.content.value_or("")) &&
               base::IsValidUtf8(message.reasoning_content.value_or(""));
  for (const ToolCall& call : message.tool_calls) valid = valid && base::IsValidUtf8(call.name);
  return valid ? absl::OkStatus() : BadMessage(index, "not valid UTF-8");
}

// What the template would drop without a word.
absl::Status CheckForServer(ChatTemplateKind kind, size_t index, const ChatMessage& message) {
  if (message.role != "system" && message.role != "user" && message.role != "assistant" &&
      message.role != "tool") {
    return BadMessage(index,
                      absl::StrCat("role \"", absl::CHexEscape(message.role),
                                   "\" is not known; accepted are system, user, assistant, tool"));
  }
  if (message.tool_calls.empty()) return absl::OkStatus();
  if (message.role != "assistant") return BadMessage(index, "only the assistant makes tool calls");
  if (!HasToolSupport(kind))
    return BadMessage(index, "the model's chat template has no tool calls");
  return absl::OkStatus();
}

absl::StatusOr<std::vector<base::JsonValue>> ParseTools(const std::string& tools_json) {
  std::vector<base::JsonValue> tools;
  if (tools_json.empty()) return tools;
  auto value = base::ParseJson(tools_json);
  if (!value.ok()) return Annotate(value.status(), "chat: tools");
  if (!value->is_null() && !value->is_array()) {
    return absl::InvalidArgumentError("chat: tools are not an array");
  }
  return value->items();
}

}  // namespace

absl::StatusOr<ChatTemplate> ChatTemplate::FromName(absl::string_view name) {
  for (const KnownTemplate& known : kKnown) {
    if (known.name == name) return ChatTemplate(known.kind);
  }
  return absl::InvalidArgumentError(absl::StrCat("chat template \"", absl::CHexEscape(name),
                                                 "\" is not known; accepted are ", KnownNames()));
}

absl::StatusOr<ChatTemplate> ChatTemplate::FromSource(absl::string_view source) {
  if (source.empty()) {
    return absl::NotFoundError(absl::StrCat(
        "the model's files have no chat template; name one with --chat-template: ", KnownNames()));
  }
  const std::string sha256 = Sha256Hex(source);
  for (const KnownTemplate& known : kKnown) {
    if (known.sha256 == sha256) return ChatTemplate(known.kind);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the model's chat template (sha256 ", sha256,
                   ") is not known; name the one it follows with --chat-template: ", KnownNames()));
}

absl::StatusOr<ChatTemplate> ChatTemplate::Select(absl::string_view name,
                                                  const Tokenizer& tokenizer) {
  return name.empty() ? FromSource(tokenizer.chat_template()) : FromName(name);
}

absl::string_view ChatTemplate::name() const {
  for (const KnownTemplate& known : kKnown) {
    if (known.kind == kind_) return known.name;
  }
  return "";
}

bool ChatTemplate::PromptOpensThinking(const ChatRenderOptions& options) const {
  return kind_ == ChatTemplateKind::kQwen3Thinking2507 && options.add_generation_prompt;
}

absl::StatusOr<RenderedPrompt> ChatTemplate::Render(const std::vector<ChatMessage>& messages,
                                                    const ChatRenderOptions& options) const {
  if (messages.empty()) return absl::InvalidArgumentError("chat: no messages");
  ChatInput input;
  BATON_ASSIGN_OR_RETURN(input.tools, ParseTools(options.tools_json));
  if (!options.like_reference && !input.tools.empty() && !HasToolSupport(kind_)) {
    return absl::InvalidArgumentError("chat: the model's chat template has no tools");
  }
  input.messages = messages;
  for (size_t i = 0; i < messages.size(); ++i) {
    BATON_RETURN_IF_ERROR(CheckUtf8(i, messages[i]));
    if (options.like_reference) continue;
    BATON_RETURN_IF_ERROR(CheckForServer(kind_, i, messages[i]));
    if (!messages[i].content) input.messages[i].content = "";
  }
  input.enable_thinking = options.enable_thinking;
  input.add_generation_prompt = options.add_generation_prompt;
  input.trust_assistant = options.like_reference;
  return RenderChat(kind_, input);
}

}  // namespace baton::text
