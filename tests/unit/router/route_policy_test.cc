#include "router/route_policy.h"

#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

WorkerView View(const std::string& address, WorkerRole role, uint64_t load, uint32_t blocks = 100) {
  WorkerView view;
  view.address = address;
  view.role = role;
  view.health = WorkerHealth::kReady;
  view.load_tokens = load;
  view.available_blocks = blocks;
  view.fingerprint = std::make_shared<worker::v1::LayoutFingerprint>();
  return view;
}

class RoutePolicyTest : public testing::Test {
 protected:
  std::vector<WorkerView> workers_ = {
      View("p1", WorkerRole::kPrefill, 10), View("p2", WorkerRole::kPrefill, 5),
      View("d1", WorkerRole::kDecode, 7), View("d2", WorkerRole::kDecode, 7)};
  RouteRequest request_{.prompt_tokens = 100};
  std::unique_ptr<RoutePolicy> policy_ = MakeLeastLoadPolicy();
};

TEST_F(RoutePolicyTest, TakesThePairWithTheLeastLoadAndOfEqualsTheFirst) {
  const auto route = policy_->Choose(workers_, request_);
  ASSERT_TRUE(route.ok());
  EXPECT_EQ(route->prefill, "p2");
  EXPECT_EQ(route->decode, "d1");
}

TEST_F(RoutePolicyTest, TakesOnlyReadyWorkersThatHaveNotFailed) {
  workers_[1].health = WorkerHealth::kDraining;
  request_.excluded = {"d1"};
  const auto route = policy_->Choose(workers_, request_);
  ASSERT_TRUE(route.ok());
  EXPECT_EQ(route->prefill, "p1");
  EXPECT_EQ(route->decode, "d2");
}

TEST_F(RoutePolicyTest, HeadroomIsRoomForPromptAndAnswer) {
  workers_[2] = View("d1", WorkerRole::kDecode, 0, 3);
  EXPECT_TRUE(policy_->Choose(workers_, request_)->decode_has_headroom);  // 2 blocks, and one more
  workers_[2].available_blocks = 2;
  EXPECT_FALSE(policy_->Choose(workers_, request_)->decode_has_headroom);
}

TEST_F(RoutePolicyTest, PairsThatDifferAreNotTakenAndTheFieldIsNamed) {
  auto other = std::make_shared<worker::v1::LayoutFingerprint>();
  other->set_rope("theta=1");
  workers_[2].fingerprint = other;
  EXPECT_EQ(policy_->Choose(workers_, request_)->decode, "d2");
  workers_[3].fingerprint = other;
  const absl::Status status = policy_->Choose(workers_, request_).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_NE(std::string(status.message()).find("rope"), std::string::npos);
}

// Case 11.4: one field at a time.
TEST_F(RoutePolicyTest, EveryFieldOfTheFingerprintCountsButTp) {
  const auto* type = worker::v1::LayoutFingerprint::descriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const auto* field = type->field(i);
    worker::v1::LayoutFingerprint a, b;
    if (field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_STRING) {
      b.GetReflection()->SetString(&b, field, "x");
    } else {
      b.GetReflection()->SetUInt32(&b, field, 1);
    }
    EXPECT_EQ(FingerprintDifference(a, b), field->name() == "tp" ? "" : field->name());
  }
}

TEST_F(RoutePolicyTest, OneRoleMayBeEnough) {
  request_.needs_decode = false;
  auto route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->prefill, "p2");
  EXPECT_EQ(route->decode, "");
  request_ = {.prompt_tokens = 100, .needs_prefill = false};
  route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->prefill, "");
  EXPECT_EQ(route->decode, "d1");
}

TEST_F(RoutePolicyTest, NoReadyWorkerIsUnavailable) {
  workers_.resize(2);
  EXPECT_TRUE(absl::IsUnavailable(policy_->Choose(workers_, request_).status()));
  EXPECT_TRUE(absl::IsUnavailable(policy_->Choose({}, request_).status()));
}

// Case 11.7: a prompt above a worker's own limit goes to another, or is refused.
TEST_F(RoutePolicyTest, PromptTooLongForAWorkerGoesToAnother) {
  workers_[1].max_prompt_tokens = 99;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1");
  workers_[0].max_prompt_tokens = 99;
  EXPECT_TRUE(absl::IsInvalidArgument(policy_->Choose(workers_, request_).status()));
}

}  // namespace
}  // namespace baton::router
