#pragma once

// Where a prefill worker gets its senders from.

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvtransfer/sender.h"

namespace baton::prefill {

// Finds the sender to a decode worker, opening a session when there is none. Thread-safe.
class PeerConnector {
 public:
  // Shared: the session and the transfers on it end independently of one another.
  using Found = std::function<void(absl::StatusOr<std::shared_ptr<kvtransfer::Sender>>)>;
  virtual ~PeerConnector() = default;
  // Calls `found` exactly once, from any thread, within a bounded time. `incarnation` names the
  // instance that is meant: a worker restarted on the same address is another one, and its
  // predecessor's sessions are dropped. Errors: UNAVAILABLE, FAILED_PRECONDITION naming the
  // fingerprint field that differs.
  virtual void Connect(const std::string& address, const std::string& incarnation, Found found) = 0;
};

}  // namespace baton::prefill
