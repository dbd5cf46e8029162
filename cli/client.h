#pragma once

// A gRPC client of the router, for the operator's commands.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "baton/v1/generation.pb.h"

#include "engine/process/channel.h"

namespace baton::cli {

// One whole answer of a call: what --json prints.
struct Answer {
  struct Choice {
    std::string text;
    std::vector<uint32_t> token_ids;
    std::vector<v1::TokenLogprob> logprobs;
    v1::Finished finished;
  };
  std::vector<Choice> choices;
  v1::Usage usage;
  v1::Timings timings;
  std::string request_id;
  absl::Duration client_ttft;  // call start -> first token, as this client saw it
  absl::Duration client_e2e;
};

// How a client gets in.
struct ClientOptions {
  process::ChannelSecurity security;
  std::string token;  // sent as a bearer token; empty: none
};

// Thread-compatible.
class Client {
 public:
  Client(const std::string& address, const ClientOptions& options);
  ~Client();

  // Streams an answer; `on_delta` sees each piece of text as it arrives. Ctrl-C cancels the call.
  absl::StatusOr<Answer> Generate(const v1::GenerateRequest& request,
                                  absl::Duration timeout,
                                  const std::function<void(const v1::GenerateResponse&)>& on_delta);
  absl::StatusOr<v1::GetStatusResponse> GetStatus(absl::Duration timeout);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// True once grpc.health.v1 at `address`, in plaintext, says that `service` is SERVING; false when
// `timeout` has passed or `keep_waiting` says no.
bool WaitUntilServing(const std::string& address,
                      const std::string& service,
                      absl::Duration timeout,
                      const std::function<bool()>& keep_waiting);

// One JSON object: text, token_ids, finish_reason, usage, timings (choices, where n > 1).
std::string AnswerJson(const Answer& answer);
// The short table that follows a streamed answer.
std::string AnswerTable(const Answer& answer);
// Prints a failed call and returns the process's exit code.
int PrintFailure(absl::string_view what, const absl::Status& status);

}  // namespace baton::cli
