#include "router/route_policy.h"

#include <map>
#include <memory>
#include <random>
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
  view.idle = false;
  view.fingerprint = std::make_shared<worker::v1::LayoutFingerprint>();
  return view;
}

class RoutePolicyTest : public testing::Test {
 protected:
  std::vector<WorkerView> workers_ = {
      View("p1", WorkerRole::kPrefill, 10), View("p2", WorkerRole::kPrefill, 5),
      View("d1", WorkerRole::kDecode, 7), View("d2", WorkerRole::kDecode, 7)};
  RouteRequest request_{.prompt_tokens = 100};
  std::unique_ptr<RoutePolicy> policy_ = *MakeRoutePolicy("least_load", {});
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

TEST_F(RoutePolicyTest, DecodeWorkerWithoutRoomIsLeftForAnotherOrWaitedFor) {
  workers_[2] = View("d1", WorkerRole::kDecode, 0, 2);  // 2 blocks are the prompt, 1 the answer
  auto route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->decode, "d2");
  EXPECT_TRUE(route->decode_has_headroom);
  workers_[3].full = true;
  EXPECT_TRUE(absl::IsResourceExhausted(policy_->Choose(workers_, request_).status()));
  workers_[2].available_blocks = 3;
  EXPECT_EQ(policy_->Choose(workers_, request_)->decode, "d1");
  workers_[2].num_running = 1;  // each sequence may want one more
  EXPECT_TRUE(absl::IsResourceExhausted(policy_->Choose(workers_, request_).status()));
}

TEST_F(RoutePolicyTest, IdleDecodeWorkerIsAskedEvenIfTheFiguresSayNo) {
  workers_[2].idle = true;
  workers_[2].available_blocks = 0;
  workers_[3].available_blocks = 0;
  const auto route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->decode, "d1");
  EXPECT_FALSE(route->decode_has_headroom) << "so prefill waits for its word";
}

TEST_F(RoutePolicyTest, PrefillWorkerWithALongQueueGetsNoMore) {
  workers_[0].load_tokens_max = workers_[1].load_tokens_max = 8;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2");
  workers_[1].load_tokens = 8;
  EXPECT_TRUE(absl::IsResourceExhausted(policy_->Choose(workers_, request_).status()));
  workers_[1].idle = true;  // whatever is counted, nothing runs
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2");
}

TEST_F(RoutePolicyTest, SuspectAndTrippedWorkersAreWaitedFor) {
  workers_[0].health = WorkerHealth::kSuspect;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2");
  workers_[1].tripped = true;
  EXPECT_TRUE(absl::IsResourceExhausted(policy_->Choose(workers_, request_).status()));
  workers_[0].health = WorkerHealth::kDown;
  workers_[1].health = WorkerHealth::kDown;
  EXPECT_TRUE(absl::IsUnavailable(policy_->Choose(workers_, request_).status()));
}

TEST_F(RoutePolicyTest, WorkerThatFailedIsTakenAgainOnlyWhereThereIsNoOther) {
  request_.excluded = {"p2", "d1", "d2"};
  auto route = policy_->Choose(workers_, request_);
  ASSERT_TRUE(route.ok()) << "there is no other decode worker";
  EXPECT_EQ(route->decode, "d1");
  request_.excluded = {"p2"};
  workers_[0].tripped = true;
  EXPECT_TRUE(absl::IsResourceExhausted(policy_->Choose(workers_, request_).status()))
      << "there is one, it only needs time";
}

// Long prompts do not take all prefill workers.
TEST_F(RoutePolicyTest, LongPromptsKeepToTheirShare) {
  request_.is_long = true;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2");
  workers_[1].num_long = 1;
  workers_[1].load_tokens = 1000;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2") << "behind the other long one";
  workers_[1].load_tokens_max = 1000;
  EXPECT_TRUE(absl::IsResourceExhausted(policy_->Choose(workers_, request_).status()));
  request_.is_long = false;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1");
}

TEST_F(RoutePolicyTest, PairsThatDifferAreNotTakenAndTheFieldIsNamed) {
  auto other = std::make_shared<worker::v1::LayoutFingerprint>();
  other->set_rope("theta=1");
  workers_[2].fingerprint = other;
  workers_[2].kind = 1;
  EXPECT_EQ(policy_->Choose(workers_, request_)->decode, "d2");
  workers_[3].fingerprint = other;
  workers_[3].kind = 1;
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

class PrefixPolicyTest : public RoutePolicyTest {
 protected:
  PrefixPolicyTest() {
    policy_ = *MakeRoutePolicy("prefix", {.local_prefill_tokens = 64});
    for (uint32_t i = 0; i < workers_.size(); ++i) workers_[i].slot = i;
    for (WorkerView& worker : workers_) worker.load_tokens = 0;
    request_.prompt_tokens = 1000;
  }
};

TEST_F(PrefixPolicyTest, SessionsStickWhereTheirPrefixIs) {
  request_.cached_blocks = {0, 10, 0, 10};
  const auto route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->prefill, "p2");
  EXPECT_EQ(route->decode, "d2");
  EXPECT_EQ(route->cached_tokens, 640u);
  EXPECT_DOUBLE_EQ(route->predicted_ttft_s, TtftCoefficients().Seconds(640, 1000));
}

TEST_F(PrefixPolicyTest, UntilWaitingCostsMoreThanComputing) {
  request_.cached_blocks = {0, 10, 0, 0};
  const double saved = TtftCoefficients().Seconds(0, 1000) - TtftCoefficients().Seconds(640, 1000);
  workers_[1].wait_s = 0.9 * saved;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2");
  workers_[1].wait_s = 1.1 * saved;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1");
}

TEST_F(PrefixPolicyTest, DecodeKeepsItsSessionsUnlessItHasMuchMoreToDo) {
  request_.cached_blocks = {0, 0, 0, 10};
  workers_[2].load_tokens = 20'000;
  workers_[3].load_tokens = 28'000;
  EXPECT_EQ(policy_->Choose(workers_, request_)->decode, "d2");
  workers_[3].load_tokens = 30'000;
  EXPECT_EQ(policy_->Choose(workers_, request_)->decode, "d1");
}

// Where the others are faster than what is supposed at start, it would never be measured.
TEST_F(PrefixPolicyTest, AWorkerThatHasComputedNothingCountsAsAsGoodAsTheOthers) {
  for (const double per_token_s : {1e-5, 1e-4, 1e-3}) {
    workers_[0].ttft.per_token_s = per_token_s;
    workers_[0].load_tokens = workers_[1].load_tokens = 0;
    workers_[0].cache_blocks = 3;
    workers_[1].ttft_measured = false;
    EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2") << per_token_s;
    workers_[1].wait_s = 1;
    EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1") << "its queue counts";
    workers_[1].wait_s = 0;
  }
}

TEST_F(PrefixPolicyTest, NewSessionsGoWhereTheCacheHoldsLeast) {
  workers_[0].cache_blocks = workers_[2].cache_blocks = 5;
  workers_[0].ttft.per_token_s *= 0.99;  // no matter
  auto route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->prefill, "p2");
  EXPECT_EQ(route->decode, "d2");
  request_.cached_blocks = {1, 0, 0, 0};
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1") << "but this one knows it";
}

TEST_F(PrefixPolicyTest, FasterWorkerIsPreferred) {
  workers_[0].ttft.per_token_s = 3e-4;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p2");
  workers_[1].ttft.per_token2_s = 1e-6;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1");
}

TEST_F(PrefixPolicyTest, DecodeComputesWhatItLacksIfThatIsLittleAndSooner) {
  request_.cached_blocks = {0, 0, 0, 15};  // 960 of 1000
  auto route = policy_->Choose(workers_, request_);
  EXPECT_EQ(route->prefill, "");
  EXPECT_EQ(route->decode, "d2");
  EXPECT_TRUE(route->prefill_locally);
  EXPECT_EQ(route->cached_tokens, 960u);
  request_.cached_blocks = {15, 0, 0, 15};
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1") << "no sooner";
  request_.cached_blocks = {0, 0, 0, 14};
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1") << "104 tokens are too many";
  policy_ = *MakeRoutePolicy("prefix", {.local_prefill_tokens = 0});
  request_.cached_blocks = {0, 0, 0, 15};
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1") << "switched off";
}

TEST_F(PrefixPolicyTest, ShortPromptIsComputedByDecodeWhilePrefillIsBusy) {
  request_.prompt_tokens = 20;
  EXPECT_EQ(policy_->Choose(workers_, request_)->prefill, "p1");
  workers_[0].wait_s = workers_[1].wait_s = 1;
  EXPECT_TRUE(policy_->Choose(workers_, request_)->prefill_locally);
  workers_[2].wait_s = workers_[3].wait_s = 2;
  EXPECT_FALSE(policy_->Choose(workers_, request_)->prefill_locally);
  for (int i : {0, 1}) {
    workers_[i].load_tokens = workers_[i].load_tokens_max = 10;
  }
  EXPECT_TRUE(policy_->Choose(workers_, request_)->prefill_locally) << "no prefill worker has room";
  workers_.erase(workers_.begin(), workers_.begin() + 2);
  EXPECT_TRUE(absl::IsUnavailable(policy_->Choose(workers_, request_).status()));
}

TEST_F(PrefixPolicyTest, TheLastTokenIsAlwaysComputed) {
  request_.prompt_tokens = 128;
  request_.cached_blocks = {0, 2, 0, 0};
  EXPECT_EQ(policy_->Choose(workers_, request_)->cached_tokens, 64u);
}

TEST_F(RoutePolicyTest, PowerOfTwoTakesTheBetterOfTwoDrawn) {
  policy_ = *MakeRoutePolicy("power_of_two", {});
  workers_.clear();
  for (int i = 0; i < 10; ++i)
    workers_.push_back(View("d" + std::to_string(i), WorkerRole::kDecode, i));
  request_.needs_prefill = false;
  std::map<std::string, int> taken;
  for (request_.ticket = 0; request_.ticket < 10000; ++request_.ticket)
    ++taken[policy_->Choose(workers_, request_)->decode];
  EXPECT_EQ(taken["d9"], 0) << "the worst is never the better of two";
  for (int i = 0; i + 2 < 10; ++i)
    EXPECT_GT(taken["d" + std::to_string(i)], taken["d" + std::to_string(i + 2)]) << i;
}

TEST_F(RoutePolicyTest, RoundRobinTakesEachInTurn) {
  policy_ = *MakeRoutePolicy("round_robin", {});
  std::string order;
  for (request_.ticket = 0; request_.ticket < 4; ++request_.ticket)
    order += policy_->Choose(workers_, request_)->prefill;
  EXPECT_EQ(order, "p1p2p1p2");
}

TEST_F(RoutePolicyTest, UnknownNameIsRefusedWithTheKnownOnes) {
  const absl::Status status = MakeRoutePolicy("best", {}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(status.message().find("least_load"), absl::string_view::npos);
}

// Property: whatever the views, a choice is among the workers that are ready, not tripped and not
// full, and is the same when asked again.
TEST_F(RoutePolicyTest, NoPolicyChoosesAWorkerThatMayNotBeChosen) {
  for (const char* name : {"prefix", "least_load", "power_of_two", "round_robin"}) {
    policy_ = *MakeRoutePolicy(name, {});
    for (uint32_t seed = 0; seed < 500; ++seed) {
      std::mt19937 random(seed);
      std::vector<WorkerView> views;
      for (uint32_t i = 0; i < 6; ++i) {
        const WorkerRole role = i % 2 == 0 ? WorkerRole::kPrefill : WorkerRole::kDecode;
        WorkerView view = View("w" + std::to_string(i), role, random() % 100, random() % 8);
        view.slot = i;
        view.health = static_cast<WorkerHealth>(random() % 5);
        view.tripped = random() % 4 == 0;
        view.full = random() % 4 == 0;
        view.load_tokens_max = random() % 2 * 50;
        view.wait_s = random() % 10;
        view.kind = random() % 2;
        views.push_back(view);
      }
      RouteRequest request{.prompt_tokens = 1 + static_cast<uint32_t>(random() % 300)};
      request.cached_blocks = {1, 0, 2, 1};
      request.ticket = seed;
      const auto route = policy_->Choose(views, request);
      if (!route.ok()) continue;
      const auto again = policy_->Choose(views, request);
      ASSERT_EQ(route->prefill + route->decode, again->prefill + again->decode);
      ASSERT_EQ(route->prefill.empty(), route->prefill_locally);
      for (const std::string& address : {route->prefill, route->decode}) {
        if (address.empty()) continue;
        const WorkerView& view = views[address[1] - '0'];
        ASSERT_EQ(view.health, WorkerHealth::kReady);
        ASSERT_FALSE(view.tripped || view.full);
        ASSERT_EQ(view.role == WorkerRole::kPrefill, address == route->prefill);
      }
      if (route->prefill.empty()) continue;
      ASSERT_EQ(views[route->prefill[1] - '0'].kind, views[route->decode[1] - '0'].kind);
    }
  }
}

}  // namespace
}  // namespace baton::router
