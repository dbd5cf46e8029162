// `baton chat`: a conversation in the terminal, or one turn with --message.

#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <string>

#include "absl/flags/flag.h"
#include "absl/types/optional.h"

#include "cli/access_flags.h"
#include "cli/client.h"
#include "cli/commands.h"
#include "cli/streaming.h"
#include "engine/base/flags.h"

ABSL_FLAG(
    absl::optional<std::string>,
    message,
    absl::nullopt,
    "One user message: answer it and end. Unset: a conversation on standard input, a line a turn.");
ABSL_FLAG(absl::optional<std::string>, system, absl::nullopt, "The system message.");
ABSL_FLAG(absl::optional<bool>,
          enable_thinking,
          absl::nullopt,
          "On a hybrid Qwen3 model: think before answering. Unset: as the template decides.");

namespace baton::cli {
namespace {

void AddMessage(v1::Chat* chat, absl::string_view role, absl::string_view content) {
  v1::ChatMessage* const message = chat->add_messages();
  message->set_role(std::string(role));
  message->set_content(std::string(content));
}

// Answers the conversation so far and appends the answer to it.
absl::Status TakeTurn(Client* client, v1::GenerateRequest* request) {
  absl::StatusOr<Answer> answer = StreamAnswer(client, *request);
  if (!answer.ok()) return answer.status();
  if (!answer->choices.empty())
    AddMessage(request->mutable_chat(), "assistant", answer->choices[0].text);
  return absl::OkStatus();
}

int Converse(Client* client, v1::GenerateRequest* request) {
  const bool terminal = isatty(STDIN_FILENO) != 0;
  std::string line;
  while (true) {
    if (terminal) std::printf("> "), std::fflush(stdout);
    if (!std::getline(std::cin, line)) return 0;
    if (line.empty()) continue;
    AddMessage(request->mutable_chat(), "user", line);
    const absl::Status status = TakeTurn(client, request);
    if (status.ok()) continue;
    if (!terminal) return PrintFailure("chat", status);
    PrintFailure("chat", status);
    request->mutable_chat()->mutable_messages()->RemoveLast();
  }
}

}  // namespace

int RunChat(int argc, char** argv) {
  const base::FlagsOutcome flags = base::HandleFlags(
      argc, argv,
      "baton chat --address HOST:PORT [--message TEXT]: a conversation, answers streamed.",
      {"cli/chat", "cli/generate", "cli/client_flags", "cli/common_flags", "cli/json_flag",
       kAccessFlags, kTlsClientFlags});
  if (!flags.go_on) return flags.exit_code;
  v1::GenerateRequest request;
  if (absl::Status status = FillCommon(&request); !status.ok()) return PrintFailure("chat", status);
  if (const auto thinking = absl::GetFlag(FLAGS_enable_thinking))
    request.mutable_chat()->set_enable_thinking(*thinking);
  if (const auto system = absl::GetFlag(FLAGS_system))
    AddMessage(request.mutable_chat(), "system", *system);
  const absl::StatusOr<ClientOptions> access = AccessFromFlags();
  if (!access.ok()) return PrintFailure("chat", access.status());
  Client client(AddressFlag(), *access);
  const auto message = absl::GetFlag(FLAGS_message);
  if (!message) return Converse(&client, &request);
  AddMessage(request.mutable_chat(), "user", *message);
  const absl::Status status = TakeTurn(&client, &request);
  return status.ok() ? 0 : PrintFailure("chat", status);
}

}  // namespace baton::cli
