#pragma once

// absl::Status <-> grpc::Status, and the details that travel with it (google.rpc.*, in
// grpc-status-details-bin). Inside the project details are payloads of the absl::Status, so they
// survive being passed on.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace grpc {
class Status;
}  // namespace grpc

namespace baton::process {

// Both directions keep code, message and details. A message that is not UTF-8 is made so.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// INVALID_ARGUMENT with a BadRequest.FieldViolation; the message is "field: description".
absl::Status FieldViolation(absl::string_view field, absl::string_view description);
// Adds RetryInfo: a client may try again after `delay`.
absl::Status WithRetryInfo(absl::Status status, absl::Duration delay);
// Reason of the ErrorInfo by which a worker says that not it but its peer in a hand-over has
// failed.
inline constexpr char kPeerFailed[] = "PEER_FAILED";

// Adds ErrorInfo with domain "baton". `reason` is UPPER_SNAKE_CASE.
absl::Status WithErrorInfo(absl::Status status,
                           absl::string_view reason,
                           const std::map<std::string, std::string>& metadata);

struct Violation {
  std::string field;
  std::string description;
};
std::vector<Violation> FieldViolations(const absl::Status& status);
std::optional<absl::Duration> RetryDelay(const absl::Status& status);
struct ErrorInfo {
  std::string reason;
  std::map<std::string, std::string> metadata;
};
std::optional<ErrorInfo> GetErrorInfo(const absl::Status& status);

}  // namespace baton::process
