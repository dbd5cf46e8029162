#pragma once

// A simulated router process: the project's own calls, admission, worker table and policy, with
// simulated timers, legs and clients.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "router/generate_call.h"
#include "tests/sim/reader.h"
#include "tests/sim/router_book.h"
#include "tests/sim/workers.h"

namespace baton::sim {

class SimTimers : public router::Timers {
 public:
  SimTimers(World* world, std::shared_ptr<Process> process)
      : world_(world), process_(std::move(process)) {}
  Id At(absl::Duration when, std::function<void()> callback) override;
  bool Cancel(Id id) override { return waiting_.erase(id) > 0; }
  size_t num_waiting() const { return waiting_.size(); }
  // The clock has jumped.
  void RunDue();

 private:
  void Fire(Id id);

  World* const world_;
  const std::shared_ptr<Process> process_;
  Id last_id_ = 0;
  std::map<Id, std::pair<absl::Duration, std::function<void()>>> waiting_;
};

class RouterNode : private router::LegFactory {
 public:
  struct Workers {
    std::vector<std::string> prefill, decode;
    std::function<PrefillNode*(const std::string&)> find_prefill;  // null: nobody listens
    std::function<DecodeNode*(const std::string&)> find_decode;
  };

  RouterNode(Env* env, Workers workers);
  ~RouterNode() override;

  const std::shared_ptr<Process>& process() const { return process_; }
  // A client's call; `reader` gets what it is answered. `timeout`: its deadline from now on.
  void Start(const v1::GenerateRequest& request,
             absl::Duration timeout,
             std::shared_ptr<Reader> reader,
             std::shared_ptr<router::GenerateCall>* call);
  // A request can be served, as far as the router knows.
  bool usable() const { return table_.Usable().ok(); }
  SimTimers& timers() { return timers_; }
  void Kill();
  // What is held although nothing is going on; "" when there is nothing.
  std::string Busy() const;

 private:
  std::unique_ptr<router::PrefillLeg> OpenPrefill(const std::string& address,
                                                  worker::v1::PrefillRequest::Open open,
                                                  absl::Duration deadline,
                                                  router::PrefillEvents events) override;
  std::unique_ptr<router::DecodeLeg> OpenDecode(const std::string& address,
                                                worker::v1::DecodeRequest::Open open,
                                                absl::Duration deadline,
                                                router::DecodeEvents events) override;
  // Both take note in the book of what `address` answers.
  template <typename Response>
  router::LegEvents<Response> Watched(const std::string& address,
                                      router::LegEvents<Response> events);
  template <typename Call>
  void Remember(const std::shared_ptr<Call>& call);
  // Asks a worker for its status for as long as it answers, and again when it does not.
  void Watch(const std::string& address, bool is_prefill);
  Node* Find(const std::string& address, bool is_prefill) const;
  void Sweep();

  Env* const env_;
  const Workers workers_;
  std::vector<std::function<void()>> forget_;  // cuts the cycles of calls that never ended
  const std::shared_ptr<Process> process_;     // shared with what is under way to it
  SimTimers timers_;
  std::unique_ptr<base::Metrics> store_;
  router::RouterMetrics metrics_;
  router::WorkerTable table_;
  RouterBook book_;
  std::unique_ptr<router::RoutePolicy> policy_;
  std::unique_ptr<router::PromptEncoder> encoder_;
  router::Admission admission_;
  router::CallDeps deps_;
};

}  // namespace baton::sim
