#include "tests/sim/cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster_run.h"

namespace baton::sim {
namespace {

constexpr absl::Duration kSettleTime = absl::Seconds(60);  // until nothing is held any more
constexpr absl::Duration kRestTime = absl::Seconds(3);     // until the router knows everybody again
constexpr absl::Duration kProbeTimeout = absl::Seconds(30);
constexpr uint64_t kMaxEvents = 2000000;

}  // namespace

Cluster::Cluster(const SimOptions& options)
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

void Cluster::Fail(const std::string& what) {
  if (failed()) return;
  result_.violation = what;
  world_.Trace("VIOLATION ", what);
}

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
  client->reader = std::make_shared<Reader>(&env_, request->reading);
  client->started = world_.now();
  client->started_at_event = world_.num_events();
  Client* started = client.get();
  clients_.push_back(std::move(client));
  ++result_.requests;
  if (router_ == nullptr) {
    started->router_died = true;
    return;
  }
  router_->Start(request->wire, request->timeout, started->reader, &started->call);
  // What has been written when the time is over is not read any more. Before that it is the
  // router's to end the call.
  world_.After(request->timeout + kSlack / 2, nullptr, "client's deadline", [started] {
    if (!started->reader->router_is_done()) return;
    started->reader->Leave(absl::DeadlineExceededError("deadline exceeded"));
  });
}

void Cluster::AfterEvent() {
  while (next_fault_ < scenario_.faults.size() &&
         scenario_.faults[next_fault_].at_event <= world_.num_events()) {
    Apply(scenario_.faults[next_fault_++]);
  }
  for (size_t i = 0; i < clients_.size(); ++i) {
    Client& client = *clients_[i];
    if (client.request->cancel_after && !client.cancelled && !client.router_died &&
        client.record().num_finishes == 0 &&
        world_.num_events() - client.started_at_event >= *client.request->cancel_after) {
      client.cancelled = true;
      world_.Trace("client ", client.request->engine.request_id, " leaves");
      const absl::Status gone = absl::CancelledError("the client has gone");
      client.call->OnClientCancel(gone);
      client.reader->Leave(gone);
    }
    if (!client.checked) CheckClient(&client);
  }
}

bool Cluster::AllEnded() {
  return clients_.size() == scenario_.requests.size() &&
         std::all_of(clients_.begin(), clients_.end(), [](const auto& client) {
           return client->router_died || client->record().num_finishes > 0;
         });
}

bool Cluster::NobodyDrains() {
  const std::vector<Node*> nodes = Nodes();
  return std::none_of(nodes.begin(), nodes.end(), [](Node* node) { return node->draining(); });
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
    node->Sicken(world_.now());
    world_.After(absl::ZeroDuration(), nullptr, "continue",
                 [process = node->process()] { process->Continue(); });
  }
  RunUntil(kSettleTime, [this] {
    return prefill_.size() + decode_.size() == Nodes().size() && NobodyDrains() &&
           WhatIsBusy().empty();
  });
  if (!failed() && !NobodyDrains()) Fail("a worker does not end its drain");
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
  probe_.reading = Reading();
  // Where pieces are damaged and messages lost for ever, its tries may all have been in vain.
  const bool chaos =
      scenario_.settings.data.flip_one_in > 0 || scenario_.settings.control.drop_one_in > 0 ||
      scenario_.settings.control.repeat_one_in > 0 || scenario_.settings.control.swap_one_in > 0;
  probe_.patient = !chaos;
  router_clock_jumped_ = false;
  StartClient(&probe_);
  const auto its_client = [this] {
    const auto found = std::find_if(clients_.begin(), clients_.end(),
                                    [&](const auto& client) { return client->request == &probe_; });
    return found == clients_.end() ? nullptr : found->get();
  };
  RunUntil(kProbeTimeout + kSlack,
           [&] { return its_client() != nullptr && its_client()->record().num_finishes > 0; });
  if (failed()) return;
  if (its_client() == nullptr) return Fail("the router does not serve any more");
  const Client& client = *its_client();
  if (!client.record().status.ok() && !client.record().overflowed && !chaos)
    Fail(absl::StrCat("the cluster does not serve any more: ", client.record().status.ToString()));
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

namespace {

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
