#include "kvtransfer/transport_terms.h"

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "kvtransfer/unreachable_transports.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Refusal(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(TransportTermsTest, WhatBothOfferIsFine) {
  EXPECT_TRUE(CheckTerms({"prefill", {"shm", "tcp"}, ""}, {"decode", {"tcp"}, ""}).ok());
  EXPECT_TRUE(CheckTerms({"prefill", {"shm", "tcp"}, "tcp"}, {"decode", {"tcp"}, ""}).ok());
}

TEST(TransportTermsTest, NothingInCommonIsRefused) {
  EXPECT_THAT(Refusal(CheckTerms({"prefill", {"shm"}, ""}, {"decode", {"tcp"}, ""})),
              AllOf(HasSubstr("none that both offer"), HasSubstr("prefill offers shm;"),
                    HasSubstr("decode offers tcp")));
}

// Case 16.4
TEST(TransportTermsTest, WhatIsRequiredAndNotOfferedIsRefusedWithBothSidesOffers) {
  EXPECT_THAT(Refusal(CheckTerms({"decode", {"shm", "tcp"}, "shm"}, {"prefill", {"tcp"}, ""})),
              AllOf(HasSubstr("the prefill worker does not offer shm"),
                    HasSubstr("(prefill offers tcp; decode offers shm, tcp and requires shm)")));
}

// Workers of an older version do not say what they have; what they cannot do shows when they try.
TEST(TransportTermsTest, APeerThatDoesNotSayIsNotRefused) {
  EXPECT_TRUE(CheckTerms({"decode", {"shm", "tcp"}, "shm"}, {"prefill", {}, ""}).ok());
}

TEST(TransportTermsTest, AutoPrefersDevicesAndOffersWhatThePoolsAllow) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(TransportsOf("auto", true, true), (Names{"cuda_ipc", "nccl", "shm", "tcp"}));
  EXPECT_EQ(TransportsOf("auto", false, true), (Names{"cuda_ipc", "nccl"}));
  EXPECT_EQ(TransportsOf("auto", true, false), (Names{"shm", "tcp"}));
  EXPECT_EQ(TransportsOf("nccl", true, true), Names{"nccl"});
}

// A decode worker that offers everything, and a prefill worker to meet it.
class MeetingTest : public ::testing::Test {
 protected:
  MeetingTest() {
    pool_ = *base::Buffer::AllocateShared("decode", layout_.pool_bytes());
    receive_.pool = &pool_;
    receive_.layout = layout_;
    receive_.fingerprint = TestFingerprint(layout_);
    receive_.transports = {"shm", "tcp"};
    send_.pool = &pool_;
    send_.layout = layout_;
    send_.hello.set_role("prefill");
    *send_.hello.mutable_fingerprint() = receive_.fingerprint;
    send_.hello.add_transports()->set_name("shm");
    send_.hello.add_transports()->set_name("tcp");
    send_.on_fallback = [this](const TransportFallback& fallback) {
      fallbacks_.push_back(absl::StrCat(fallback.from, " to ", fallback.to, ": ", fallback.reason));
    };
  }
  void StartDecode() {
    receiver_ = *Receiver::Create(receive_, [](ReceiverEvent) {});
  }
  absl::StatusOr<worker::v1::Hello> SayHello() {
    return receiver_->OnPeerHello(send_.hello, &link_, &session_);
  }

  const kv::KvLayout layout_ = TestLayout(kv::KvFormat::kFp8, 8);
  base::Buffer pool_;
  ReceiverOptions receive_;
  SenderOptions send_;
  MemoryLink link_;
  SessionId session_ = 0;
  std::vector<std::string> fallbacks_;
  std::unique_ptr<Receiver> receiver_;
};

// Case 16.4: as between two pods, where the other one's private socket cannot be opened.
TEST_F(MeetingTest, FailingOpenFallsBackOnlyWhereThatIsAllowed) {
  StartDecode();
  worker::v1::Hello hello = *SayHello();
  ASSERT_EQ(hello.transports(0).name(), "shm");
  hello.mutable_transports(0)->set_address("@baton-kv-of-another-namespace");
  {
    auto sender = Sender::Create(send_, hello, &link_);
    ASSERT_TRUE(sender.ok()) << sender.status();
    EXPECT_EQ((*sender)->transport_name(), "tcp");
    EXPECT_GT((*sender)->probe_bytes_per_second(), 0);
  }
  EXPECT_THAT(fallbacks_, ElementsAre("shm to tcp: unreachable"));
  fallbacks_.clear();
  send_.required_transport = "shm";
  EXPECT_THAT(Refusal(Sender::Create(send_, hello, &link_).status()),
              AllOf(HasSubstr("shm: "), HasSubstr("prefill offers shm, tcp and requires shm"),
                    HasSubstr("decode offers shm, tcp")));
  EXPECT_THAT(fallbacks_, IsEmpty()) << "a refusal is no fallback";
}

// As NCCL behind a firewall: what nobody answered is not waited for at each meeting, but tried
// again after a while, by another instance, and where it must be used.
TEST_F(MeetingTest, WhatNobodyAnsweredIsLeftAloneForAWhile) {
  StartDecode();
  base::FakeClock clock;
  UnreachableTransports unreachable;
  send_.clock = &clock;
  send_.unreachable = &unreachable;
  // The transport taken; the reason where there is none.
  const auto meet = [&](bool reachable, const std::string& incarnation) -> std::string {
    worker::v1::Hello hello = *SayHello();
    if (!reachable) hello.mutable_transports(0)->set_address("@baton-kv-of-another-namespace");
    hello.set_incarnation(incarnation);
    const auto sender = Sender::Create(send_, hello, &link_);
    receiver_->OnPeerGone(session_);
    return sender.ok() ? std::string((*sender)->transport_name()) : sender.status().ToString();
  };
  EXPECT_EQ(meet(false, "a"), "tcp");
  clock.Advance(absl::Seconds(40));
  EXPECT_EQ(meet(true, "a"), "tcp");
  EXPECT_THAT(fallbacks_, ElementsAre("shm to tcp: unreachable", "shm to tcp: unreachable"));
  EXPECT_THAT(std::string(unreachable.Find("a", "shm", clock).message()),
              HasSubstr("(40 s ago; tried again in 260 s)"));
  send_.required_transport = "shm";
  EXPECT_EQ(meet(true, "a"), "shm");
  send_.required_transport.clear();
  EXPECT_EQ(meet(true, "b"), "shm");
  EXPECT_EQ(meet(true, "a"), "tcp");
  clock.Advance(UnreachableTransports::kKeptFor - absl::Seconds(40));
  EXPECT_EQ(meet(true, "a"), "shm") << "not put off by the meetings in between";
}

TEST_F(MeetingTest, WhatDidNotAnswerIsTriedAgainWhereNothingElseWorks) {
  StartDecode();
  UnreachableTransports unreachable;
  send_.unreachable = &unreachable;
  worker::v1::Hello hello = *SayHello();
  unreachable.Note(hello.incarnation(), "shm", absl::UnavailableError("silence"), *send_.clock);
  hello.mutable_transports()->RemoveLast();
  const auto sender = Sender::Create(send_, hello, &link_);
  ASSERT_TRUE(sender.ok()) << sender.status();
  EXPECT_EQ((*sender)->transport_name(), "shm");
  EXPECT_THAT(fallbacks_, IsEmpty()) << "nothing better was there";
}

// What is told at once costs nothing to ask again; and a peer that answers in no way is not blamed
// on a transport.
TEST_F(MeetingTest, OnlyWhatNobodyAnsweredIsRemembered) {
  base::FakeClock clock;
  UnreachableTransports unreachable;
  unreachable.Note("a", "nccl", absl::FailedPreconditionError("other version"), clock);
  EXPECT_TRUE(unreachable.Find("a", "nccl", clock).ok());
  unreachable.Note("a", "nccl", absl::UnavailableError("silence"), clock);
  EXPECT_EQ(unreachable.Find("a", "nccl", clock).code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(unreachable.Find("a", "shm", clock).ok());
  StartDecode();
  worker::v1::Hello hello = *SayHello();
  hello.mutable_transports()->RemoveLast();
  hello.mutable_transports(0)->set_address("@baton-kv-of-another-namespace");
  send_.unreachable = &unreachable;
  EXPECT_FALSE(Sender::Create(send_, hello, &link_).ok());
  EXPECT_TRUE(unreachable.Find(hello.incarnation(), "shm", clock).ok());
}

TEST_F(MeetingTest, TheBestTransportThatThePeerDoesNotHaveIsAFallbackToo) {
  receive_.transports = {"tcp", "shm"};
  StartDecode();
  // With the decode worker's offers changed so.
  const auto meet = [&](const std::function<void(worker::v1::Hello*)>& change) {
    fallbacks_.clear();
    worker::v1::Hello hello = *SayHello();
    change(&hello);
    const auto sender = Sender::Create(send_, hello, &link_);
    ASSERT_TRUE(sender.ok()) << sender.status();
    EXPECT_EQ((*sender)->transport_name(), "tcp");
    receiver_->OnPeerGone(session_);
  };
  meet([](worker::v1::Hello*) {});
  EXPECT_THAT(fallbacks_, IsEmpty()) << "the decode worker's order holds";
  // It looked for the best it has, which is less than what this one has.
  meet([](worker::v1::Hello* hello) { hello->mutable_transports(1)->set_name("pigeon"); });
  EXPECT_THAT(fallbacks_, ElementsAre("shm to tcp: not_offered"));
  // It was told to use this one.
  meet([](worker::v1::Hello* hello) { hello->mutable_transports()->RemoveLast(); });
  EXPECT_THAT(fallbacks_, IsEmpty());
}

TEST(TransportTermsTest, EveryFallbackThatCanHappenHasItsSeriesFromTheStart) {
  EXPECT_THAT(PossibleFallbacks({"tcp"}), IsEmpty());
  std::vector<std::string> all;
  for (const TransportFallback& fallback : PossibleFallbacks({"cuda_ipc", "shm", "tcp"}))
    all.push_back(absl::StrCat(fallback.from, ">", fallback.to, " ", fallback.reason));
  EXPECT_EQ(all.size(), 3u * 4u);
  for (const absl::Status& why :
       {absl::NotFoundError(""), absl::UnavailableError(""), absl::DeadlineExceededError(""),
        absl::FailedPreconditionError(""), absl::InvalidArgumentError(""), absl::InternalError(""),
        absl::DataLossError("")}) {
    EXPECT_THAT(all, ::testing::Contains(absl::StrCat("cuda_ipc>shm ", FallbackReason(why))));
  }
}

TEST_F(MeetingTest, WithoutARequirementNothingThatWorksIsUnavailable) {
  StartDecode();
  worker::v1::Hello hello = *SayHello();
  hello.mutable_transports()->RemoveLast();
  hello.mutable_transports(0)->set_address("@baton-kv-of-another-namespace");
  const absl::Status status = Sender::Create(send_, hello, &link_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("decode offers shm"));
}

TEST_F(MeetingTest, DecodeWorkerThatRequiresOneOffersNoOther) {
  receive_.required_transport = "tcp";
  StartDecode();
  const absl::StatusOr<worker::v1::Hello> hello = SayHello();
  ASSERT_TRUE(hello.ok()) << hello.status();
  ASSERT_EQ(hello->transports_size(), 1);
  EXPECT_EQ(hello->transports(0).name(), "tcp");
}

TEST_F(MeetingTest, DecodeWorkerRefusesAPeerWithoutWhatItRequires) {
  receive_.required_transport = "tcp";
  StartDecode();
  send_.hello.mutable_transports()->RemoveLast();
  EXPECT_THAT(Refusal(SayHello().status()), HasSubstr("the prefill worker does not offer tcp"));
  EXPECT_TRUE(receiver_->peers().empty()) << "no session is left of it";
}

TEST_F(MeetingTest, WhatIsRequiredMustBeEnabled) {
  receive_.transports = {"shm"};
  receive_.required_transport = "tcp";
  EXPECT_EQ(Receiver::Create(receive_, [](ReceiverEvent) {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::kvtransfer
