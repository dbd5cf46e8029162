#include "cli/client.h"

#include <atomic>
#include <csignal>
#include <cstdio>

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

#include "baton/v1/generation.grpc.pb.h"

namespace baton::cli {
namespace {

// Set by Ctrl-C; the reading loop cancels its call then.
std::atomic<grpc::ClientContext*> g_running_call{nullptr};

void CancelRunningCall(int) {
  // TryCancel takes locks, which a signal handler must not; a second Ctrl-C therefore ends the
  // process at once.
  if (grpc::ClientContext* const call = g_running_call.exchange(nullptr)) {
    call->TryCancel();
  } else {
    std::signal(SIGINT, SIG_DFL);
    std::raise(SIGINT);
  }
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

void Collect(const v1::GenerateResponse& message, Answer* answer) {
  if (answer->choices.size() <= message.index()) answer->choices.resize(message.index() + 1);
  Answer::Choice& choice = answer->choices[message.index()];
  choice.text += message.text();
  choice.token_ids.insert(choice.token_ids.end(), message.token_ids().begin(),
                          message.token_ids().end());
  choice.logprobs.insert(choice.logprobs.end(), message.logprobs().begin(),
                         message.logprobs().end());
  answer->request_id = message.request_id();
  if (!message.has_finished()) return;
  choice.finished = message.finished();
  if (!message.finished().has_usage()) return;
  answer->usage = message.finished().usage();
  answer->timings = message.finished().timings();
}

// One Check of grpc.health.v1, by hand: its messages are a string and an enum, both field 1.
bool IsServing(grpc::GenericStub* stub, const std::string& service) {
  const grpc::Slice name(
      absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service));
  const grpc::ByteBuffer request(&name, 1);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
  absl::Notification done;
  bool ok = false;
  stub->UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                  &response, [&](const grpc::Status& status) {
                    ok = status.ok();
                    done.Notify();
                  });
  done.WaitForNotification();
  grpc::Slice answer;
  return ok && response.DumpToSingleSlice(&answer).ok() && answer.size() == 2 &&
         answer.begin()[0] == 0x08 && answer.begin()[1] == 0x01;
}

}  // namespace

struct Client::Impl {
  std::unique_ptr<v1::Generation::Stub> stub;
  std::string authorization;

  void Prepare(absl::Duration timeout, grpc::ClientContext* context) const {
    context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    if (!authorization.empty()) context->AddMetadata("authorization", authorization);
  }
};

Client::Client(const std::string& address, const ClientOptions& options)
    : impl_(std::make_unique<Impl>()) {
  impl_->stub = v1::Generation::NewStub(process::MakeChannel(address, options.security));
  if (!options.token.empty()) impl_->authorization = absl::StrCat("Bearer ", options.token);
}

Client::~Client() = default;

absl::StatusOr<Answer> Client::Generate(
    const v1::GenerateRequest& request,
    absl::Duration timeout,
    const std::function<void(const v1::GenerateResponse&)>& on_delta) {
  grpc::ClientContext context;
  impl_->Prepare(timeout, &context);
  g_running_call = &context;
  const auto old_handler = std::signal(SIGINT, CancelRunningCall);

  Answer answer;
  const absl::Time start = absl::Now();
  bool first = true;
  const auto reader = impl_->stub->Generate(&context, request);
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
    if (first && message.token_ids_size() > 0) {
      answer.client_ttft = absl::Now() - start;
      first = false;
    }
    Collect(message, &answer);
    on_delta(message);
  }
  const grpc::Status status = reader->Finish();
  g_running_call = nullptr;
  std::signal(SIGINT, old_handler);
  answer.client_e2e = absl::Now() - start;
  if (!status.ok()) return FromGrpc(status);
  return answer;
}

absl::StatusOr<v1::GetStatusResponse> Client::GetStatus(absl::Duration timeout) {
  grpc::ClientContext context;
  impl_->Prepare(timeout, &context);
  v1::GetStatusResponse response;
  const grpc::Status status = impl_->stub->GetStatus(&context, v1::GetStatusRequest(), &response);
  if (!status.ok()) return FromGrpc(status);
  return response;
}

bool WaitUntilServing(const std::string& address,
                      const std::string& service,
                      absl::Duration timeout,
                      const std::function<bool()>& keep_waiting) {
  grpc::GenericStub stub(process::MakeChannel(address));
  const absl::Time deadline = absl::Now() + timeout;
  while (absl::Now() < deadline && keep_waiting()) {
    if (IsServing(&stub, service)) return true;
    absl::SleepFor(absl::Milliseconds(50));
  }
  return false;
}

}  // namespace baton::cli
