#include "engine/process/grpc_status.h"

#include <string>

#include "grpcpp/support/status.h"
#include "gtest/gtest.h"

namespace baton::process {
namespace {

absl::Status RoundTrip(const absl::Status& status) { return FromGrpcStatus(ToGrpcStatus(status)); }

TEST(GrpcStatusTest, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why");
    EXPECT_EQ(RoundTrip(status).code(), status.code()) << code;
    EXPECT_EQ(RoundTrip(status).message(), status.message()) << code;
  }
}

TEST(GrpcStatusTest, UnknownCodesBecomeUnknown) {
  EXPECT_EQ(FromGrpcStatus(grpc::Status(static_cast<grpc::StatusCode>(77), "x")).code(),
            absl::StatusCode::kUnknown);
  EXPECT_EQ(ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(77), "x")).error_code(),
            grpc::StatusCode::UNKNOWN);
}

TEST(GrpcStatusTest, FieldViolationNamesTheField) {
  const absl::Status status = RoundTrip(FieldViolation("sampling.top_p", "1.01 is not in [0, 1]"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "sampling.top_p: 1.01 is not in [0, 1]");
  ASSERT_EQ(FieldViolations(status).size(), 1u);
  EXPECT_EQ(FieldViolations(status)[0].field, "sampling.top_p");
  EXPECT_EQ(FieldViolations(status)[0].description, "1.01 is not in [0, 1]");
}

TEST(GrpcStatusTest, RetryInfoSurvivesTheRoundTrip) {
  const absl::Status status =
      RoundTrip(WithRetryInfo(absl::ResourceExhaustedError("full"), absl::Milliseconds(1250)));
  EXPECT_EQ(RetryDelay(status), absl::Milliseconds(1250));
  EXPECT_EQ(RetryDelay(absl::ResourceExhaustedError("full")), std::nullopt);
}

TEST(GrpcStatusTest, ErrorInfoIsBesideOtherDetails) {
  absl::Status status = WithRetryInfo(absl::UnavailableError("gone"), absl::Seconds(2));
  status = RoundTrip(WithErrorInfo(std::move(status), "WORKER_LOST", {{"tokens_sent", "12"}}));
  ASSERT_TRUE(GetErrorInfo(status).has_value());
  EXPECT_EQ(GetErrorInfo(status)->reason, "WORKER_LOST");
  EXPECT_EQ(GetErrorInfo(status)->metadata.at("tokens_sent"), "12");
  EXPECT_EQ(RetryDelay(status), absl::Seconds(2));
}

// The bytes are those of google.rpc.Status, so that every client's library reads them: worked out
// by hand.
TEST(GrpcStatusTest, DetailsAreGoogleRpcOnTheWire) {
  const grpc::Status status =
      ToGrpcStatus(WithRetryInfo(absl::ResourceExhaustedError("full"), absl::Seconds(3)));
  const std::string type = "type.googleapis.com/google.rpc.RetryInfo";
  std::string expected = "\x08\x08\x12\x04";
  expected += "full";
  const std::string value = std::string("\x0a\x02\x08\x03", 4);
  const std::string any = std::string("\x0a") + static_cast<char>(type.size()) + type + "\x12" +
                          static_cast<char>(value.size()) + value;
  expected += "\x1a";
  expected += static_cast<char>(any.size());
  expected += any;
  EXPECT_EQ(status.error_details(), expected);
}

TEST(GrpcStatusTest, GarbageDetailsAreIgnored) {
  const absl::Status status =
      FromGrpcStatus(grpc::Status(grpc::StatusCode::INTERNAL, "x", "\xff\xff\xff"));
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(FieldViolations(status).empty());
}

TEST(GrpcStatusTest, MessageIsMadeValidUtf8) {
  EXPECT_EQ(ToGrpcStatus(absl::InternalError("a\xff\x62")).error_message(), "a\xef\xbf\xbd\x62");
}

}  // namespace
}  // namespace baton::process
