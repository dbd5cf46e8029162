#include "tests/sim/router_node.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "router/prompt_encoder.h"

namespace baton::sim {
namespace {

constexpr absl::Duration kStatusInterval = absl::Milliseconds(100);
constexpr absl::Duration kReconnect = absl::Milliseconds(200);
constexpr absl::Duration kSweepInterval = absl::Seconds(1);

const router::ModelFacts& Facts() {
  static const router::ModelFacts* const facts = [] {
    auto* made = new router::ModelFacts;
    made->name = "hash";
    text::VocabularySpec spec;
    for (int id = 0; id < kVocab; ++id)
      spec.tokens.push_back(std::string(1, static_cast<char>('a' + id)));
    spec.pre_tokenizer = "qwen2";
    made->tokenizer = *text::Tokenizer::FromVocabulary(std::move(spec));
    made->config.architecture = "hash";
    made->config.vocab_size = kVocab;
    made->config.eos_ids = {kVocab - 1};
    made->chat_refusal = absl::InvalidArgumentError("no chats");
    return made;
  }();
  return *facts;
}

class InlineEncoder : public router::PromptEncoder {
 public:
  void Encode(std::shared_ptr<const v1::GenerateRequest> request,
              size_t max_text_bytes,
              Done done) override {
    done(router::EncodePrompt(*request, Facts(), max_text_bytes));
  }
};

class ReaderSink : public router::ClientSink {
 public:
  explicit ReaderSink(std::shared_ptr<Reader> reader) : reader_(std::move(reader)) {}
  absl::Status Write(v1::GenerateResponse response) override {
    return reader_->Write(std::move(response));
  }
  void Finish(const absl::Status& status) override { reader_->Finish(status); }

 private:
  const std::shared_ptr<Reader> reader_;
};

// The router's side of one call to a worker, as gRPC would behave.
template <typename Response>
struct ClientCall : std::enable_shared_from_this<ClientCall<Response>> {
  World* world;
  std::shared_ptr<Process> process;
  std::shared_ptr<Stream> stream;  // null: the connection was refused
  router::LegEvents<Response> events;
  bool ended = false;
  bool cancelled = false;

  void Message(Response response) {
    if (!ended) events.on_message(std::move(response));
  }
  void End(absl::Status status) {
    if (std::exchange(ended, true)) return;
    // Whatever the worker says now, the router does not look at it.
    if (cancelled && status.message() == kSick)
      status = absl::CancelledError("cancelled by the router");
    if (stream != nullptr) stream->Close(0);
    const auto on_end = std::exchange(events, {}).on_end;
    on_end(std::move(status));
  }
  void EndSoon(absl::Duration delay, absl::Status status) {
    world->After(
        delay, process, "leg ends",
        [self = this->shared_from_this(), status = std::move(status)] { self->End(status); });
  }
  // As TryCancel: the caller hears of it at once, the worker when it gets there.
  void Cancel() {
    cancelled = true;
    EndSoon(absl::Microseconds(20), absl::CancelledError("cancelled by the router"));
  }
};

template <typename Response>
std::shared_ptr<ClientCall<Response>> MakeCall(Env* env,
                                               const std::shared_ptr<Process>& process,
                                               Node* node,
                                               absl::Duration deadline,
                                               router::LegEvents<Response> events) {
  auto call = std::make_shared<ClientCall<Response>>();  // shared with what is under way to it
  call->world = env->world;
  call->process = process;
  call->events = std::move(events);
  call->EndSoon(deadline - process->clock().Now(),
                absl::DeadlineExceededError("deadline exceeded"));
  if (node == nullptr) {
    call->EndSoon(env->network->Latency(), absl::UnavailableError("connection refused"));
    return call;
  }
  call->stream = env->network->Connect(process, node->process());
  call->stream->set_on_closed(0, [call] { call->End(absl::UnavailableError("connection lost")); });
  return call;
}

template <typename Response>
std::shared_ptr<ServerCall<Response>> MakeServerCall(
    Env* env, const std::shared_ptr<ClientCall<Response>>& call) {
  return std::make_shared<ServerCall<Response>>(
      env, call->stream, [call](Response response) { call->Message(std::move(response)); },
      [call](absl::Status status) { call->End(std::move(status)); });
}

}  // namespace

SimTimers::Id SimTimers::At(absl::Duration when, std::function<void()> callback) {
  const Id id = ++last_id_;
  waiting_[id] = {when, std::move(callback)};
  world_->After(when - process_->clock().Now(), process_, "router timer", [this, id] { Fire(id); });
  return id;
}

void SimTimers::Fire(Id id) {
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return;
  const auto callback = std::move(found->second.second);
  waiting_.erase(found);
  callback();
}

void SimTimers::RunDue() {
  std::vector<Id> due;
  for (const auto& [id, timer] : waiting_) {
    if (timer.first <= process_->clock().Now()) due.push_back(id);
  }
  for (Id id : due) Fire(id);
}

RouterNode::RouterNode(Env* env, Workers workers)
    : env_(env),
      workers_(std::move(workers)),
      process_(std::make_shared<Process>(env->world, "router")),
      timers_(env->world, process_),
      store_(base::Metrics::Create(base::Role::kRouter, "hash")),
      metrics_(store_.get()),
      table_({.prefill = workers_.prefill, .decode = workers_.decode, .clock = &process_->clock()}),
      book_(&process_->clock()),
      policy_(WatchChoices(*router::MakeRoutePolicy("prefix", {}), &book_, env)),
      encoder_(std::make_unique<InlineEncoder>()),
      admission_({.max_running = 6, .max_queue = 16},
                 policy_.get(),
                 &table_,
                 &timers_,
                 &process_->clock()) {
  table_.set_on_capacity([this] { admission_.Pump(); });
  deps_ = {.facts = &Facts(),
           .table = &table_,
           .legs = this,
           .encoder = encoder_.get(),
           .admission = &admission_,
           .timers = &timers_,
           .clock = &process_->clock(),
           .metrics = &metrics_,
           .draw_seed = [] { return uint64_t{77}; }};
  for (const std::string& address : workers_.prefill) Watch(address, true);
  for (const std::string& address : workers_.decode) Watch(address, false);
  Sweep();
}

RouterNode::~RouterNode() {
  for (const auto& forget : forget_) forget();
}

template <typename Response>
router::LegEvents<Response> RouterNode::Watched(const std::string& address,
                                                router::LegEvents<Response> events) {
  return {[this, address, on_message = std::move(events.on_message)](Response response) {
            book_.OnAnswer(address);
            on_message(std::move(response));
          },
          [this, address, on_end = std::move(events.on_end)](absl::Status status) {
            // What it did to a call that was taken back counts for nothing.
            if (status.message() == kSick) {
              book_.OnRefusal(address);
            } else if (!absl::IsCancelled(status)) {
              book_.OnAnswer(address);
            }
            on_end(std::move(status));
          }};
}

template <typename Call>
void RouterNode::Remember(const std::shared_ptr<Call>& call) {
  forget_.push_back([weak = std::weak_ptr<Call>(call)] {
    if (const auto held = weak.lock()) held->events = {};
  });
}

Node* RouterNode::Find(const std::string& address, bool is_prefill) const {
  if (is_prefill) return workers_.find_prefill(address);
  return workers_.find_decode(address);
}

void RouterNode::Watch(const std::string& address, bool is_prefill) {
  Node* node = Find(address, is_prefill);
  const auto again = [this, address, is_prefill] {
    book_.OnDown(address);
    table_.OnDown(address, absl::UnavailableError("connection lost"));
    env_->world->After(kReconnect, process_, "watch",
                       [this, address, is_prefill] { Watch(address, is_prefill); });
  };
  if (node == nullptr) return again();
  const std::shared_ptr<Stream> stream = env_->network->Connect(process_, node->process());
  stream->set_on_closed(0, again);
  // Said by the worker for as long as somebody listens.
  struct Reporter : std::enable_shared_from_this<Reporter> {
    void Report() {
      if (stream->closed(1)) return;
      stream->Send(1, "status",
                   [router = router, address = node->address(), status = node->Status()] {
                     router->book_.OnStatus(address, status);
                     router->table_.OnStatus(address, status);
                   });
      world->After(kStatusInterval, node->process(), "report",
                   [self = shared_from_this()] { self->Report(); });
    }
    World* world;
    RouterNode* router;
    Node* node;
    std::shared_ptr<Stream> stream;
  };
  auto reporter = std::make_shared<Reporter>();
  reporter->world = env_->world;
  reporter->router = this;
  reporter->node = node;
  reporter->stream = stream;
  stream->Send(0, "watch status", [reporter] { reporter->Report(); });
}

void RouterNode::Sweep() {
  book_.OnSweep();
  table_.Sweep();
  env_->world->After(kSweepInterval, process_, "sweep", [this] { Sweep(); });
}

void RouterNode::Start(const v1::GenerateRequest& request,
                       absl::Duration timeout,
                       std::shared_ptr<Reader> reader,
                       std::shared_ptr<router::GenerateCall>* call) {
  const absl::Duration now = process_->clock().Now();
  router::CallRequest call_request{std::make_shared<v1::GenerateRequest>(request),
                                   request.request_label(), "generate", now, now + timeout};
  reader->Attach(process_);
  *call = std::make_shared<router::GenerateCall>(deps_, std::move(call_request),
                                                 std::make_unique<ReaderSink>(std::move(reader)));
  (*call)->Start(absl::OkStatus(), "");
}

std::unique_ptr<router::PrefillLeg> RouterNode::OpenPrefill(const std::string& address,
                                                            worker::v1::PrefillRequest::Open open,
                                                            absl::Duration deadline,
                                                            router::PrefillEvents events) {
  using Call = ClientCall<worker::v1::PrefillResponse>;
  struct Leg : router::PrefillLeg {
    void SendTicket(worker::v1::PrefillRequest::Ticket ticket) override {
      if (call->stream == nullptr || call->ended) return;
      call->stream->Send(0, "ticket", [node = node, id = id, ticket = std::move(ticket)] {
        if (id->has_value()) node->GiveTicket(**id, ticket);
      });
    }
    void Cancel() override { call->Cancel(); }
    std::shared_ptr<Call> call;
    PrefillNode* node;  // used in its own process's events only
    std::shared_ptr<std::optional<prefill::CallId>> id;
  };
  PrefillNode* node = workers_.find_prefill(address);
  auto leg = std::make_unique<Leg>();
  leg->call = MakeCall(env_, process_, node, deadline, Watched(address, std::move(events)));
  Remember(leg->call);
  leg->node = node;
  leg->id = std::make_shared<std::optional<prefill::CallId>>();
  if (node == nullptr) return leg;
  leg->call->stream->Send(
      0, "open prefill",
      [node, open = std::move(open), id = leg->id, stream = leg->call->stream,
       sink = MakeServerCall(env_, leg->call)] { node->Open(open, sink, stream, id); });
  return leg;
}

std::unique_ptr<router::DecodeLeg> RouterNode::OpenDecode(const std::string& address,
                                                          worker::v1::DecodeRequest::Open open,
                                                          absl::Duration deadline,
                                                          router::DecodeEvents events) {
  using Call = ClientCall<worker::v1::DecodeResponse>;
  struct Leg : router::DecodeLeg {
    void Cancel() override { call->Cancel(); }
    std::shared_ptr<Call> call;
  };
  DecodeNode* node = workers_.find_decode(address);
  auto leg = std::make_unique<Leg>();
  leg->call = MakeCall(env_, process_, node, deadline, Watched(address, std::move(events)));
  Remember(leg->call);
  if (node == nullptr) return leg;
  leg->call->stream->Send(
      0, "open decode",
      [node, open = std::move(open), stream = leg->call->stream,
       sink = MakeServerCall(env_, leg->call)] { node->Open(open, sink, stream); });
  return leg;
}

void RouterNode::Kill() {
  env_->network->OnDeath(*process_);
  process_->Die();
}

std::string RouterNode::Busy() const {
  if (admission_.num_running() == 0 && admission_.num_waiting() == 0 &&
      metrics_.in_flight.value() == 0 && timers_.num_waiting() == 0)
    return "";
  return absl::StrCat("router: running=", admission_.num_running(),
                      " waiting=", admission_.num_waiting(),
                      " in_flight=", metrics_.in_flight.value(), " timers=", timers_.num_waiting());
}

}  // namespace baton::sim
