// A simulated decode worker.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/workers.h"
#include "worker/convert.h"
#include "tests/support/test_fingerprint.h"

namespace baton::sim {

using kvtransfer::ReceiverEvent;
using Kind = ReceiverEvent::Kind;

// The real receiver, polled by events instead of a thread; watches who may write where.
class DecodeNode::Receiver : public kvtransfer::ReceiverCore,
                             private kvtransfer::ReceiverCore::Lines {
 public:
  Receiver(Env* env,
           std::shared_ptr<Process> process,
           const kvtransfer::ReceiverOptions& options,
           decode::DecodeLoop* loop)
      : ReceiverCore(options, [this](ReceiverEvent event) { OnEvent(std::move(event)); }),
        env_(env),
        process_(std::move(process)),
        pool_(options.pool),
        loop_(loop),
        listener_(options.layout, env->settings.data.peer_writes) {
    Wake();
  }
  ~Receiver() override {
    loop_ = nullptr;
    lines_.clear();
    FailAll(absl::CancelledError("decode worker is shutting down"));
  }

  worker::v1::Handoff Reserve(kvtransfer::Reservation reservation) override {
    const std::vector<kv::BlockId> blocks(
        reservation.blocks.begin() + reservation.first_missing_block, reservation.blocks.end());
    worker::v1::Handoff handoff = ReceiverCore::Reserve(std::move(reservation));
    open_[handoff.reservation_id()] = {blocks.begin(), blocks.end()};
    return handoff;
  }
  bool Revoke(uint64_t reservation_id, absl::string_view reason) override {
    const bool revoked = ReceiverCore::Revoke(reservation_id, reason);
    if (revoked && env_->settings.data.plant == Plant::kFreeAtRevoke &&
        open_.contains(reservation_id)) {
      ReceiverEvent early;
      early.kind = Kind::kQuiesced;
      early.reservation_id = reservation_id;
      OnEvent(std::move(early));
    }
    return revoked;
  }
  std::optional<std::vector<ByteRange>> BeginUnit(uint64_t session,
                                                  const kvtransfer::UnitFrame& unit) override {
    auto ranges = ReceiverCore::BeginUnit(session, unit);
    if (ranges.has_value() && !peer_writes()) {
      writing_.insert(unit.reservation_id);
      CheckWrite(unit.reservation_id, *ranges);
    }
    return ranges;
  }
  void EndUnit(const kvtransfer::UnitFrame& unit, const absl::Status& arrived) override {
    writing_.erase(unit.reservation_id);
    ReceiverCore::EndUnit(unit, arrived);
  }

  // `reservation_id` may write into these ranges, and into no others.
  void CheckWrite(uint64_t reservation_id, absl::Span<const ByteRange> to) const {
    const auto open = open_.find(reservation_id);
    if (open == open_.end())
      return env_->fail(
          absl::StrCat("reservation ", reservation_id, " is written into after its end"));
    const kv::KvLayout& layout = options().layout;
    for (const ByteRange& range : to) {
      const auto first = (range.offset % layout.layer_bytes()) / layout.block_bytes();
      const auto last =
          ((range.offset + range.size - 1) % layout.layer_bytes()) / layout.block_bytes();
      for (auto block = static_cast<kv::BlockId>(first); block <= static_cast<kv::BlockId>(last);
           ++block) {
        const kv::BlockState state = loop_->memory().pool().state(block);
        if (open->second.contains(block) &&
            (state == kv::BlockState::kReserved || state == kv::BlockState::kQuarantined))
          continue;
        env_->fail(absl::StrCat("reservation ", reservation_id, " writes into block ", block,
                                " in state ", static_cast<int>(state)));
      }
    }
  }
  size_t num_open() const { return open_.size(); }

  void OnDataStream(std::shared_ptr<Stream> stream) {
    lines_.push_back(
        std::make_unique<DataEnd>(stream, &listener_, this, pool_, options().clock->Now()));
    DataEnd* line = lines_.back().get();
    stream->set_on_bytes(1, [this, line](const std::string& bytes) {
      Serve(line, [&] { return line->OnBytes(bytes); });
    });
    stream->set_on_closed(1, [this, line] { Serve(line, [&] { return line->OnHangUp(); }); });
  }

 private:
  bool peer_writes() const { return listener_.peer_writes(); }

  void Wake() override {
    if (std::exchange(woken_, true)) return;
    env_->world->After(env_->world->random().Between(absl::Microseconds(1), absl::Microseconds(30)),
                       process_, "receiver", [this] {
                         woken_ = false;
                         Poll();
                       });
  }
  std::vector<const kvtransfer::PutListener*> listeners() const override { return {&listener_}; }

  void Poll() {
    for (size_t i = 0; i < lines_.size(); ++i) {
      lines_[i]->connection().DropUnwantedUnit();
      lines_[i]->Drain();
    }
    EndSessions(this);
    for (const auto& line : lines_) line->Drain();  // what has been shut
    Tick();
    const uint64_t number = ++tick_number_;
    env_->world->After(NextTick() - options().clock->Now(), process_, "receiver tick",
                       [this, number] {
                         if (number == tick_number_) Poll();
                       });
  }

  void Serve(DataEnd* line, const std::function<absl::Status()>& read) {
    line->connection().DropUnwantedUnit();
    const absl::Status status = read();
    if (!status.ok() && !OnLineFailed(&line->connection(), status)) {
      Destroy(line);
    } else {
      line->Drain();
    }
    Poll();
  }

  void Destroy(DataEnd* line) {
    line->stream()->set_on_bytes(1, nullptr);
    line->stream()->set_on_closed(1, nullptr);
    line->stream()->Close(1);
    std::erase_if(lines_, [&](const auto& other) { return other.get() == line; });
  }

  // Lines.
  kvtransfer::DataLine* Find(kvtransfer::SessionId session) override {
    for (const auto& line : lines_) {
      if (line->connection().session() == session) return &line->connection();
    }
    return nullptr;
  }
  void Close(kvtransfer::DataLine* connection) override {
    for (const auto& line : lines_) {
      if (&line->connection() == connection) return Destroy(line.get());
    }
  }

  void OnEvent(ReceiverEvent event) {
    if (loop_ == nullptr) return;
    const uint64_t id = event.reservation_id;
    env_->world->Trace("  reservation ", id, " ends: kind ", static_cast<int>(event.kind), " ",
                       event.status.ToString());
    if (open_.erase(id) == 0) {
      if (env_->settings.data.plant != Plant::kFreeAtRevoke)
        env_->fail(absl::StrCat("reservation ", id, " ends twice"));
      return;
    }
    if (writing_.contains(id))
      env_->fail(absl::StrCat("reservation ", id, " ends while a unit of it is being received"));
    if (env_->settings.data.plant == Plant::kLoseBlocks && event.kind == Kind::kQuiesced) return;
    loop_->OnReceiverEvent(std::move(event));
  }

  Env* const env_;
  const std::shared_ptr<Process> process_;
  base::Buffer* const pool_;
  decode::DecodeLoop* loop_;  // null while we are destroyed
  SimListener listener_;
  std::vector<std::unique_ptr<DataEnd>> lines_;
  bool woken_ = false;
  uint64_t tick_number_ = 0;
  std::map<uint64_t, std::set<kv::BlockId>> open_;  // reservations and what is written into them
  std::set<uint64_t> writing_;                      // units that are being received
};

DecodeNode::DecodeNode(Env* env, std::string address, std::string incarnation)
    : Node(env, std::move(address), std::move(incarnation)),
      model_(MakeModel(env->settings.model, env->settings.decode_blocks)),
      memory_(std::make_shared<PeerMemory>()) {
  const WorkerSettings& settings = env_->settings;
  decode::DecodeLoopOptions options;
  options.scheduler.chunk_tokens = settings.chunk_tokens;
  options.scheduler.max_batch = settings.max_batch;
  options.max_calls = 64;
  options.model_fingerprint = "hash";
  options.test_poison_freed = true;
  options.clock = &process_->clock();
  loop_ =
      std::make_unique<decode::DecodeLoop>(options, *model_, Letters(), worker::WorkerMetrics());
  const auto swap_bytes = static_cast<int64_t>(model_->layout().block_bytes()) *
                          model_->layout().num_layers * settings.swap_blocks;
  swap_ = std::make_unique<decode::SwapSpace>(*decode::SwapSpace::Create(*model_, swap_bytes));
  loop_->set_swap_space(swap_.get());
  kvtransfer::ReceiverOptions receiver;
  receiver.clock = &process_->clock();
  receiver.pool = &model_->kv_pool();
  receiver.layout = model_->layout();
  receiver.fingerprint = testing::TestFingerprint(model_->layout());
  receiver.incarnation = incarnation_;
  receiver.transports = {"sim"};
  // Every instance names its reservations alike: the worst that chance could do.
  receiver.random_id = [next = uint64_t{0}]() mutable { return ++next; };
  receiver_ = std::make_unique<Receiver>(env_, process_, receiver, loop_.get());
  loop_->set_receiver(receiver_.get());
  memory_->layout = model_->layout();
  memory_->data = model_->kv_pool().data();
  memory_->on_write = [this](uint64_t id, absl::Span<const ByteRange> to) {
    receiver_->CheckWrite(id, to);
  };
  engine_ = std::make_unique<Engine>(
      env_->world, process_, settings.layer_time_max,
      [this] { return loop_->RunOnce(absl::ZeroDuration()); },
      [this] { return loop_->num_calls() > 0; });
  model_->on_layer = [this] { engine_->OnLayer(); };
}

DecodeNode::~DecodeNode() {
  memory_.reset();
  loop_->Stop();
  receiver_.reset();
}

void DecodeNode::Open(const worker::v1::DecodeRequest::Open& open,
                      std::shared_ptr<DecodeServerCall> sink,
                      const std::shared_ptr<Stream>& stream) {
  if (absl::Status refusal = Refusal(); !refusal.ok()) return sink->Finish(std::move(refusal));
  absl::StatusOr<runtime::EngineRequest> request =
      worker::RequestFromProto(open.spec(), loop_->limits());
  if (!request.ok()) return sink->Finish(request.status());
  const absl::StatusOr<decode::CallId> call =
      loop_->Open(*std::move(request), open.prefill_locally(), sink);
  if (!call.ok()) return sink->Finish(call.status());
  stream->set_on_closed(1, [this, id = *call, sink] {
    if (!sink->finished()) loop_->Cancel(id, absl::CancelledError("call cancelled"));
  });
}

void DecodeNode::OnHello(std::shared_ptr<ControlChannel> channel, const worker::v1::Hello& hello) {
  struct Link : kvtransfer::PeerLink {
    explicit Link(std::shared_ptr<ControlChannel> c) : channel(std::move(c)) {}
    bool Send(worker::v1::PeerMessage message) override {
      channel->Send(1, std::move(message));
      return !channel->stream->closed(1);
    }
    void Close() override { channel->stream->Close(1); }
    const std::shared_ptr<ControlChannel> channel;
  };
  auto link = std::make_shared<Link>(channel);  // shared with the stream's end
  kvtransfer::SessionId session = 0;
  absl::StatusOr<worker::v1::Hello> answer = receiver_->OnPeerHello(hello, link.get(), &session);
  if (!answer.ok()) return channel->stream->Close(1);
  channel->on_message[1] = [this, session](const worker::v1::PeerMessage& message) {
    receiver_->OnMessage(session, message);
  };
  channel->stream->set_on_closed(1, [this, session, link] {
    link->channel->on_message[1] = nullptr;
    receiver_->OnPeerGone(session);
  });
  worker::v1::PeerMessage reply;
  *reply.mutable_hello() = *std::move(answer);
  channel->Send(1, std::move(reply));
  channel->stream->set_chaos(env_->settings.control);
}

void DecodeNode::OnDataStream(std::shared_ptr<Stream> stream) {
  receiver_->OnDataStream(std::move(stream));
}

void DecodeNode::EndCalls() {
  engine_->Finish();
  loop_->Stop();
}

worker::v1::WorkerStatus DecodeNode::Status() const {
  return StatusOf("decode", model_->layout(), loop_->load());
}

void DecodeNode::CheckInvariants() const {
  loop_->memory().pool().CheckInvariants();
  loop_->memory().cache().CheckInvariants();
}

std::string DecodeNode::Busy() const {
  const kv::BlockCounts& counts = loop_->memory().pool().counts();
  const worker::v1::WorkerLoad load = loop_->load();
  if (loop_->num_calls() == 0 && counts.active == 0 && counts.reserved == 0 &&
      counts.quarantined == 0 && receiver_->num_open() == 0 &&
      swap_->num_free() == swap_->num_slots() && load.requests_running() == 0 &&
      load.requests_waiting() == 0 && load.queue_tokens() == 0 && load.kv_blocks_active() == 0 &&
      load.kv_blocks_reserved() == 0 && load.kv_blocks_quarantined() == 0)
    return "";
  return absl::StrCat(address_, ": calls=", loop_->num_calls(), " active=", counts.active,
                      " reserved=", counts.reserved, " quarantined=", counts.quarantined,
                      " reservations=", receiver_->num_open(),
                      " swapped=", swap_->num_slots() - swap_->num_free(),
                      " load: ", load.ShortDebugString());
}

}  // namespace baton::sim
