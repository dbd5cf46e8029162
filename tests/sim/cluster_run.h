#pragma once

// A simulation under way: its processes, clients and misfortunes. cluster.cc runs it,
// cluster_faults.cc does the harm, cluster_checks.cc looks at what clients got.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/sim/cluster.h"
#include "tests/sim/router_node.h"
#include "tests/sim/scenario.h"

namespace baton::sim {

inline constexpr absl::Duration kSlack = absl::Seconds(1);  // behind a deadline

struct Client {
  const SimRequest* request;
  std::shared_ptr<Reader> reader;  // shared with its sink
  std::shared_ptr<router::GenerateCall> call;
  absl::Duration started;
  uint64_t started_at_event = 0;
  bool cancelled = false;
  bool router_died = false;
  bool checked = false;

  const ClientRecord& record() const { return reader->record(); }
};

class Cluster {
 public:
  explicit Cluster(const SimOptions& options);
  ~Cluster();

  SimResult Run();
  const std::string& trace() const { return world_.trace(); }

 private:
  void Fail(const std::string& what);
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
  // It refuses all calls for a while, and reports that it is ready.
  template <typename Map>
  void SickenWorker(Map* nodes, const Fault& fault);
  // SIGTERM: it ends when nothing is open or its time is over, and starts again.
  template <typename Map>
  void DrainWorker(Map* nodes, const Fault& fault, void (Cluster::*restart)(const std::string&));
  template <typename Map>
  void AwaitDrained(Map* nodes,
                    const std::string& address,
                    absl::Duration until,
                    bool patient,
                    const std::function<void()>& restart);
  void KillRouter(const Fault& fault);
  void Block(const Fault& fault);
  void JumpClock(const Fault& fault);

  bool AllEnded();
  bool NobodyDrains();
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

}  // namespace baton::sim
