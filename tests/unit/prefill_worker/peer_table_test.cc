#include "prefill_worker/peer_table.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace baton::prefill {
namespace {

struct FakeStream : PeerStream {
  bool ended() const override { return over; }
  void Close() override { over = true; }
  bool over = false;
};

struct FakeSender : kvtransfer::Sender {
  kvtransfer::TransferId Begin(kvtransfer::TransferSpec spec) override { return 0; }
  void Push(kvtransfer::TransferId, int, int, int, int, absl::Span<const kv::BlockId>) override {}
  void Commit(kvtransfer::TransferId, std::vector<worker::v1::Token>) override {}
  void Abort(kvtransfer::TransferId, absl::string_view) override {}
  void OnMessage(const worker::v1::PeerMessage&) override {}
  void OnPeerGone(const absl::Status&) override {}
  std::string transport_name() const override { return "fake"; }
  double probe_bytes_per_second() const override { return 1; }
  bool suspect() const override { return is_suspect; }
  bool is_suspect = false;
};

class PeerTableTest : public ::testing::Test {
 protected:
  // What a waiter has been told: "ok", or the error.
  bool Connect(const std::string& incarnation, std::string* told) {
    std::vector<PeerTable::Answer> answers;
    const bool begin = table_.Connect(
        "d:1", incarnation,
        [told](absl::StatusOr<PeerTable::SharedSender> sender) {
          *told = sender.ok() ? "ok" : std::string(sender.status().message());
        },
        &answers);
    Tell(&answers);
    return begin;
  }
  std::shared_ptr<PeerStream> Opened(absl::StatusOr<PeerTable::Opened> opened) {
    std::vector<PeerTable::Answer> answers;
    auto unwanted = table_.OnOpened("d:1", std::move(opened), &answers);
    Tell(&answers);
    return unwanted;
  }
  static void Tell(std::vector<PeerTable::Answer>* answers) {
    for (auto& answer : *answers) answer.found(std::move(answer.sender));
  }
  static PeerTable::Opened Session(const std::string& incarnation) {
    return {incarnation, std::make_shared<FakeStream>(), std::make_shared<FakeSender>()};
  }

  PeerTable table_{2};
};

TEST_F(PeerTableTest, OneSessionServesAllWhoWaitAndWhoComeLater) {
  std::string first, second, later;
  EXPECT_TRUE(Connect("a", &first));
  EXPECT_FALSE(Connect("a", &second)) << "opened twice";
  EXPECT_EQ(first, "");
  EXPECT_EQ(Opened(Session("a")), nullptr);
  EXPECT_EQ(first, "ok");
  EXPECT_EQ(second, "ok");
  EXPECT_FALSE(Connect("a", &later));
  EXPECT_EQ(later, "ok");
}

// Case 11.6: a worker restarted on the same address is another one.
TEST_F(PeerTableTest, ARestartedWorkerReplacesItsPredecessor) {
  std::string old, fresh, stale;
  Connect("a", &old);
  const PeerTable::Opened session = Session("a");
  Opened(session);
  EXPECT_TRUE(Connect("b", &fresh)) << "the predecessor's session is not the successor's";
  EXPECT_EQ(Opened(Session("b")), session.stream) << "the old session is not wanted any more";
  EXPECT_EQ(fresh, "ok");
  // Who still asks for the dead one is refused, and the session that stands goes on.
  EXPECT_TRUE(Connect("a", &stale));
  const PeerTable::Opened again = Session("b");
  EXPECT_EQ(Opened(again), again.stream);
  EXPECT_NE(stale.find("another instance"), std::string::npos) << stale;
  EXPECT_EQ(table_.Standing().size(), 1u);
}

TEST_F(PeerTableTest, AFailureIsToldAndTriedAgain) {
  std::string told, again;
  Connect("a", &told);
  Opened(absl::UnavailableError("refused"));
  EXPECT_EQ(told, "refused");
  EXPECT_TRUE(Connect("a", &again));
}

TEST_F(PeerTableTest, ASessionThatHasEndedDoesNotStand) {
  std::string told, again;
  Connect("a", &told);
  const PeerTable::Opened session = Session("a");
  Opened(session);
  session.stream->Close();
  EXPECT_TRUE(table_.Standing().empty());
  EXPECT_TRUE(Connect("a", &again));
}

TEST_F(PeerTableTest, ASuspectPeerGetsNoNewHandovers) {
  std::string told, refused, later;
  Connect("a", &told);
  const PeerTable::Opened session = Session("a");
  Opened(session);
  static_cast<FakeSender&>(*session.sender).is_suspect = true;
  EXPECT_FALSE(Connect("a", &refused));
  EXPECT_NE(refused.find("suspect"), std::string::npos) << refused;
  static_cast<FakeSender&>(*session.sender).is_suspect = false;
  Connect("a", &later);
  EXPECT_EQ(later, "ok");
}

TEST_F(PeerTableTest, NothingStandsAfterStop) {
  std::string waiting, late;
  Connect("a", &waiting);
  table_.Stop();
  const PeerTable::Opened session = Session("a");
  EXPECT_EQ(Opened(session), session.stream);
  EXPECT_EQ(waiting, "prefill: stopping");
  EXPECT_FALSE(Connect("a", &late));
  EXPECT_EQ(late, "prefill: stopping");
}

TEST_F(PeerTableTest, AddressesAreLimited) {
  const auto nobody = [](absl::StatusOr<PeerTable::SharedSender>) {};
  std::vector<PeerTable::Answer> answers;
  EXPECT_TRUE(table_.Connect("d:1", "a", nobody, &answers));
  EXPECT_TRUE(table_.Connect("d:2", "a", nobody, &answers));
  EXPECT_FALSE(table_.Connect("d:3", "a", nobody, &answers));
  ASSERT_EQ(answers.size(), 1u);
  EXPECT_TRUE(absl::IsUnavailable(answers[0].sender.status()));
}

}  // namespace
}  // namespace baton::prefill
