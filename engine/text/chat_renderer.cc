#include "engine/text/chat_renderer.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "engine/base/status_macros.h"
#include "engine/text/python_json.h"

namespace baton::text {
namespace {

constexpr absl::string_view kThinkBegin = "<think>";
constexpr absl::string_view kThinkEnd = "</think>";

constexpr absl::string_view kToolsIntro =
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>";
constexpr absl::string_view kToolsOutro =
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n";
constexpr absl::string_view kSmolLm2System =
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n";

// Python's strip of newlines.
absl::string_view LeftStrip(absl::string_view text) {
  while (absl::StartsWith(text, "\n")) text.remove_prefix(1);
  return text;
}
absl::string_view RightStrip(absl::string_view text) {
  while (absl::EndsWith(text, "\n")) text.remove_suffix(1);
  return text;
}

// The text behind the last `separator`, or all of it.
absl::string_view AfterLast(absl::string_view text, absl::string_view separator) {
  const size_t at = text.rfind(separator);
  return at == absl::string_view::npos ? text : text.substr(at + separator.size());
}

// Collects the prompt and remembers which parts of it are trusted.
class PromptWriter {
 public:
  explicit PromptWriter(bool trust_assistant) : trust_assistant_(trust_assistant) {}

  void Template(absl::string_view text) {
    Trust(prompt_.text.size(), prompt_.text.size() + text.size());
    absl::StrAppend(&prompt_.text, text);
  }
  void Untrusted(absl::string_view text) { absl::StrAppend(&prompt_.text, text); }
  void Assistant(absl::string_view text) {
    if (trust_assistant_) {
      Template(text);
      return;
    }
    const size_t begin = prompt_.text.size();
    absl::StrAppend(&prompt_.text, text);
    for (const absl::string_view marker : {kThinkBegin, kThinkEnd, absl::string_view("<tool_call>"),
                                           absl::string_view("</tool_call>")}) {
      for (size_t at = text.find(marker); at != absl::string_view::npos;
           at = text.find(marker, at + marker.size())) {
        Trust(begin + at, begin + at + marker.size());
      }
    }
  }
  RenderedPrompt Take() { return std::move(prompt_); }

 private:
  void Trust(size_t begin, size_t end) {
    if (begin == end) return;
    if (!prompt_.trusted.empty() && prompt_.trusted.back().end == begin) {
      prompt_.trusted.back().end = end;
    } else {
      prompt_.trusted.push_back({begin, end});
    }
  }

  const bool trust_assistant_;
  RenderedPrompt prompt_;
};

// The four templates of Qwen3.
class Qwen3Renderer {
 public:
  Qwen3Renderer(ChatTemplateKind kind, const ChatInput& input)
      : kind_(kind), input_(input), messages_(input.messages), out_(input.trust_assistant) {}

  absl::StatusOr<RenderedPrompt> Render() {
    BATON_RETURN_IF_ERROR(CheckContents());
    FindLastQuery();
    WriteHead();
    for (size_t i = 0; i < messages_.size(); ++i) {
      const std::string& role = messages_[i].role;
      if (role == "user" || (role == "system" && i > 0)) {
        WriteTurn(role, Content(i));
      } else if (role == "assistant") {
        BATON_RETURN_IF_ERROR(WriteAssistant(i));
      } else if (role == "tool") {
        WriteToolResponse(i);
      }
    }
    if (input_.add_generation_prompt) WriteGenerationPrompt();
    return out_.Take();
  }

 private:
  bool has_reasoning() const { return kind_ != ChatTemplateKind::kQwen3Instruct2507; }
  absl::string_view Content(size_t i) const {
    return messages_[i].content ? absl::string_view(*messages_[i].content) : absl::string_view();
  }

  // The older template fails on any absent content, the others on that of a leading system message.
  absl::Status CheckContents() const {
    for (size_t i = 0; i < messages_.size(); ++i) {
      const std::string& role = messages_[i].role;
      const bool needed =
          kind_ == ChatTemplateKind::kQwen3Older
              ? role == "system" || role == "user" || role == "assistant" || role == "tool"
              : role == "system" && i == 0;
      if (needed && !messages_[i].content)
        return BadMessage(i, "the chat template needs its content");
    }
    return absl::OkStatus();
  }

  // The last user message that is not a tool's response in disguise; the last message if there is
  // none.
  void FindLastQuery() {
    last_query_ = messages_.size() - 1;
    for (size_t i = messages_.size(); i-- > 0;) {
      if (messages_[i].role != "user" || !messages_[i].content) continue;
      const absl::string_view content = Content(i);
      if (absl::StartsWith(content, "<tool_response>") &&
          absl::EndsWith(content, "</tool_response>"))
        continue;
      last_query_ = i;
      return;
    }
  }

  void WriteHead() {
    const bool has_system = messages_[0].role == "system";
    if (input_.tools.empty()) {
      if (has_system) WriteTurn("system", Content(0));
      return;
    }
    out_.Template("<|im_start|>system\n");
    if (has_system) {
      out_.Untrusted(Content(0));
      out_.Template("\n\n");
    }
    out_.Template(kToolsIntro);
    for (const base::JsonValue& tool : input_.tools) {
      out_.Template("\n");
      out_.Untrusted(PythonJson(tool));
    }
    out_.Template(kToolsOutro);
  }

  void WriteTurn(absl::string_view role, absl::string_view content) {
    out_.Template(absl::StrCat("<|im_start|>", role, "\n"));
    out_.Untrusted(content);
    out_.Template("<|im_end|>\n");
  }

  absl::Status WriteAssistant(size_t i) {
    const ChatMessage& message = messages_[i];
    absl::string_view content = Content(i);
    absl::string_view reasoning;
    if (has_reasoning()) {
      if (message.reasoning_content) {
        reasoning = *message.reasoning_content;
      } else if (const size_t end = content.find(kThinkEnd); end != absl::string_view::npos) {
        reasoning = LeftStrip(AfterLast(RightStrip(content.substr(0, end)), kThinkBegin));
        content = LeftStrip(AfterLast(content, kThinkEnd));
      }
    }
    out_.Template("<|im_start|>assistant\n");
    const bool is_last = i + 1 == messages_.size();
    if (has_reasoning() && i > last_query_ && (is_last || !reasoning.empty())) {
      out_.Template("<think>\n");
      out_.Assistant(LeftStrip(RightStrip(reasoning)));
      out_.Template("\n</think>\n\n");
      out_.Assistant(LeftStrip(content));
    } else {
      out_.Assistant(content);
    }
    for (size_t n = 0; n < message.tool_calls.size(); ++n) {
      if (n > 0 || !content.empty()) out_.Template("\n");
      BATON_RETURN_IF_ERROR(WriteToolCall(i, message.tool_calls[n]));
    }
    out_.Template("<|im_end|>\n");
    return absl::OkStatus();
  }

  absl::Status WriteToolCall(size_t i, const ToolCall& call) {
    const auto arguments = base::ParseJson(call.arguments_json);
    if (!arguments.ok())
      return BadMessage(i, absl::StrCat("tool call arguments: ", arguments.status().message()));
    out_.Template("<tool_call>\n{\"name\": \"");
    out_.Assistant(call.name);
    out_.Template("\", \"arguments\": ");
    out_.Assistant(arguments->is_string() ? arguments->text() : PythonJson(*arguments));
    out_.Template("}\n</tool_call>");
    return absl::OkStatus();
  }

  // A run of tool messages shares one user turn.
  void WriteToolResponse(size_t i) {
    if (i == 0 || messages_[i - 1].role != "tool") out_.Template("<|im_start|>user");
    out_.Template("\n<tool_response>\n");
    out_.Untrusted(Content(i));
    out_.Template("\n</tool_response>");
    if (i + 1 == messages_.size() || messages_[i + 1].role != "tool") out_.Template("<|im_end|>\n");
  }

  void WriteGenerationPrompt() {
    out_.Template("<|im_start|>assistant\n");
    if (kind_ == ChatTemplateKind::kQwen3Thinking2507) {
      out_.Template("<think>\n");
    } else if (kind_ != ChatTemplateKind::kQwen3Instruct2507 && input_.enable_thinking == false) {
      out_.Template("<think>\n\n</think>\n\n");
    }
  }

  const ChatTemplateKind kind_;
  const ChatInput& input_;
  const std::vector<ChatMessage>& messages_;
  PromptWriter out_;
  size_t last_query_ = 0;
};

// Every message is <|im_start|>role\ncontent<|im_end|>\n and nothing else.
absl::StatusOr<RenderedPrompt> RenderChatMl(const ChatInput& input,
                                            absl::string_view default_system) {
  PromptWriter out(input.trust_assistant);
  if (input.messages[0].role != "system") out.Template(default_system);
  for (size_t i = 0; i < input.messages.size(); ++i) {
    const ChatMessage& message = input.messages[i];
    if (!message.content) return BadMessage(i, "the chat template needs its content");
    out.Template("<|im_start|>");
    out.Untrusted(message.role);
    out.Template("\n");
    if (message.role == "assistant") {
      out.Assistant(*message.content);
    } else {
      out.Untrusted(*message.content);
    }
    out.Template("<|im_end|>\n");
  }
  if (input.add_generation_prompt) out.Template("<|im_start|>assistant\n");
  return out.Take();
}

}  // namespace

absl::Status BadMessage(size_t index, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("chat: message ", index, ": ", what));
}

absl::StatusOr<RenderedPrompt> RenderChat(ChatTemplateKind kind, const ChatInput& input) {
  switch (kind) {
    case ChatTemplateKind::kSmolLm2:
      return RenderChatMl(input, kSmolLm2System);
    case ChatTemplateKind::kChatMl:
      return RenderChatMl(input, "");
    default:
      return Qwen3Renderer(kind, input).Render();
  }
}

}  // namespace baton::text
