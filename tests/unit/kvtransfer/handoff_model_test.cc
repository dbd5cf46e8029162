// Both state tables joined by channels that deliver when they like, with blocks that are reused at
// once. Checks what the protocol is for: nobody writes into a block that has been given back, what
// lands is complete and right, and everything that begins ends once. No threads, no sockets, one
// seed a run.

#include <deque>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "kvtransfer/receiver_table.h"
#include "kvtransfer/sender_table.h"
#include "tests/unit/kvtransfer/handoff_pair.h"

namespace baton::kvtransfer {
namespace {

using Kind = ReceiverEvent::Kind;

class World {
 public:
  World(uint32_t seed, bool peer_writes)
      : random_(seed),
        peer_writes_(peer_writes),
        layout_(TestLayout(kv::KvFormat::kFp8, 12)),
        receiver_(layout_, "decode"),
        sender_(layout_, layout_, "decode", Limits()) {
    for (kv::BlockId block = 0; block < layout_.num_blocks; ++block) free_.push_back(block);
    written_by_.resize(static_cast<size_t>(layout_.num_blocks) * layout_.num_layers, 0);
  }

  void Run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) Step();
    Finish();
  }
  int landed() const { return landed_; }
  int quiesced() const { return quiesced_; }

 private:
  struct Handoff {
    worker::v1::Handoff name;
    std::vector<kv::BlockId> blocks;
    int prompt_tokens = 0;
    int first_missing = 0;
    TransferId transfer = 0;  // 0: the prefill side has not begun
    int next_layer = 0;
    bool committed = false;
    bool ended_at_receiver = false;
    int done_at_sender = 0;
  };
  using ToDecode = std::variant<OpenFrame, UnitFrame>;
  using ToPrefill = std::variant<GrantFrame, AckFrame>;

  static SenderLimits Limits() {
    SenderLimits limits;
    limits.unit_bytes = 5000;
    limits.window_units = 3;
    limits.stall_timeout_min = absl::Seconds(1e6);
    limits.reply_timeout = absl::Seconds(1e6);
    return limits;
  }
  bool Chance(uint32_t one_in) { return random_() % one_in == 0; }
  Handoff* Pick() {
    if (open_.empty()) return nullptr;
    auto at = open_.begin();
    std::advance(at, random_() % open_.size());
    return &handoffs_.at(*at);
  }

  void Step() {
    now_ += absl::Milliseconds(1);
    switch (random_() % 12) {
      case 0:
        Reserve();
        break;
      case 1:
        BeginOne();
        break;
      case 2:
        PushLayer();
        break;
      case 3:
        PushLayer();
        break;
      case 4:
        if (Handoff* handoff = Pick(); handoff != nullptr && Chance(8)) {
          revoked_.insert(handoff->name.reservation_id());
          ReceiverEffects effects;
          receiver_.Revoke(handoff->name.reservation_id(), "model", &effects);
          Apply(std::move(effects));
        }
        break;
      case 5:
        if (Handoff* handoff = Pick(); handoff != nullptr && handoff->transfer != 0 && Chance(8)) {
          sender_.Abort(handoff->transfer, "model");
        }
        break;
      case 6:
        WriteSome();
        break;
      case 7:
        WriteSome();
        break;
      case 8:
        DeliverData();
        break;
      case 9:
        DeliverAnswer();
        break;
      case 10:
        DeliverControlToDecode();
        break;
      case 11:
        DeliverControlToPrefill();
        break;
    }
    TakeSenderEffects();
  }

  void Reserve() {
    const int prompt_tokens = 1 + static_cast<int>(random_() % 250);
    const int count = kv::BlocksFor(prompt_tokens);
    if (static_cast<int>(free_.size()) < count) return;
    Handoff handoff;
    handoff.prompt_tokens = prompt_tokens;
    handoff.first_missing = static_cast<int>(random_() % static_cast<uint32_t>(count + 1));
    handoff.blocks.assign(free_.end() - count, free_.end());  // what was freed last is taken first
    free_.resize(free_.size() - static_cast<size_t>(count));
    Reservation reservation;
    reservation.prompt_tokens = prompt_tokens;
    reservation.first_missing_block = handoff.first_missing;
    reservation.blocks = handoff.blocks;
    handoff.name = receiver_.Reserve(reservation, ++last_id_);
    open_.insert(last_id_);
    handoffs_[last_id_] = handoff;
  }

  void BeginOne() {
    Handoff* handoff = Pick();
    if (handoff == nullptr || handoff->transfer != 0) return;
    TransferSpec spec;
    spec.handoff = handoff->name;
    spec.prompt_tokens = handoff->prompt_tokens;
    spec.first_missing_block = handoff->first_missing;
    spec.peer_blocks = handoff->blocks;
    const uint64_t id = handoff->name.reservation_id();
    spec.on_done = [this, id](TransferResult) {
      ++handoffs_.at(id).done_at_sender;
      ASSERT_FALSE(writing_.has_value() && writing_->frame.reservation_id == id)
          << "done while its source is read";
    };
    handoff->transfer = sender_.Begin(std::move(spec), now_);
  }

  void PushLayer() {
    Handoff* handoff = Pick();
    if (handoff == nullptr || handoff->transfer == 0 || handoff->committed) return;
    const std::vector<kv::BlockId> ours(handoff->blocks.size(), 0);
    const int count = static_cast<int>(ours.size());
    if (handoff->next_layer < layout_.num_layers) {
      sender_.Push(handoff->transfer, 0, count, handoff->next_layer, handoff->next_layer + 1, ours);
      ++handoff->next_layer;
    } else {
      sender_.Commit(handoff->transfer, {}, now_);
      handoff->committed = true;
    }
  }

  // A unit takes two steps: the write begins, and the write is over.
  void WriteSome() {
    if (!writing_.has_value()) {
      writing_ = sender_.NextUnit(now_);
      if (writing_.has_value() && peer_writes_) Write(writing_->frame);
      return;
    }
    if (peer_writes_) Write(writing_->frame);
    data_.push_back(writing_->frame);
    writing_.reset();
    sender_.UnitWritten(now_);
  }

  void Write(const UnitFrame& unit) {
    const Handoff& handoff = handoffs_.at(unit.reservation_id);
    ASSERT_FALSE(handoff.ended_at_receiver) << "written after the blocks were given back";
    for (uint32_t block = unit.rect.block_begin; block < unit.rect.block_end; ++block) {
      for (uint32_t layer = unit.rect.layer_begin; layer < unit.rect.layer_end; ++layer) {
        Cell(handoff.blocks[block], layer) = unit.reservation_id;
      }
    }
  }

  void DeliverData() {
    if (arriving_.has_value()) {  // the second half of a unit in the stream
      const UnitFrame unit = *arriving_;
      if (receiver_.Wants(unit.reservation_id)) Write(unit);
      arriving_.reset();
      EndUnit(unit);
      return;
    }
    if (data_.empty()) return;
    ToDecode frame = std::move(data_.front());
    data_.pop_front();
    if (const auto* open = std::get_if<OpenFrame>(&frame)) {
      answers_.push_back(receiver_.Open(1, *open, peer_writes_, "model"));
      return;
    }
    const UnitFrame& unit = std::get<UnitFrame>(frame);
    ReceiverEffects effects;
    const bool wanted = receiver_.BeginUnit(1, unit, now_, &effects).has_value();
    Apply(std::move(effects));
    if (!wanted) {
      answers_.push_back(AckFrame{unit.reservation_id, unit.sequence});
    } else if (peer_writes_) {
      EndUnit(unit);
    } else {
      Write(unit);
      arriving_ = unit;
    }
  }

  void EndUnit(const UnitFrame& unit) {
    ReceiverEffects effects;
    receiver_.EndUnit(unit, absl::OkStatus(), now_, &effects);
    Apply(std::move(effects));
    answers_.push_back(AckFrame{unit.reservation_id, unit.sequence});
  }

  void DeliverAnswer() {
    if (answers_.empty()) return;
    const ToPrefill answer = std::move(answers_.front());
    answers_.pop_front();
    if (const auto* grant = std::get_if<GrantFrame>(&answer)) sender_.OnGrant(*grant, now_);
    if (const auto* ack = std::get_if<AckFrame>(&answer)) {
      ASSERT_TRUE(sender_.OnAck(*ack, now_).ok());
    }
  }

  void DeliverControlToDecode() {
    if (to_decode_.empty()) return;
    const worker::v1::PeerMessage message = std::move(to_decode_.front());
    to_decode_.pop_front();
    ReceiverEffects effects;
    if (message.has_commit()) receiver_.OnCommit(1, message.commit(), now_, &effects);
    if (message.has_quiesced()) receiver_.OnQuiesced(1, message.quiesced(), &effects);
    if (message.has_abort()) receiver_.OnAbort(1, message.abort(), &effects);
    Apply(std::move(effects));
  }

  void DeliverControlToPrefill() {
    if (to_prefill_.empty()) return;
    const worker::v1::PeerMessage message = std::move(to_prefill_.front());
    to_prefill_.pop_front();
    if (message.has_landed()) sender_.OnLanded(message.landed());
    if (message.has_revoke()) sender_.OnRevoke(message.revoke());
  }

  void TakeSenderEffects() {
    SenderEffects effects = sender_.TakeEffects();
    for (const OpenFrame& open : effects.opens) data_.push_back(open);
    for (auto& message : effects.messages) to_decode_.push_back(std::move(message));
    for (auto& [on_done, result] : effects.done) on_done(std::move(result));
  }

  void Apply(ReceiverEffects effects) {
    for (auto& [session, message] : effects.messages) to_prefill_.push_back(std::move(message));
    for (const ReceiverEvent& event : effects.events) {
      Handoff& handoff = handoffs_.at(event.reservation_id);
      ASSERT_FALSE(handoff.ended_at_receiver) << "ended twice";
      handoff.ended_at_receiver = true;
      ASSERT_EQ(open_.erase(event.reservation_id), 1u);
      const bool being_written = peer_writes_ && writing_.has_value() &&
                                 writing_->frame.reservation_id == event.reservation_id;
      ASSERT_FALSE(being_written) << "given back while the peer writes";
      ASSERT_FALSE(arriving_.has_value() && arriving_->reservation_id == event.reservation_id)
          << "given back while we write";
      if (event.kind == Kind::kLanded) {
        ++landed_;
        ASSERT_FALSE(revoked_.contains(event.reservation_id)) << "landed after a revoke";
        for (size_t block = static_cast<size_t>(handoff.first_missing);
             block < handoff.blocks.size(); ++block) {
          for (int layer = 0; layer < layout_.num_layers; ++layer) {
            ASSERT_EQ(Cell(handoff.blocks[block], static_cast<uint32_t>(layer)),
                      event.reservation_id);
          }
        }
      }
      quiesced_ += event.kind == Kind::kQuiesced ? 1 : 0;
      free_.insert(free_.end(), handoff.blocks.begin(), handoff.blocks.end());
    }
  }

  void Finish() {
    for (int round = 0; round < 20000; ++round) {
      WriteSome();
      DeliverData();
      DeliverAnswer();
      DeliverControlToDecode();
      DeliverControlToPrefill();
      TakeSenderEffects();
      if (round != 10000) continue;
      const std::set<uint64_t> left = open_;
      for (uint64_t id : left) {  // those that nobody has committed
        ReceiverEffects effects;
        receiver_.Revoke(id, "end", &effects);
        Apply(std::move(effects));
      }
      sender_.FailAll(absl::UnavailableError("end"));
      writing_.reset();
      data_.clear();
      answers_.clear();
      TakeSenderEffects();
      ReceiverEffects effects;
      arriving_.reset();
      receiver_.SessionQuiet(1, &effects);
      Apply(std::move(effects));
    }
    EXPECT_EQ(receiver_.size(), 0u);
    EXPECT_EQ(sender_.size(), 0u);
    EXPECT_EQ(static_cast<int>(free_.size()), layout_.num_blocks);
    for (const auto& [id, handoff] : handoffs_) {
      EXPECT_TRUE(handoff.ended_at_receiver);
      EXPECT_EQ(handoff.done_at_sender, handoff.transfer != 0 ? 1 : 0);
    }
  }

  uint64_t& Cell(kv::BlockId block, uint32_t layer) {
    return written_by_[static_cast<size_t>(block) * layout_.num_layers + layer];
  }

  std::mt19937 random_;
  const bool peer_writes_;
  const kv::KvLayout layout_;
  ReceiverTable receiver_;
  SenderTable sender_;
  absl::Duration now_;
  uint64_t last_id_ = 0;
  std::map<uint64_t, Handoff> handoffs_;
  std::set<uint64_t> open_;  // not ended at the receiver
  std::set<uint64_t> revoked_;
  std::vector<kv::BlockId> free_;
  std::vector<uint64_t> written_by_;  // by block and layer: whose bytes they are
  std::optional<IssuedUnit> writing_;
  std::optional<UnitFrame> arriving_;
  std::deque<ToDecode> data_;
  std::deque<ToPrefill> answers_;
  std::deque<worker::v1::PeerMessage> to_decode_;
  std::deque<worker::v1::PeerMessage> to_prefill_;
  int landed_ = 0;
  int quiesced_ = 0;
};

void RunModel(bool peer_writes) {
  int landed = 0, quiesced = 0;
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    World world(seed, peer_writes);
    world.Run(4000);
    landed += world.landed();
    quiesced += world.quiesced();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(landed, 400);
  EXPECT_GT(quiesced, 100);
}

// Case 11.3 as a property, for transports whose peer writes itself and for those where we do.
TEST(HandoffModelTest, InvariantsHoldWhenThePeerWrites) { RunModel(true); }
TEST(HandoffModelTest, InvariantsHoldWhenWeWrite) { RunModel(false); }

}  // namespace
}  // namespace baton::kvtransfer
