// Sessions without sockets: what silence and restlessness lead to.

#include "kvtransfer/receiver_core.h"

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using Kind = ReceiverEvent::Kind;

class FakeListener : public PutListener {
 public:
  explicit FakeListener(bool writes) : peer_writes_(writes) {}
  absl::string_view name() const override { return "fake"; }
  std::string address() const override { return ""; }
  bool peer_writes() const override { return peer_writes_; }
  int fd() const override { return -1; }
  absl::StatusOr<UniqueFd> Accept() override { return absl::UnavailableError("nobody"); }
  absl::Status Welcome(int fd) override { return absl::OkStatus(); }

 private:
  const bool peer_writes_;
};

struct FakeLine : DataLine {
  FakeLine(SessionId id, const PutListener* at) : session_id(id), where(at) {}
  uint64_t session() const override { return session_id; }
  const PutListener& listener() const override { return *where; }
  void Shut(const absl::Status& reason) override { shut = true; }
  const SessionId session_id;
  const PutListener* where;
  bool shut = false;
};

class Core : public ReceiverCore {
 public:
  Core(const ReceiverOptions& options, bool peer_writes, std::vector<ReceiverEvent>* events)
      : ReceiverCore(options, [events](ReceiverEvent event) { events->push_back(event); }),
        listener(peer_writes) {}
  void Wake() override {}
  std::vector<const PutListener*> listeners() const override { return {&listener}; }
  FakeListener listener;
};

class ReceiverCoreTest : public ::testing::TestWithParam<bool>, public ReceiverCore::Lines {
 protected:
  ReceiverCoreTest() : layout_(TestLayout(kv::KvFormat::kFp8, 4)) {
    pool_ = *base::Buffer::Allocate(layout_.pool_bytes());
    ReceiverOptions options;
    options.clock = &clock_;
    options.pool = &pool_;
    options.layout = layout_;
    options.fingerprint = TestFingerprint(layout_);
    options.incarnation = "decode";
    options.random_id = [this] { return ++last_id_; };
    core_ = std::make_unique<Core>(options, GetParam(), &events_);
    worker::v1::Hello hello;
    hello.set_role("prefill");
    *hello.mutable_fingerprint() = options.fingerprint;
    const worker::v1::Hello answer = *core_->OnPeerHello(hello, &link_, &session_);
    EXPECT_TRUE(core_->Attach(core_->listener, answer.transports(0).token()).ok());
    line_ = std::make_unique<FakeLine>(session_, &core_->listener);
  }

  DataLine* Find(SessionId session) override { return line_.get(); }
  void Close(DataLine* line) override { line_.reset(); }

  // A hand-over that the peer has opened. Its id.
  uint64_t Filling() {
    Reservation reservation;
    reservation.prompt_tokens = 64;
    reservation.blocks = {1};
    const worker::v1::Handoff handoff = core_->Reserve(std::move(reservation));
    EXPECT_TRUE(core_->Open(session_, {handoff.reservation_id(), handoff.epoch()}, core_->listener)
                    .status.ok());
    return handoff.reservation_id();
  }
  void Pass(absl::Duration time, bool peer_speaks) {
    for (absl::Duration passed; passed < time; passed += absl::Seconds(1)) {
      clock_.Advance(absl::Seconds(1));
      worker::v1::PeerMessage heartbeat;
      heartbeat.mutable_heartbeat();
      if (peer_speaks) core_->OnMessage(session_, heartbeat);
      core_->Tick();
      core_->EndSessions(this);
    }
  }

  base::FakeClock clock_;
  const kv::KvLayout layout_;
  base::Buffer pool_;
  uint64_t last_id_ = 0;
  MemoryLink link_;
  std::vector<ReceiverEvent> events_;
  std::unique_ptr<Core> core_;
  SessionId session_ = 0;
  std::unique_ptr<FakeLine> line_;
};
INSTANTIATE_TEST_SUITE_P(WhoWrites, ReceiverCoreTest, ::testing::Bool(), [](const auto& info) {
  return info.param ? "ThePeer" : "We";
});

// A peer that answers heartbeats and nothing else does not keep its blocks for ever where we can
// take them away, and is asked to hang up where only its own end proves it quiet.
TEST_P(ReceiverCoreTest, APeerThatDoesNotComeToRestIsDropped) {
  const uint64_t id = Filling();
  ASSERT_TRUE(core_->Revoke(id, "client left"));
  if (!GetParam()) {
    // We write: quiet at once.
    ASSERT_EQ(events_.size(), 1u);
    return;
  }
  Pass(absl::Seconds(4), true);
  EXPECT_FALSE(line_->shut);
  EXPECT_TRUE(events_.empty());
  Pass(absl::Seconds(3), true);
  EXPECT_TRUE(line_->shut);
  EXPECT_TRUE(link_.closed());
  EXPECT_TRUE(events_.empty()) << "silence proves nothing";
  EXPECT_FALSE(core_->OnLineFailed(line_.get(), absl::UnavailableError("closed by the peer")));
  line_.reset();
  ASSERT_EQ(events_.size(), 1u);
  EXPECT_EQ(events_[0].kind, Kind::kQuiesced);
  core_->OnPeerGone(session_);
  core_->EndSessions(this);
  EXPECT_TRUE(core_->peers().empty());
}

TEST_P(ReceiverCoreTest, ASilentPeerIsDropped) {
  const uint64_t id = Filling();
  Pass(absl::Seconds(9), false);
  EXPECT_FALSE(link_.closed());
  EXPECT_TRUE(events_.empty());
  Pass(absl::Seconds(3), false);
  EXPECT_TRUE(link_.closed());
  EXPECT_TRUE(core_->peers().empty());
  if (GetParam()) {
    EXPECT_TRUE(line_->shut);
    EXPECT_TRUE(events_.empty()) << "silence proves nothing";
    EXPECT_FALSE(core_->OnLineFailed(line_.get(), absl::UnavailableError("closed by the peer")));
    line_.reset();
  } else {
    EXPECT_EQ(line_, nullptr) << "its connection is closed";
  }
  ASSERT_EQ(events_.size(), 1u);
  EXPECT_EQ(events_[0].kind, Kind::kFailed);
  EXPECT_EQ(events_[0].reservation_id, id);
  core_->OnPeerGone(session_);
}

TEST_P(ReceiverCoreTest, NobodyIsDroppedWhoSpeaks) {
  Filling();
  Pass(absl::Seconds(60), true);
  EXPECT_FALSE(link_.closed());
  EXPECT_TRUE(events_.empty());
  core_->OnPeerGone(session_);
}

// What a peer says wrongly is its own fault, not the request's.
TEST_P(ReceiverCoreTest, NonsenseInTheStreamIsAnUnavailablePeer) {
  Filling();
  const bool kept =
      core_->OnLineFailed(line_.get(), absl::InvalidArgumentError("data frame: damaged"));
  EXPECT_EQ(kept, GetParam()) << "who writes itself must hang up itself";
  if (kept) core_->OnLineFailed(line_.get(), absl::UnavailableError("closed by the peer"));
  ASSERT_EQ(events_.size(), 1u);
  EXPECT_EQ(events_[0].kind, Kind::kFailed);
  EXPECT_TRUE(absl::IsUnavailable(events_[0].status)) << events_[0].status;
  line_.reset();
  core_->OnPeerGone(session_);
}

TEST_P(ReceiverCoreTest, ADroppedPeerOpensNothingMore) {
  Pass(absl::Seconds(12), false);
  Reservation reservation;
  reservation.prompt_tokens = 64;
  reservation.blocks = {1};
  const worker::v1::Handoff handoff = core_->Reserve(std::move(reservation));
  const GrantFrame grant =
      core_->Open(session_, {handoff.reservation_id(), handoff.epoch()}, core_->listener);
  EXPECT_TRUE(absl::IsUnavailable(grant.status)) << grant.status;
  core_->Revoke(handoff.reservation_id(), "end");
  core_->OnPeerGone(session_);
}

}  // namespace
}  // namespace baton::kvtransfer
