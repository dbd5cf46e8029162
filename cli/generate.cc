// `baton generate`: one prompt in, one streamed answer out.

#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"

#include "cli/access_flags.h"
#include "cli/client.h"
#include "cli/client_flags.h"
#include "cli/commands.h"
#include "cli/streaming.h"
#include "engine/base/flags.h"

ABSL_FLAG(absl::optional<std::string>,
          prompt,
          absl::nullopt,
          "The prompt, raw text. Unset: read from standard input.");
ABSL_FLAG(std::vector<std::string>,
          prompt_ids,
          {},
          "The prompt as token ids, comma-separated, instead of text.");
ABSL_FLAG(bool,
          parse_special,
          false,
          "Control tokens written in the prompt become control tokens.");
ABSL_FLAG(bool, show_special, false, "Control tokens appear in the text.");
ABSL_FLAG(bool, include_stop, false, "The text carries the stop string that finished it.");
ABSL_FLAG(bool, stats, false, "A table of timings after the streamed answer.");
ABSL_FLAG(std::string,
          cache_salt,
          "",
          "Prefix-cache blocks are shared only between requests with the same salt.");

namespace baton::cli {

absl::Status FillCommon(v1::GenerateRequest* request) {
  request->set_show_special(absl::GetFlag(FLAGS_show_special));
  request->set_include_stop(absl::GetFlag(FLAGS_include_stop));
  request->set_cache_salt(absl::GetFlag(FLAGS_cache_salt));
  return FillSampling(request);
}

absl::StatusOr<Answer> StreamAnswer(Client* client, const v1::GenerateRequest& request) {
  const bool json = JsonFlag();
  uint32_t shown_index = 0;
  absl::StatusOr<Answer> answer =
      client->Generate(request, TimeoutFlag(), [&](const v1::GenerateResponse& message) {
        if (json) return;
        // Several answers arrive interleaved; only the first is streamed, the others follow when
        // complete.
        if (message.index() != shown_index) return;
        std::fwrite(message.text().data(), 1, message.text().size(), stdout);
        std::fflush(stdout);
      });
  if (!answer.ok()) return answer;
  if (json) {
    std::printf("%s\n", AnswerJson(*answer).c_str());
    return answer;
  }
  std::printf("\n");
  for (size_t i = 1; i < answer->choices.size(); ++i)
    std::printf("--- answer %zu\n%s\n", i, answer->choices[i].text.c_str());
  if (absl::GetFlag(FLAGS_stats)) std::printf("\n%s", AnswerTable(*answer).c_str());
  return answer;
}

namespace {

absl::Status FillPrompt(v1::GenerateRequest* request) {
  for (const std::string& word : absl::GetFlag(FLAGS_prompt_ids)) {
    uint32_t id = 0;
    if (!absl::SimpleAtoi(word, &id))
      return absl::InvalidArgumentError(
          absl::StrCat("--prompt-ids: \"", word, "\" is not a token id"));
    request->mutable_token_ids()->add_ids(id);
  }
  if (request->has_token_ids()) return absl::OkStatus();
  request->set_parse_special(absl::GetFlag(FLAGS_parse_special));
  const absl::optional<std::string> prompt = absl::GetFlag(FLAGS_prompt);
  request->set_text(prompt ? *prompt : std::string(std::istreambuf_iterator<char>(std::cin), {}));
  return absl::OkStatus();
}

}  // namespace

int RunGenerate(int argc, char** argv) {
  const base::FlagsOutcome flags = base::HandleFlags(
      argc, argv, "baton generate --address HOST:PORT --prompt TEXT: streams one answer.",
      {"cli/generate", "cli/client_flags", "cli/common_flags", "cli/json_flag", kAccessFlags,
       kTlsClientFlags});
  if (!flags.go_on) return flags.exit_code;
  v1::GenerateRequest request;
  if (absl::Status status = FillPrompt(&request); !status.ok())
    return PrintFailure("generate", status);
  if (absl::Status status = FillCommon(&request); !status.ok())
    return PrintFailure("generate", status);
  const absl::StatusOr<ClientOptions> access = AccessFromFlags();
  if (!access.ok()) return PrintFailure("generate", access.status());
  Client client(AddressFlag(), *access);
  const absl::StatusOr<Answer> answer = StreamAnswer(&client, request);
  return answer.ok() ? 0 : PrintFailure("generate", answer.status());
}

}  // namespace baton::cli
