// The sender without its thread: heartbeats and what silence leads to.

#include "kvtransfer/sender_engine.h"

#include <memory>
#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

// Takes everything and answers nothing.
class DeafPut : public PutTransport {
 public:
  explicit DeafPut(const kv::KvLayout& layout) : layout_(layout) {}
  absl::string_view name() const override { return "deaf"; }
  const kv::KvLayout& peer_layout() const override { return layout_; }
  absl::StatusOr<double> Probe(absl::Duration timeout) override { return 1e9; }
  void Open(const OpenFrame& open) override {}
  void Put(const UnitFrame& unit,
           absl::Span<const ByteRange> from,
           absl::Span<const ByteRange> to) override {}
  bool busy() const override { return false; }
  absl::StatusOr<size_t> Write() override { return size_t{0}; }
  absl::Status Read(std::vector<Reply>* replies) override { return absl::OkStatus(); }
  int fd() const override { return -1; }
  bool wants_write() const override { return false; }

 private:
  const kv::KvLayout layout_;
};

class Engine : public SenderEngine {
 public:
  using SenderEngine::SenderEngine;
  void Wake() override { ++wakes; }
  int wakes = 0;
};

class SenderEngineTest : public ::testing::Test {
 protected:
  SenderEngineTest() : layout_(TestLayout(kv::KvFormat::kFp8, 4)) {
    pool_ = *base::Buffer::Allocate(layout_.pool_bytes());
    SenderOptions options;
    options.clock = &clock_;
    options.pool = &pool_;
    options.layout = layout_;
    options.reply_timeout = absl::Seconds(1000);  // not what is looked at here
    engine_ = std::make_unique<Engine>(options, "decode", &link_,
                                       std::make_unique<DeafPut>(layout_), 1e9);
    TransferSpec spec;
    spec.handoff.set_decode_incarnation("decode");
    spec.handoff.set_reservation_id(1);
    spec.prompt_tokens = 64;
    spec.peer_blocks = {1};
    spec.on_done = [this](TransferResult result) { result_ = result; };
    engine_->Begin(std::move(spec));
  }
  void Pass(int seconds, bool peer_speaks) {
    for (int i = 0; i < seconds; ++i) {
      clock_.Advance(absl::Seconds(1));
      worker::v1::PeerMessage heartbeat;
      heartbeat.mutable_heartbeat();
      if (peer_speaks) engine_->OnMessage(heartbeat);
      while (engine_->Step()) {
      }
    }
  }

  base::FakeClock clock_;
  const kv::KvLayout layout_;
  base::Buffer pool_;
  MemoryLink link_;
  std::optional<TransferResult> result_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(SenderEngineTest, ASilentPeerIsSuspectThenGivenUp) {
  Pass(3, false);
  EXPECT_FALSE(engine_->suspect());
  Pass(1, false);
  EXPECT_TRUE(engine_->suspect());
  Pass(5, false);
  EXPECT_FALSE(result_.has_value());
  Pass(5, false);
  ASSERT_TRUE(result_.has_value());
  EXPECT_TRUE(absl::IsUnavailable(result_->status)) << result_->status;
  EXPECT_EQ(engine_->transport(), nullptr) << "nothing is written any more";
  EXPECT_TRUE(link_.closed());
}

TEST_F(SenderEngineTest, APeerThatSpeaksIsKept) {
  Pass(60, true);
  EXPECT_FALSE(engine_->suspect());
  EXPECT_FALSE(result_.has_value());
  EXPECT_NE(engine_->transport(), nullptr);
  EXPECT_FALSE(link_.closed());
}

// A process that was stopped for a minute has not listened for a minute; nobody was silent.
TEST_F(SenderEngineTest, AJumpOfTheClockBlamesNobody) {
  clock_.Advance(absl::Seconds(60));
  while (engine_->Step()) {
  }
  EXPECT_FALSE(result_.has_value());
  EXPECT_NE(engine_->transport(), nullptr);
}

TEST_F(SenderEngineTest, EveryCallWakesTheThread) {
  const int before = engine_->wakes;
  engine_->Abort(1, "given up");
  EXPECT_GT(engine_->wakes, before);
  engine_->Step();
  ASSERT_TRUE(result_.has_value());
  EXPECT_TRUE(absl::IsCancelled(result_->status)) << result_->status;
}

}  // namespace
}  // namespace baton::kvtransfer
