#include <algorithm>

#include "tests/sim/cluster_run.h"

namespace baton::sim {
namespace {

constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);
constexpr absl::Duration kDrainTimeout = absl::Seconds(60);
constexpr absl::Duration kDrainTimeoutShort = absl::Milliseconds(30);

// end() where that worker is not there.
template <typename Map>
typename Map::iterator Target(Map* nodes, const Fault& fault) {
  auto at = nodes->begin();
  std::advance(at, fault.which % nodes->size());
  const bool there = at->second != nullptr && at->second->process()->alive();
  return there ? at : nodes->end();
}

}  // namespace

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
    case Kind::kSickPrefill:
      return SickenWorker(&prefill_, fault);
    case Kind::kSickDecode:
      return SickenWorker(&decode_, fault);
    case Kind::kDrainPrefill:
      return DrainWorker(&prefill_, fault, &Cluster::StartPrefill);
    case Kind::kDrainDecode:
      return DrainWorker(&decode_, fault, &Cluster::StartDecode);
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
  const auto at = Target(nodes, fault);
  if (at == nodes->end()) return;
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
  const auto at = Target(nodes, fault);
  if (at == nodes->end()) return;
  const std::shared_ptr<Process> process = at->second->process();
  world_.Trace("FAULT ", at->first, " is stopped");
  process->Stop();
  world_.After(fault.duration, nullptr, "continue", [this, process] {
    world_.Trace(process->name(), " goes on");
    process->Continue();
  });
}

template <typename Map>
void Cluster::SickenWorker(Map* nodes, const Fault& fault) {
  const auto at = Target(nodes, fault);
  if (at == nodes->end()) return;
  world_.Trace("FAULT ", at->first, " is sick");
  at->second->Sicken(world_.now() + fault.duration);
}

template <typename Map>
void Cluster::DrainWorker(Map* nodes,
                          const Fault& fault,
                          void (Cluster::*restart)(const std::string&)) {
  const auto at = Target(nodes, fault);
  if (at == nodes->end() || at->second->draining()) return;
  const std::string address = at->first;
  world_.Trace("FAULT ", address, " is asked to end");
  at->second->Drain();
  const absl::Duration patience =
      fault.which / nodes->size() % 2 == 0 ? kDrainTimeout : kDrainTimeoutShort;
  AwaitDrained(nodes, address, world_.now() + patience, patience == kDrainTimeout,
               [this, address, restart, pause = fault.duration] {
                 world_.After(pause, nullptr, "restart", [this, address, restart] {
                   world_.Trace(address, " starts again");
                   (this->*restart)(address);
                 });
               });
}

template <typename Map>
void Cluster::AwaitDrained(Map* nodes,
                           const std::string& address,
                           absl::Duration until,
                           bool patient,
                           const std::function<void()>& restart) {
  auto& node = nodes->at(address);
  const bool late = world_.now() >= until;
  // With nothing else going wrong, what is open ends, and with it all that is held.
  if (late && scenario_.survivable && patient)
    Fail(absl::StrCat(address, " does not end its drain: ", node->Busy()));
  if (late && !node->idle()) {
    world_.Trace(address, "'s drain is cut short");
    node->EndCalls();
  }
  const bool ends = late || (node->idle() && node->Busy().empty());
  if (ends && !late) world_.Trace(address, " has drained");
  // What it says last is on its way before it ends.
  world_.After(kDrainPoll, node->process(), "drain",
               [this, nodes, address, until, patient, restart, ends] {
                 if (!ends) return AwaitDrained(nodes, address, until, patient, restart);
                 nodes->at(address)->Kill();
                 // Not in an event of its own process.
                 world_.After(absl::ZeroDuration(), nullptr, "gone", [nodes, address, restart] {
                   nodes->at(address).reset();
                   restart();
                 });
               });
}

void Cluster::KillRouter(const Fault& fault) {
  if (router_ == nullptr) return;
  world_.Trace("FAULT the router is killed");
  for (const auto& client : clients_) {
    if (client->record().num_finishes == 0) client->router_died = true;
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

}  // namespace baton::sim
