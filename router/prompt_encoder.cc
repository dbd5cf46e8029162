#include "router/prompt_encoder.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/status_macros.h"
#include "engine/process/grpc_status.h"

namespace baton::router {
namespace {

using process::FieldViolation;

absl::Status CheckSize(absl::string_view field, size_t bytes, size_t max_bytes) {
  if (bytes <= max_bytes) return absl::OkStatus();
  return FieldViolation(
      field, absl::StrCat(bytes, " bytes; at most ", max_bytes, " can fit into the context"));
}

std::vector<text::ChatMessage> MessagesOf(const v1::Chat& chat) {
  std::vector<text::ChatMessage> out;
  for (const v1::ChatMessage& message : chat.messages()) {
    text::ChatMessage copy;
    copy.role = message.role();
    if (message.has_content()) copy.content = message.content();
    if (message.has_reasoning_content()) copy.reasoning_content = message.reasoning_content();
    for (const v1::ToolCall& call : message.tool_calls()) {
      copy.tool_calls.push_back({call.id(), call.name(), call.arguments_json()});
    }
    copy.name = message.name();
    copy.tool_call_id = message.tool_call_id();
    out.push_back(std::move(copy));
  }
  return out;
}

absl::StatusOr<EncodedPrompt> EncodeChat(const v1::Chat& chat,
                                         const ModelFacts& facts,
                                         size_t max_text_bytes) {
  if (!facts.chat.has_value()) return facts.chat_refusal;
  BATON_RETURN_IF_ERROR(CheckSize("chat", chat.ByteSizeLong(), max_text_bytes));
  text::ChatRenderOptions options;
  options.tools_json = chat.tools_json();
  if (chat.has_enable_thinking()) options.enable_thinking = chat.enable_thinking();
  if (chat.has_add_generation_prompt())
    options.add_generation_prompt = chat.add_generation_prompt();
  absl::StatusOr<text::RenderedPrompt> rendered = facts.chat->Render(MessagesOf(chat), options);
  if (absl::IsInvalidArgument(rendered.status()))
    return FieldViolation("chat", rendered.status().message());
  if (!rendered.ok()) return rendered.status();
  EncodedPrompt out;
  out.ids = facts.tokenizer->EncodeWithTrusted(rendered->text, rendered->trusted);
  out.text = std::move(rendered->text);
  return out;
}

EncodedPrompt EncodeText(const v1::GenerateRequest& request, const text::Tokenizer& tokenizer) {
  EncodedPrompt out;
  out.ids =
      tokenizer.Encode(request.text(), request.parse_special() ? text::SpecialPolicy::kParse
                                                               : text::SpecialPolicy::kLiteral);
  if (tokenizer.add_bos() && tokenizer.bos_id().has_value())
    out.ids.insert(out.ids.begin(), *tokenizer.bos_id());
  return out;
}

}  // namespace

absl::StatusOr<EncodedPrompt> EncodePrompt(const v1::GenerateRequest& request,
                                           const ModelFacts& facts,
                                           size_t max_text_bytes) {
  switch (request.prompt_case()) {
    case v1::GenerateRequest::kText:
      BATON_RETURN_IF_ERROR(CheckSize("text", request.text().size(), max_text_bytes));
      return EncodeText(request, *facts.tokenizer);
    case v1::GenerateRequest::kChat:
      return EncodeChat(request.chat(), facts, max_text_bytes);
    case v1::GenerateRequest::kTokenIds:
      return EncodedPrompt{{request.token_ids().ids().begin(), request.token_ids().ids().end()},
                           ""};
    case v1::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return FieldViolation("prompt", "one of text, token_ids and chat is needed");
}

EncoderPool::EncoderPool(const ModelFacts* facts, int num_threads, size_t max_queue)
    : facts_(facts), queue_(max_queue) {
  for (int i = 0; i < num_threads; ++i) {
    threads_.emplace_back([this] {
      while (auto work = queue_.Pop()) (*work)();
    });
  }
}

EncoderPool::~EncoderPool() {
  queue_.Close();
  for (std::thread& thread : threads_) thread.join();
}

void EncoderPool::Encode(std::shared_ptr<const v1::GenerateRequest> request,
                         size_t max_text_bytes,
                         Done done) {
  if (request->prompt_case() == v1::GenerateRequest::kTokenIds) {  // nothing to compute
    done(EncodePrompt(*request, *facts_, max_text_bytes));
    return;
  }
  const bool queued = Run([this, request = std::move(request), max_text_bytes, done] {
    done(EncodePrompt(*request, *facts_, max_text_bytes));
  });
  if (!queued) done(absl::ResourceExhaustedError("too many prompts wait to be encoded"));
}

bool EncoderPool::Run(std::function<void()> work) { return queue_.TryPush(std::move(work)); }

}  // namespace baton::router
