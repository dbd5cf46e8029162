#pragma once

// The file of tokens, and every call's way past it. The file is read again when it changes.

#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

#include "engine/base/clock.h"
#include "engine/base/mutex.h"
#include "router/token_table.h"

namespace baton::router {

struct TokenGateOptions {
  std::string path;
  absl::Duration reload_interval = absl::Seconds(1);
  const base::Clock* clock = &base::Clock::Real();
};

// Thread-safe.
class TokenGate {
 public:
  // Whom a call is from. `place` is held until the call ends, and may outlive the gate; shared
  // between those who may end it.
  struct Caller {
    std::string name;
    std::string tenant;
    std::shared_ptr<void> place;
  };

  // A file without tokens lets nobody in. Errors: INVALID_ARGUMENT with the path, and those of
  // ParseTokens.
  static absl::StatusOr<std::unique_ptr<TokenGate>> Create(const TokenGateOptions& options);
  ~TokenGate();
  TokenGate(const TokenGate&) = delete;
  TokenGate& operator=(const TokenGate&) = delete;

  // `authorization` is the metadata's or header's value. Errors: as TokenTable::Enter.
  absl::StatusOr<Caller> Enter(absl::string_view authorization, CallCost cost);

 private:
  struct Shared {
    base::Mutex mutex;
    TokenTable table ABSL_GUARDED_BY(mutex);
  };

  explicit TokenGate(const TokenGateOptions& options);
  // A file that cannot be read or parsed changes nothing: the tokens stay as they were, and the log
  // says so once.
  void Watch();
  absl::Status Reload();

  const TokenGateOptions options_;
  const std::shared_ptr<Shared> shared_;  // with the places of open calls
  std::string text_;     // of the file as last taken; of Create's thread, then of Watch's
  bool loaded_ = false;  // likewise
  bool failing_ = false;
  base::Mutex mutex_;
  base::CondVar stop_changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace baton::router
