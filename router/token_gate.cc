#include "router/token_gate.h"

#include <algorithm>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::router {
namespace {

constexpr size_t kMaxFileBytes = size_t{8} << 20;

absl::StatusOr<std::string> ReadTokenFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::InvalidArgumentError("cannot be read");
  std::string text;
  char buffer[4096];
  while (file.read(buffer, sizeof(buffer)) || file.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(file.gcount()));
    if (text.size() > kMaxFileBytes) return absl::InvalidArgumentError("is above 8 MiB");
  }
  if (file.bad()) return absl::InvalidArgumentError("cannot be read");
  return text;
}

}  // namespace

TokenGate::TokenGate(const TokenGateOptions& options)
    : options_(options), shared_(std::make_shared<Shared>()) {}

absl::StatusOr<std::unique_ptr<TokenGate>> TokenGate::Create(const TokenGateOptions& options) {
  std::unique_ptr<TokenGate> gate(new TokenGate(options));
  BATON_RETURN_IF_ERROR(gate->Reload());
  gate->thread_ = std::thread([gate = gate.get()] { gate->Watch(); });
  return gate;
}

TokenGate::~TokenGate() {
  {
    base::MutexLock lock(&mutex_);
    stop_ = true;
    stop_changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void TokenGate::Watch() {
  while (true) {
    {
      base::MutexLock lock(&mutex_);
      if (!stop_) stop_changed_.WaitFor(&mutex_, options_.reload_interval);
      if (stop_) return;
    }
    const absl::Status status = Reload();
    if (!status.ok() && !failing_) {
      BATON_LOG(Error, "the tokens stay as they were: ", status.message());
    }
    failing_ = !status.ok();
  }
}

// The content is compared, not the time of the last change: a mounted secret is a link to a link.
absl::Status TokenGate::Reload() {
  const std::string where = absl::StrCat("--token-file: ", options_.path);
  absl::StatusOr<std::string> text = ReadTokenFile(options_.path);
  if (!text.ok()) return Annotate(text.status(), where);
  if (loaded_ && *text == text_) return absl::OkStatus();
  absl::StatusOr<std::vector<TokenSpec>> tokens = ParseTokens(*text);
  if (!tokens.ok()) return Annotate(tokens.status(), where);
  BATON_LOG(Info, "tokens read", LogField("file", options_.path),
            LogField("tokens", tokens->size()));
  text_ = *std::move(text);
  loaded_ = true;
  base::MutexLock lock(&shared_->mutex);
  shared_->table.Replace(*std::move(tokens));
  return absl::OkStatus();
}

absl::StatusOr<TokenGate::Caller> TokenGate::Enter(absl::string_view authorization, CallCost cost) {
  base::MutexLock lock(&shared_->mutex);
  BATON_ASSIGN_OR_RETURN(
      const TokenTable::Entry entry,
      shared_->table.Enter(authorization, cost, absl::Now(), options_.clock->Now()));
  Caller caller{entry.token->name, entry.token->tenant, nullptr};
  if (cost != CallCost::kAnswer) return caller;
  caller.place = std::shared_ptr<void>(nullptr, [shared = shared_, use = entry.use](void*) {
    base::MutexLock leave(&shared->mutex);
    --use->answers;
  });
  return caller;
}

}  // namespace baton::router
