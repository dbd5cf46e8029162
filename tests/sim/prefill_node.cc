// A simulated prefill worker.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/workers.h"
#include "worker/convert.h"
#include "tests/support/test_fingerprint.h"

namespace baton::sim {
namespace {

constexpr absl::Duration kHelloTimeout = absl::Seconds(5);

}  // namespace

// The real sender, stepped by events instead of a thread.
class PrefillNode::Sender : public kvtransfer::SenderEngine,
                            public std::enable_shared_from_this<Sender> {
 public:
  Sender(World* world,
         std::shared_ptr<Process> process,
         const kvtransfer::SenderOptions& options,
         absl::string_view peer_incarnation,
         kvtransfer::PeerLink* link,
         std::unique_ptr<SimPut> put)
      : SenderEngine(options, peer_incarnation, link, std::move(put), 1e8),
        world_(world),
        process_(std::move(process)) {}
  ~Sender() override { Stop(); }

  void Wake() override {
    if (std::exchange(woken_, true)) return;
    const absl::Duration soon =
        world_->random().Between(absl::Microseconds(1), absl::Microseconds(30));
    world_->After(soon, process_, "sender", [weak = weak_from_this()] {
      const std::shared_ptr<Sender> self = weak.lock();
      if (self == nullptr) return;
      self->woken_ = false;
      self->Go();
    });
  }

 private:
  void Go() {
    if (Step()) return Wake();
    const absl::Duration next = NextTimer();
    if (next == absl::InfiniteDuration()) return;
    const uint64_t number = ++timer_number_;
    // A little later than that: it asks for "more than".
    world_->After(next - clock().Now() + absl::Nanoseconds(1), process_, "sender timer",
                  [weak = weak_from_this(), number] {
                    const std::shared_ptr<Sender> self = weak.lock();
                    if (self != nullptr && number == self->timer_number_) self->Go();
                  });
  }

  World* const world_;
  const std::shared_ptr<Process> process_;
  bool woken_ = false;
  uint64_t timer_number_ = 0;
};

// A session from its first message on.
struct PrefillNode::Session : prefill::PeerStream, kvtransfer::PeerLink {
  bool ended() const override { return over; }
  bool Send(worker::v1::PeerMessage message) override {
    channel->Send(0, std::move(message));
    return !over;
  }
  void Close() override { channel->stream->Close(0); }

  std::string address;
  std::shared_ptr<ControlChannel> channel;  // shared with the decode side
  std::unique_ptr<SimPut> put;              // until the sender has it
  std::shared_ptr<Sender> sender;           // shared with the loop's transfers
  bool opening = true;
  bool over = false;
};

PrefillNode::PrefillNode(Env* env, std::string address, std::string incarnation)
    : Node(env, std::move(address), std::move(incarnation)),
      model_(MakeModel(env->settings.model, env->settings.prefill_blocks)),
      peers_(std::make_unique<prefill::PeerTable>(16)) {
  const WorkerSettings& settings = env_->settings;
  prefill::PrefillLoopOptions options;
  options.chunk_tokens = settings.chunk_tokens;
  options.max_sequences = 8;
  options.max_calls = 64;
  options.ticket_timeout = settings.ticket_timeout;
  options.model_fingerprint = "hash";
  options.test_poison_freed = true;
  options.clock = &process_->clock();
  prefill::PeerConnector& peers = *this;
  loop_ = std::make_unique<prefill::PrefillLoop>(options, *model_, Letters(), peers,
                                                 worker::WorkerMetrics());
  engine_ = std::make_unique<Engine>(
      env_->world, process_, settings.layer_time_max,
      [this] { return loop_->RunOnce(absl::ZeroDuration()); },
      [this] { return loop_->num_calls() > 0; });
  model_->on_layer = [this] { engine_->OnLayer(); };
}

PrefillNode::~PrefillNode() {
  loop_->Stop();
  // Senders end, and tell the loop so.
  for (const auto& weak : sessions_) {
    const std::shared_ptr<Session> session = weak.lock();
    if (session == nullptr) continue;
    session->put.reset();
    session->sender.reset();
    if (session->channel == nullptr) continue;
    session->channel->on_message[0] = nullptr;
    session->channel->stream->set_on_closed(0, nullptr);
  }
  peers_.reset();
}

void PrefillNode::Open(const worker::v1::PrefillRequest::Open& open,
                       std::shared_ptr<PrefillServerCall> sink,
                       const std::shared_ptr<Stream>& stream,
                       const std::shared_ptr<std::optional<prefill::CallId>>& call) {
  if (absl::Status refusal = Refusal(); !refusal.ok()) return sink->Finish(std::move(refusal));
  absl::StatusOr<runtime::EngineRequest> request =
      worker::RequestFromProto(open.spec(), loop_->limits());
  if (!request.ok()) return sink->Finish(request.status());
  const absl::StatusOr<prefill::CallId> id =
      loop_->Open(*std::move(request), open.needs_handoff(), sink);
  if (!id.ok()) return sink->Finish(id.status());
  *call = *id;
  stream->set_on_closed(1, [this, id = *id, sink] {
    if (!sink->finished()) loop_->Cancel(id, absl::CancelledError("call cancelled"));
  });
}

void PrefillNode::GiveTicket(prefill::CallId call,
                             const worker::v1::PrefillRequest::Ticket& ticket) {
  loop_->GiveTicket(call, ticket);
}

void PrefillNode::Connect(const std::string& address, const std::string& incarnation, Found found) {
  std::vector<prefill::PeerTable::Answer> answers;
  if (peers_->Connect(address, incarnation, std::move(found), &answers)) OpenSession(address);
  for (auto& answer : answers) answer.found(std::move(answer.sender));
}

void PrefillNode::OpenSession(const std::string& address) {
  auto session = std::make_shared<Session>();  // shared with its stream and what is under way
  session->address = address;
  sessions_.push_back(session);
  World* world = env_->world;
  DecodeNode* peer = env_->find_decode(address);
  if (peer == nullptr) {
    world->After(env_->network->Latency(), process_, "refused", [this, session] {
      Opened(session, absl::UnavailableError("connection refused"));
    });
    return;
  }
  session->channel =
      std::make_shared<ControlChannel>(env_->network->Connect(process_, peer->process()));
  session->channel->stream->set_on_closed(0, [this, session] {
    session->over = true;
    session->channel->on_message[0] = nullptr;
    const absl::Status end = absl::UnavailableError("the peer ended the session");
    if (session->sender != nullptr) session->sender->OnPeerGone(end);
    session->sender.reset();
    Opened(session, end);
  });
  session->channel->on_message[0] = [this, session](const worker::v1::PeerMessage& message) {
    if (message.has_hello()) {
      OnHello(session, message.hello());
    } else if (session->sender != nullptr) {
      session->sender->OnMessage(message);
    }
  };
  worker::v1::Hello hello;
  hello.set_incarnation(incarnation_);
  hello.set_role("prefill");
  *hello.mutable_fingerprint() = testing::TestFingerprint(model_->layout());
  session->channel->stream->Send(
      0, "Hello", [peer, channel = session->channel, hello] { peer->OnHello(channel, hello); });
  world->After(kHelloTimeout, process_, "hello timeout",
               [this, session] { Opened(session, absl::UnavailableError("no hello in time")); });
}

void PrefillNode::OnHello(const std::shared_ptr<Session>& session, const worker::v1::Hello& hello) {
  if (!session->opening || session->put != nullptr) return;
  DecodeNode* peer = env_->find_decode(session->address);
  if (peer == nullptr || peer->process() != session->channel->stream->process(1))
    return Opened(session, absl::UnavailableError("connection refused"));
  const std::shared_ptr<Stream> data = env_->network->Connect(process_, peer->process());
  // Only a process of the same host can write into another's memory.
  data->set_local(env_->settings.data.peer_writes);
  data->Send(0, "data connection", [peer, data] { peer->OnDataStream(data); });
  session->put = std::make_unique<SimPut>(env_->world, env_->settings.data, data,
                                          &model_->kv_pool(), peer->memory());
  session->put->Attach(hello.transports(0).token(), model_->layout(), [this, session, hello] {
    if (!session->opening) return;
    kvtransfer::SenderOptions options;
    options.clock = &process_->clock();
    options.pool = &model_->kv_pool();
    options.layout = model_->layout();
    options.checksums = env_->settings.checksums;
    SimPut* put = session->put.get();
    session->sender = std::make_shared<Sender>(env_->world, process_, options, hello.incarnation(),
                                               session.get(), std::move(session->put));
    put->set_wake([weak = std::weak_ptr<Sender>(session->sender)] {
      if (const auto sender = weak.lock()) sender->Wake();
    });
    session->sender->Wake();
    Opened(session, prefill::PeerTable::Opened{hello.incarnation(), session, session->sender});
  });
}

void PrefillNode::Opened(const std::shared_ptr<Session>& session,
                         absl::StatusOr<prefill::PeerTable::Opened> opened) {
  if (!std::exchange(session->opening, false)) return;
  if (!opened.ok() && session->channel != nullptr) session->Close();
  session->put.reset();
  std::vector<prefill::PeerTable::Answer> answers;
  const auto unwanted = peers_->OnOpened(session->address, std::move(opened), &answers);
  if (unwanted != nullptr) unwanted->Close();
  for (auto& answer : answers) answer.found(std::move(answer.sender));
}

void PrefillNode::Cancel(prefill::CallId call, absl::Status status) {
  loop_->Cancel(call, std::move(status));
}

void PrefillNode::EndCalls() {
  engine_->Finish();
  loop_->Stop();
}

worker::v1::WorkerStatus PrefillNode::Status() const {
  return StatusOf("prefill", model_->layout(), loop_->load());
}

void PrefillNode::CheckInvariants() const {
  loop_->memory().pool().CheckInvariants();
  loop_->memory().cache().CheckInvariants();
}

std::string PrefillNode::Busy() const {
  const kv::BlockCounts& counts = loop_->memory().pool().counts();
  const worker::v1::WorkerLoad load = loop_->load();
  if (loop_->num_calls() == 0 && counts.active == 0 && load.requests_running() == 0 &&
      load.requests_waiting() == 0 && load.queue_tokens() == 0 && load.kv_blocks_active() == 0)
    return "";
  return absl::StrCat(address_, ": calls=", loop_->num_calls(), " active=", counts.active,
                      " load: ", load.ShortDebugString());
}

}  // namespace baton::sim
