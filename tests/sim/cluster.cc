#include "tests/sim/cluster.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/sim/router_node.h"
#include "tests/sim/scenario.h"

namespace baton::sim {
namespace {

constexpr absl::Duration kSlack = absl::Seconds(1);        // behind a deadline
constexpr absl::Duration kSettleTime = absl::Seconds(60);  // until nothing is held any more
constexpr absl::Duration kRestTime = absl::Seconds(3);     // until the router knows everybody again
constexpr absl::Duration kProbeTimeout = absl::Seconds(30);
constexpr uint64_t kMaxEvents = 2000000;

struct Client {
  const SimRequest* request;
  std::shared_ptr<ClientRecord> record;  // shared with its sink
  std::shared_ptr<router::GenerateCall> call;
  absl::Duration started;
  uint64_t started_at_event = 0;
  bool cancelled = false;
  bool router_died = false;
  bool checked = false;
};

class Cluster {
 public:
  explicit Cluster(const SimOptions& options)
      : scenario_(MakeScenario(options.seed)),
        world_(options.seed),
        network_(&world_, scenario_.latency_min, scenario_.latency_max) {
    world_.set_tracing(options.trace);
    world_.Trace("seed ", options.seed, "\n", scenario_.ToString());
    env_.world = &world_;
    env_.network = &network_;
    env_.settings = scenario_.settings;
    env_.settings.data.plant = options.plant;
    env_.settings.model.real = options.real_model;
    env_.find_decode = [this](const std::string& address) { return FindDecode(address); };
    env_.fail = [this](const std::string& what) { Fail(what); };
    for (int i = 0; i < scenario_.num_prefill; ++i) StartPrefill(absl::StrCat("p", i));
    for (int i = 0; i < scenario_.num_decode; ++i) StartDecode(absl::StrCat("d", i));
    StartRouter();
    world_.set_after_event([this] { AfterEvent(); });
  }
  ~Cluster();

  SimResult Run();
  const std::string& trace() const { return world_.trace(); }

 private:
  void Fail(const std::string& what) {
    if (!result_.violation.empty()) return;
    result_.violation = what;
    world_.Trace("VIOLATION ", what);
  }
  bool failed() const { return !result_.violation.empty(); }

  std::string NewIncarnation() { return absl::StrCat("incarnation-", ++incarnations_); }
  void StartPrefill(const std::string& address) {
    prefill_[address] = std::make_unique<PrefillNode>(&env_, address, NewIncarnation());
  }
  void StartDecode(const std::string& address) {
    decode_[address] = std::make_unique<DecodeNode>(&env_, address, NewIncarnation());
  }
  void StartRouter();
  PrefillNode* FindPrefill(const std::string& address) {
    const auto found = prefill_.find(address);
    return found == prefill_.end() ? nullptr : found->second.get();
  }
  DecodeNode* FindDecode(const std::string& address) {
    const auto found = decode_.find(address);
    return found == decode_.end() ? nullptr : found->second.get();
  }
  std::vector<Node*> Nodes();

  void StartClient(const SimRequest* request);
  void AfterEvent();
  void Apply(const Fault& fault);
  template <typename Map>
  void KillWorker(Map* nodes, const Fault& fault, void (Cluster::*restart)(const std::string&));
  template <typename Map>
  void StopWorker(Map* nodes, const Fault& fault);
  void KillRouter(const Fault& fault);
  void Block(const Fault& fault);
  void JumpClock(const Fault& fault);

  bool AllEnded();
  void CheckClient(Client* client);
  void CheckStatus(const Client& client);
  void CheckAnswer(const Client& client);
  std::string WhatIsBusy();
  // Runs until `done` or that much time has passed.
  void RunUntil(absl::Duration limit, const std::function<bool()>& done);
  void Settle();
  void Probe();

  const Scenario scenario_;
  World world_;
  Network network_;
  Env env_;
  int incarnations_ = 0;
  std::map<std::string, std::unique_ptr<PrefillNode>> prefill_;
  std::map<std::string, std::unique_ptr<DecodeNode>> decode_;
  std::unique_ptr<RouterNode> router_;
  std::vector<std::unique_ptr<RouterNode>> dead_routers_;  // their calls are under way somewhere
  std::vector<std::unique_ptr<Client>> clients_;
  SimRequest probe_;
  size_t next_fault_ = 0;
  int applied_ = 0;
  bool router_clock_jumped_ = false;
  SimResult result_;
};

Cluster::~Cluster() {
  world_.set_after_event(nullptr);
  for (Node* node : Nodes()) node->Kill();
  if (router_ != nullptr) router_->Kill();
  prefill_.clear();
  decode_.clear();
  network_.Forget();
}

std::vector<Node*> Cluster::Nodes() {
  std::vector<Node*> nodes;
  for (const auto& [address, node] : prefill_) {
    if (node != nullptr) nodes.push_back(node.get());
  }
  for (const auto& [address, node] : decode_) {
    if (node != nullptr) nodes.push_back(node.get());
  }
  return nodes;
}

void Cluster::StartRouter() {
  RouterNode::Workers workers;
  for (int i = 0; i < scenario_.num_prefill; ++i) workers.prefill.push_back(absl::StrCat("p", i));
  for (int i = 0; i < scenario_.num_decode; ++i) workers.decode.push_back(absl::StrCat("d", i));
  workers.find_prefill = [this](const std::string& address) { return FindPrefill(address); };
  workers.find_decode = [this](const std::string& address) { return FindDecode(address); };
  router_ = std::make_unique<RouterNode>(&env_, std::move(workers));
}

void Cluster::StartClient(const SimRequest* request) {
  // Where nothing may be lost, clients come when the router has told that it serves.
  if (scenario_.survivable && !router_->usable()) {
    world_.After(absl::Milliseconds(10), nullptr, "client waits",
                 [this, request] { StartClient(request); });
    return;
  }
  auto client = std::make_unique<Client>();
  client->request = request;
  client->record = std::make_shared<ClientRecord>();
  client->started = world_.now();
  client->started_at_event = world_.num_events();
  Client* started = client.get();
  clients_.push_back(std::move(client));
  ++result_.requests;
  if (router_ == nullptr) {
    started->router_died = true;
    return;
  }
  router_->Start(request->wire, request->timeout, started->record, &started->call);
}

void Cluster::AfterEvent() {
  while (next_fault_ < scenario_.faults.size() &&
         scenario_.faults[next_fault_].at_event <= world_.num_events()) {
    Apply(scenario_.faults[next_fault_++]);
  }
  for (size_t i = 0; i < clients_.size(); ++i) {
    Client& client = *clients_[i];
    if (client.request->cancel_after && !client.cancelled && !client.router_died &&
        client.record->num_finishes == 0 &&
        world_.num_events() - client.started_at_event >= *client.request->cancel_after) {
      client.cancelled = true;
      world_.Trace("client ", client.request->engine.request_id, " leaves");
      client.call->OnClientCancel(absl::CancelledError("the client has gone"));
    }
    if (!client.checked) CheckClient(&client);
  }
}

void Cluster::Apply(const Fault& fault) {
  ++applied_;
  ++result_.faults;
  using Kind = Fault::Kind;
  switch (fault.kind) {
    case Kind::kKillPrefill:
      return KillWorker(&prefill_, fault, &Cluster::StartPrefill);
    case Kind::kKillDecode:
      return KillWorker(&decode_, fault, &Cluster::StartDecode);
    case Kind::kKillRouter:
      return KillRouter(fault);
    case Kind::kStopPrefill:
      return StopWorker(&prefill_, fault);
    case Kind::kStopDecode:
      return StopWorker(&decode_, fault);
    case Kind::kBreakStream: {
      auto streams = network_.open_streams();
      streams.erase(std::remove_if(streams.begin(), streams.end(),
                                   [](const auto& stream) { return stream->local(); }),
                    streams.end());
      if (streams.empty()) return;
      const auto& stream = streams[fault.which % streams.size()];
      world_.Trace("FAULT a stream between ", stream->process(0)->name(), " and ",
                   stream->process(1)->name(), " breaks");
      stream->Break(world_.random().OneIn(2));
      return;
    }
    case Kind::kBlockLink:
      return Block(fault);
    case Kind::kJumpClock:
      return JumpClock(fault);
  }
}

template <typename Map>
void Cluster::KillWorker(Map* nodes,
                         const Fault& fault,
                         void (Cluster::*restart)(const std::string&)) {
  auto at = nodes->begin();
  std::advance(at, fault.which % nodes->size());
  if (at->second == nullptr) return;
  const std::string address = at->first;
  world_.Trace("FAULT ", address, " is killed");
  at->second->Kill();
  at->second.reset();
  world_.After(fault.duration, nullptr, "restart", [this, address, restart] {
    world_.Trace(address, " starts again");
    (this->*restart)(address);
  });
}

template <typename Map>
void Cluster::StopWorker(Map* nodes, const Fault& fault) {
  auto at = nodes->begin();
  std::advance(at, fault.which % nodes->size());
  if (at->second == nullptr) return;
  const std::shared_ptr<Process> process = at->second->process();
  world_.Trace("FAULT ", at->first, " is stopped");
  process->Stop();
  world_.After(fault.duration, nullptr, "continue", [this, process] {
    world_.Trace(process->name(), " goes on");
    process->Continue();
  });
}

void Cluster::KillRouter(const Fault& fault) {
  if (router_ == nullptr) return;
  world_.Trace("FAULT the router is killed");
  for (const auto& client : clients_) {
    if (client->record->num_finishes == 0) client->router_died = true;
  }
  if (router_ != nullptr) router_->Kill();
  dead_routers_.push_back(std::move(router_));
  world_.After(std::min(fault.duration, absl::Seconds(1)), nullptr, "restart",
               [this] { StartRouter(); });
}

void Cluster::Block(const Fault& fault) {
  std::vector<std::string> names = {"router"};
  for (const auto& [address, node] : prefill_) names.push_back(address);
  for (const auto& [address, node] : decode_) names.push_back(address);
  const std::string& a = names[fault.which % names.size()];
  const std::string& b = names[fault.which / names.size() % names.size()];
  if (a == b) return;
  world_.Trace("FAULT nothing passes between ", a, " and ", b);
  network_.Block(a, b, world_.now() + fault.duration);
}

void Cluster::JumpClock(const Fault& fault) {
  std::vector<Process*> processes;
  for (Node* node : Nodes()) processes.push_back(node->process().get());
  if (router_ != nullptr) processes.push_back(router_->process().get());
  Process* process = processes[fault.which % processes.size()];
  world_.Trace("FAULT the clock of ", process->name(), " jumps");
  process->JumpClock(fault.duration);
  if (router_ == nullptr || process != router_->process().get()) return;
  router_clock_jumped_ = true;
  router_->timers().RunDue();
}

bool Cluster::AllEnded() {
  return clients_.size() == scenario_.requests.size() &&
         std::all_of(clients_.begin(), clients_.end(), [](const auto& client) {
           return client->router_died || client->record->num_finishes > 0;
         });
}

void Cluster::CheckClient(Client* client) {
  const ClientRecord& record = *client->record;
  const std::string& name = client->request->engine.request_id;
  if (client->router_died) {
    client->checked = true;
    return;
  }
  if (record.num_finishes == 0) {
    if (world_.now() > client->started + client->request->timeout + kSlack)
      Fail(absl::StrCat(name, " has not ended within its bound"));
    return;
  }
  client->checked = true;
  world_.Trace("client ", name, " ends: ", record.status.ToString());
  CheckStatus(*client);
  CheckAnswer(*client);
}

void Cluster::CheckStatus(const Client& client) {
  const absl::Status& status = client.record->status;
  const std::string& name = client.request->engine.request_id;
  const auto not_now = [&] { Fail(absl::StrCat(name, " ended with ", status.ToString())); };
  switch (status.code()) {
    case absl::StatusCode::kOk:
      ++result_.completed;
      return;
    case absl::StatusCode::kCancelled:
      ++result_.cancelled;
      if (!client.cancelled) not_now();
      return;
    case absl::StatusCode::kDeadlineExceeded:
      ++result_.failed;
      if (client.request->patient && !router_clock_jumped_) not_now();
      return;
    case absl::StatusCode::kUnavailable:
      ++result_.failed;
      if (scenario_.survivable) not_now();
      return;
    default:
      return not_now();
  }
}

void Cluster::CheckAnswer(const Client& client) {
  const ClientRecord& record = *client.record;
  const runtime::EngineRequest& request = client.request->engine;
  for (uint32_t choice = 0; choice < request.params.n; ++choice) {
    const std::vector<uint32_t> solo = SoloIds(request, choice, env_.settings.model);
    const std::vector<uint32_t> got =
        choice < record.ids.size() ? record.ids[choice] : std::vector<uint32_t>();
    const bool complete = got == solo;
    const bool beginning =
        got.size() <= solo.size() && std::equal(got.begin(), got.end(), solo.begin());
    if (!beginning || (record.status.ok() && !complete)) {
      return Fail(absl::StrCat(request.request_id, " choice ", choice, " got [",
                               absl::StrJoin(got, " "), "] alone it gets [",
                               absl::StrJoin(solo, " "), "]"));
    }
    if (!record.status.ok()) continue;
    const bool stopped = !request.params.stop_token_ids.empty() && solo.back() == kVocab - 1;
    const v1::FinishReason reason = stopped ? v1::FINISH_REASON_STOP : v1::FINISH_REASON_LENGTH;
    if (record.reasons[choice] != reason)
      Fail(absl::StrCat(request.request_id, " finished for reason ", record.reasons[choice]));
  }
  if (record.num_finishes > 1 || record.written_after_end)
    Fail(absl::StrCat(request.request_id, " ended more than once"));
}

std::string Cluster::WhatIsBusy() {
  std::string busy = router_ == nullptr ? "router: not there" : router_->Busy();
  for (Node* node : Nodes()) {
    if (busy.empty()) busy = node->Busy();
  }
  return busy;
}

void Cluster::RunUntil(absl::Duration limit, const std::function<bool()>& done) {
  const absl::Duration until = world_.now() + limit;
  while (!failed() && !done() && world_.now() < until) {
    if (world_.num_events() > kMaxEvents) return Fail("too many events");
    if (!world_.RunOne()) return Fail("nothing happens any more");
  }
}

// Nothing breaks any more, and what was held is given back.
void Cluster::Settle() {
  next_fault_ = scenario_.faults.size();
  network_.Heal();
  for (Node* node : Nodes()) {
    world_.After(absl::ZeroDuration(), nullptr, "continue",
                 [process = node->process()] { process->Continue(); });
  }
  RunUntil(kSettleTime, [this] {
    return prefill_.size() + decode_.size() == Nodes().size() && WhatIsBusy().empty();
  });
  if (!failed() && !WhatIsBusy().empty())
    Fail(absl::StrCat("held when nothing is going on: ", WhatIsBusy()));
}

// Case 11.6: whatever has happened, the cluster serves.
void Cluster::Probe() {
  RunUntil(kRestTime, [] { return false; });
  if (failed()) return;
  Random random(scenario_.requests.size());
  probe_ = scenario_.requests.front();
  probe_.engine.request_id = "probe";
  probe_.timeout = kProbeTimeout;
  probe_.cancel_after.reset();
  probe_.patient = true;
  router_clock_jumped_ = false;
  StartClient(&probe_);
  const auto its_client = [this] {
    const auto found = std::find_if(clients_.begin(), clients_.end(),
                                    [&](const auto& client) { return client->request == &probe_; });
    return found == clients_.end() ? nullptr : found->get();
  };
  RunUntil(kProbeTimeout + kSlack,
           [&] { return its_client() != nullptr && its_client()->record->num_finishes > 0; });
  if (failed()) return;
  if (its_client() == nullptr) return Fail("the router does not serve any more");
  const Client& client = *its_client();
  const bool chaos =
      scenario_.settings.data.flip_one_in > 0 || scenario_.settings.control.drop_one_in > 0 ||
      scenario_.settings.control.repeat_one_in > 0 || scenario_.settings.control.swap_one_in > 0;
  if (!client.record->status.ok() && !chaos)
    Fail(absl::StrCat("the cluster does not serve any more: ", client.record->status.ToString()));
}

SimResult Cluster::Run() {
  for (const SimRequest& request : scenario_.requests) {
    // Once the router knows its workers.
    world_.After(absl::Milliseconds(100) + request.arrives, nullptr, "client",
                 [this, &request] { StartClient(&request); });
  }
  RunUntil(absl::Seconds(400), [this] { return AllEnded(); });
  if (!failed() && !AllEnded()) Fail("requests have not ended");
  if (!failed()) Settle();
  if (!failed()) Probe();
  if (!failed()) Settle();
  result_.digest = world_.digest();
  result_.num_events = world_.num_events();
  result_.trace = world_.trace();
  return result_;
}

const Cluster* running = nullptr;

}  // namespace

SimResult RunSimulation(const SimOptions& options) {
  Cluster cluster(options);
  running = &cluster;
  SimResult result = cluster.Run();
  running = nullptr;
  return result;
}

const std::string& StoryOfTheRunning() {
  static const std::string* const none = new std::string;
  return running == nullptr ? *none : running->trace();
}

}  // namespace baton::sim
