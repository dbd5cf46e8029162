#include "kvtransfer/transport_terms.h"

#include <functional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
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
