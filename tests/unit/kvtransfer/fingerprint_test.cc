#include "kvtransfer/fingerprint.h"

#include <functional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using ::testing::HasSubstr;
using worker::v1::LayoutFingerprint;

struct FieldCase {
  const char* field;
  std::function<void(LayoutFingerprint*)> change;
};

const std::vector<FieldCase>& Fields() {
  static const auto* const fields = new std::vector<FieldCase>{
      {"model", [](auto* print) { print->set_model("x"); }},
      {"tokenizer", [](auto* print) { print->set_tokenizer("x"); }},
      {"weight_dtype", [](auto* print) { print->set_weight_dtype("int8"); }},
      {"activation_dtype", [](auto* print) { print->set_activation_dtype("int8"); }},
      {"sum_order_version", [](auto* print) { print->set_sum_order_version(2); }},
      {"kv_dtype", [](auto* print) { print->set_kv_dtype("bf16"); }},
      {"kv_scales", [](auto* print) { print->set_kv_scales("x"); }},
      {"block_tokens", [](auto* print) { print->set_block_tokens(32); }},
      {"rope", [](auto* print) { print->set_rope("x"); }},
      {"num_layers", [](auto* print) { print->set_num_layers(99); }},
      {"num_kv_heads", [](auto* print) { print->set_num_kv_heads(99); }},
      {"head_dim", [](auto* print) { print->set_head_dim(99); }},
      {"tp", [](auto* print) { print->set_tp(3); }},
  };
  return *fields;
}

TEST(FingerprintTest, EveryFieldOfTheMessageIsCompared) {
  EXPECT_EQ(static_cast<size_t>(LayoutFingerprint::descriptor()->field_count()), Fields().size());
  for (int i = 0; i < LayoutFingerprint::descriptor()->field_count(); ++i) {
    EXPECT_EQ(LayoutFingerprint::descriptor()->field(i)->name(), Fields()[i].field);
  }
}

// Case 11.4: one difference at a time, on each side; the status names the field.
TEST(FingerprintTest, OneDifferentFieldIsRefusedByName) {
  const LayoutFingerprint ours = TestFingerprint(TestLayout(kv::KvFormat::kFp8, 8));
  EXPECT_TRUE(CompareFingerprints(ours, ours).ok());
  for (const FieldCase& field : Fields()) {
    LayoutFingerprint other = ours;
    field.change(&other);
    for (const absl::Status& status :
         {CompareFingerprints(ours, other), CompareFingerprints(other, ours)}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("field=") + field.field));
    }
  }
}

// Blocks are re-sharded on their way, so tp may be 1 or 2 on either side; all else must be equal
// then too.
TEST(FingerprintTest, TpMayDifferAndNothingElse) {
  const LayoutFingerprint one = TestFingerprint(TestLayout(kv::KvFormat::kFp8, 8));
  LayoutFingerprint two = one;
  two.set_tp(2);
  EXPECT_TRUE(CompareFingerprints(one, two).ok());
  EXPECT_TRUE(CompareFingerprints(two, one).ok());
  EXPECT_TRUE(CompareFingerprints(two, two).ok());
  for (const FieldCase& field : Fields()) {
    LayoutFingerprint other = two;
    field.change(&other);
    EXPECT_THAT(std::string(CompareFingerprints(one, other).message()),
                HasSubstr(std::string("field=") + field.field));
  }
}

TEST(FingerprintTest, TpMustDivideTheKvHeads) {
  LayoutFingerprint ours = TestFingerprint(TestLayout(kv::KvFormat::kFp8, 8));
  ours.set_num_kv_heads(3);
  LayoutFingerprint peer = ours;
  peer.set_tp(2);
  EXPECT_EQ(CompareFingerprints(ours, peer),
            absl::FailedPreconditionError(
                "fingerprint: field=tp ours=1 peer=2 supported=1,2 num_kv_heads=3"));
  peer.set_tp(0);
  EXPECT_EQ(CompareFingerprints(ours, peer).code(), absl::StatusCode::kFailedPrecondition);
}

// Case 11.4, at the door of the decode worker and of the sender.
TEST(FingerprintTest, BothSidesRefuseAPeerThatDiffers) {
  DecodeSide decode("shm", TestLayout(kv::KvFormat::kFp8, 8));
  MemoryLink link;
  base::Buffer pool = *base::Buffer::Allocate(TestLayout(kv::KvFormat::kFp8, 8).pool_bytes());
  for (const FieldCase& field : Fields()) {
    worker::v1::Hello hello;
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = TestFingerprint(decode.layout());
    SessionId session = 0;
    worker::v1::Hello answer = *decode.receiver().OnPeerHello(hello, &link, &session);
    decode.receiver().OnPeerGone(session);
    field.change(answer.mutable_fingerprint());
    SenderOptions options;
    options.pool = &pool;
    options.layout = decode.layout();
    options.hello = hello;
    const absl::Status at_sender = Sender::Create(options, answer, &link).status();
    EXPECT_EQ(at_sender.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(at_sender.message()), HasSubstr(std::string("field=") + field.field));

    field.change(hello.mutable_fingerprint());
    const absl::Status at_receiver = decode.receiver().OnPeerHello(hello, &link, &session).status();
    EXPECT_EQ(at_receiver.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(at_receiver.message()), HasSubstr(std::string("field=") + field.field));
  }
}

TEST(FingerprintTest, OwnPoolMustBeDescribed) {
  const kv::KvLayout layout = TestLayout(kv::KvFormat::kFp8, 8);
  EXPECT_TRUE(CheckFingerprintOfPool(TestFingerprint(layout), layout).ok());
  kv::KvLayout other = layout;
  other.format = kv::KvFormat::kBf16;
  EXPECT_EQ(CheckFingerprintOfPool(TestFingerprint(layout), other).code(),
            absl::StatusCode::kInvalidArgument);
  other = layout;
  other.tp = 2;
  EXPECT_EQ(CheckFingerprintOfPool(TestFingerprint(layout), other).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(SenderCreateTest, ForcedTransportIsNotReplaced) {
  DecodeSide decode("tcp", TestLayout(kv::KvFormat::kFp8, 8));
  MemoryLink link;
  worker::v1::Hello hello;
  hello.set_role("prefill");
  *hello.mutable_fingerprint() = TestFingerprint(decode.layout());
  SessionId session = 0;
  const worker::v1::Hello answer = *decode.receiver().OnPeerHello(hello, &link, &session);
  base::Buffer pool = *base::Buffer::Allocate(decode.layout().pool_bytes());
  SenderOptions options;
  options.pool = &pool;
  options.layout = decode.layout();
  options.hello = hello;
  options.transport = "shm";
  const absl::Status status = Sender::Create(options, answer, &link).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("does not offer shm"));
}

}  // namespace
}  // namespace baton::kvtransfer
