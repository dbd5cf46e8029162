#include "engine/process/grpc_status.h"

#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "grpcpp/support/status.h"

#include "baton/rpc/v1/error_details.pb.h"

#include "engine/base/utf8.h"

namespace baton::process {
namespace {

constexpr char kTypePrefix[] = "type.googleapis.com/";
constexpr char kBadRequest[] = "type.googleapis.com/google.rpc.BadRequest";
constexpr char kRetryInfo[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr char kErrorInfo[] = "type.googleapis.com/google.rpc.ErrorInfo";
// A peer's details beyond this are dropped: they would be copied with every pass of the status.
constexpr int kMaxDetails = 16;

std::string ValidUtf8(absl::string_view text) {
  if (base::IsValidUtf8(text)) return std::string(text);
  std::string out;
  while (!text.empty()) {
    const base::Utf8Step step = base::DecodeUtf8(text);
    base::AppendUtf8(step.kind == base::Utf8Step::kValid ? step.code_point : base::kReplacementChar,
                     &out);
    text.remove_prefix(step.length);
  }
  return out;
}

// The numbers of the codes are the same in gRPC and absl; a number outside them is UNKNOWN.
absl::StatusCode ToAbslCode(int code) {
  return code >= 0 && code <= 16 ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown;
}

template <typename Detail>
std::optional<Detail> ReadDetail(const absl::Status& status, absl::string_view type_url) {
  const absl::optional<absl::Cord> payload = status.GetPayload(type_url);
  Detail detail;
  if (!payload.has_value() || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  rpc::v1::Status details;
  status.ForEachPayload([&](absl::string_view type_url, const absl::Cord& payload) {
    auto* any = details.add_details();
    any->set_type_url(std::string(type_url));
    any->set_value(std::string(payload));
  });
  const auto code =
      static_cast<grpc::StatusCode>(status.raw_code() >= 0 && status.raw_code() <= 16
                                        ? status.raw_code()
                                        : static_cast<int>(grpc::StatusCode::UNKNOWN));
  const std::string message = ValidUtf8(status.message());
  if (details.details_size() == 0) return grpc::Status(code, message);
  details.set_code(code);
  details.set_message(message);
  return grpc::Status(code, message, details.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status out(ToAbslCode(status.error_code()), status.error_message());
  rpc::v1::Status details;
  if (!details.ParseFromString(status.error_details())) return out;
  for (int i = 0; i < details.details_size() && i < kMaxDetails; ++i) {
    const auto& any = details.details(i);
    if (absl::StartsWith(any.type_url(), kTypePrefix))
      out.SetPayload(any.type_url(), absl::Cord(any.value()));
  }
  return out;
}

absl::Status FieldViolation(absl::string_view field, absl::string_view description) {
  absl::Status status = absl::InvalidArgumentError(absl::StrCat(field, ": ", description));
  rpc::v1::BadRequest detail;
  auto* violation = detail.add_field_violations();
  violation->set_field(ValidUtf8(field));
  violation->set_description(ValidUtf8(description));
  status.SetPayload(kBadRequest, absl::Cord(detail.SerializeAsString()));
  return status;
}

absl::Status WithRetryInfo(absl::Status status, absl::Duration delay) {
  rpc::v1::RetryInfo detail;
  const int64_t ns = absl::ToInt64Nanoseconds(delay);
  detail.mutable_retry_delay()->set_seconds(ns / 1'000'000'000);
  detail.mutable_retry_delay()->set_nanos(static_cast<int32_t>(ns % 1'000'000'000));
  status.SetPayload(kRetryInfo, absl::Cord(detail.SerializeAsString()));
  return status;
}

absl::Status WithErrorInfo(absl::Status status,
                           absl::string_view reason,
                           const std::map<std::string, std::string>& metadata) {
  rpc::v1::ErrorInfo detail;
  detail.set_reason(std::string(reason));
  detail.set_domain("baton");
  for (const auto& [key, value] : metadata) (*detail.mutable_metadata())[key] = ValidUtf8(value);
  status.SetPayload(kErrorInfo, absl::Cord(detail.SerializeAsString()));
  return status;
}

std::vector<Violation> FieldViolations(const absl::Status& status) {
  std::vector<Violation> out;
  const auto detail = ReadDetail<rpc::v1::BadRequest>(status, kBadRequest);
  if (!detail.has_value()) return out;
  for (const auto& violation : detail->field_violations())
    out.push_back({violation.field(), violation.description()});
  return out;
}

std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto detail = ReadDetail<rpc::v1::RetryInfo>(status, kRetryInfo);
  if (!detail.has_value()) return std::nullopt;
  return absl::Seconds(detail->retry_delay().seconds()) +
         absl::Nanoseconds(detail->retry_delay().nanos());
}

std::optional<ErrorInfo> GetErrorInfo(const absl::Status& status) {
  const auto detail = ReadDetail<rpc::v1::ErrorInfo>(status, kErrorInfo);
  if (!detail.has_value()) return std::nullopt;
  return ErrorInfo{detail->reason(), {detail->metadata().begin(), detail->metadata().end()}};
}

}  // namespace baton::process
