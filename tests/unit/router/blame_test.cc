#include "router/blame.h"

#include <string>

#include "engine/process/grpc_status.h"
#include "gtest/gtest.h"

namespace baton::router {
namespace {

absl::Status Accusing(absl::Status status) {
  return process::WithErrorInfo(std::move(status), process::kPeerFailed, {});
}

// "P", "D": who is avoided; "!": the breaker hears of it; "": not retried.
std::string Of(Leg reporter, const absl::Status& status, bool accused_before = false) {
  const Blame blame = BlameFor(reporter, status, accused_before);
  return std::string(blame.prefill ? "P" : "") + (blame.decode ? "D" : "") +
         (blame.counts ? "!" : "");
}

TEST(BlameTest, Table) {
  const absl::Status gone = absl::UnavailableError("gone");
  const absl::Status bytes = absl::DataLossError("checksum");
  EXPECT_EQ(Of(Leg::kPrefill, gone), "P!");
  EXPECT_EQ(Of(Leg::kDecode, gone), "D!");
  EXPECT_EQ(Of(Leg::kDecode, absl::CancelledError("server stops")), "D!");
  EXPECT_EQ(Of(Leg::kDecode, absl::AbortedError("x")), "D!");
  // The peer is accused.
  EXPECT_EQ(Of(Leg::kPrefill, Accusing(gone)), "D!");
  EXPECT_EQ(Of(Leg::kDecode, Accusing(gone)), "P!");
  EXPECT_EQ(Of(Leg::kDecode, Accusing(bytes)), "P!");
  EXPECT_EQ(Of(Leg::kPrefill, Accusing(absl::NotFoundError("no such reservation"))), "D!");
  EXPECT_TRUE(BlameFor(Leg::kPrefill, Accusing(absl::InvalidArgumentError("x")), false).retry);
  // By one that accused another before.
  EXPECT_EQ(Of(Leg::kDecode, Accusing(gone), true), "D!");
  EXPECT_EQ(Of(Leg::kPrefill, Accusing(gone), true), "P!");
  // Two that do not fit are both as good as before.
  EXPECT_EQ(Of(Leg::kPrefill, absl::FailedPreconditionError("kv_dtype")), "P");
  EXPECT_EQ(Of(Leg::kPrefill, Accusing(absl::FailedPreconditionError("kv_dtype"))), "P");
  // No other worker would do better.
  for (const absl::Status& status :
       {absl::InvalidArgumentError("x"), absl::InternalError("x"), absl::DeadlineExceededError("x"),
        absl::UnimplementedError("x")}) {
    EXPECT_EQ(Of(Leg::kPrefill, status), "");
    EXPECT_FALSE(BlameFor(Leg::kDecode, status, false).retry);
  }
}

}  // namespace
}  // namespace baton::router
