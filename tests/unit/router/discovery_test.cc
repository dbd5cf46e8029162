#include "router/discovery.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::router {
namespace {

class DiscoveryTest : public testing::Test {
 protected:
  Discovery Make() {
    return Discovery(
        {{WorkerRole::kPrefill, "prefill", 50061}, {WorkerRole::kDecode, "decode", 1}},
        [this](const ServiceName& name) -> absl::StatusOr<std::vector<std::string>> {
          if (name.host == "prefill") return answer_;
          return std::vector<std::string>();
        },
        {.found =
             [this](WorkerRole role, const std::string& address) {
               events_ += "+" + std::string(WorkerRoleName(role)) + address + " ";
             },
         .gone = [this](const std::string& address) { events_ += "-" + address + " "; },
         .alive = [this](const std::string& address) { return alive_.contains(address); }});
  }
  absl::StatusOr<std::vector<std::string>> answer_ = std::vector<std::string>();
  std::set<std::string> alive_;
  std::string events_;
};

TEST_F(DiscoveryTest, FindsEachAddressOnce) {
  Discovery discovery = Make();
  discovery.Step();
  EXPECT_EQ(events_, "") << "a service without workers is no error";
  answer_ = std::vector<std::string>{"a", "b"};
  discovery.Step();
  discovery.Step();
  EXPECT_EQ(events_, "+prefilla +prefillb ");
}

TEST_F(DiscoveryTest, MissingAddressIsGoneWhenItDoesNotAnswerEither) {
  Discovery discovery = Make();
  answer_ = std::vector<std::string>{"a", "b"};
  discovery.Step();
  alive_ = {"a"};
  events_.clear();
  answer_ = std::vector<std::string>();
  discovery.Step();
  discovery.Step();
  EXPECT_EQ(events_, "") << "an answer may be one-sided";
  discovery.Step();
  EXPECT_EQ(events_, "-b ");
  discovery.Step();
  alive_.clear();
  discovery.Step();
  EXPECT_EQ(events_, "-b -a ");
  answer_ = std::vector<std::string>{"b"};
  discovery.Step();
  EXPECT_EQ(events_, "-b -a +prefillb ");
}

TEST_F(DiscoveryTest, FailedResolutionChangesNothing) {
  Discovery discovery = Make();
  answer_ = std::vector<std::string>{"a"};
  discovery.Step();
  events_.clear();
  answer_ = absl::UnavailableError("no name server");
  for (int i = 0; i < 10; ++i) discovery.Step();
  EXPECT_EQ(events_, "");
}

TEST(ResolveByDnsTest, KnowsThisMachineAndNoOther) {
  const auto local = ResolveByDns({WorkerRole::kDecode, "localhost", 7});
  ASSERT_TRUE(local.ok()) << local.status();
  EXPECT_TRUE(std::find(local->begin(), local->end(), "127.0.0.1:7") != local->end() ||
              std::find(local->begin(), local->end(), "[::1]:7") != local->end());
  const auto none = ResolveByDns({WorkerRole::kDecode, "no-such-name.invalid", 7});
  EXPECT_TRUE(!none.ok() || none->empty());
}

}  // namespace
}  // namespace baton::router
