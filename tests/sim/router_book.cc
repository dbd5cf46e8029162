#include "tests/sim/router_book.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::sim {
namespace {

// As the project says it: worker_table.h, breaker.h.
constexpr absl::Duration kSilent = absl::Seconds(3);
constexpr int kRefusalsMax = 3;
// A refusal does not count there when the other worker has ended that attempt already. This many in
// a row are never all of that kind.
constexpr int kRefusalsSure = 2 * kRefusalsMax;
constexpr absl::Duration kPauseMin = absl::Seconds(1);
constexpr absl::Duration kLastWord = absl::Milliseconds(500);

class WatchedPolicy : public router::RoutePolicy {
 public:
  WatchedPolicy(std::unique_ptr<router::RoutePolicy> policy, const RouterBook* book, Env* env)
      : policy_(std::move(policy)), book_(*book), env_(env) {}

  absl::StatusOr<router::Route> Choose(absl::Span<const router::WorkerView> workers,
                                       const router::RouteRequest& request) const override {
    absl::StatusOr<router::Route> route = policy_->Choose(workers, request);
    // Without a ticket it is a question, and nothing is sent.
    if (!route.ok() || request.ticket == 0) return route;
    for (const std::string& address : {route->prefill, route->decode}) {
      const std::string why = address.empty() ? "" : book_.WhyNot(address);
      if (!why.empty()) env_->fail(absl::StrCat("new work for ", address, ", which ", why));
    }
    return route;
  }

 private:
  const std::unique_ptr<router::RoutePolicy> policy_;
  const RouterBook& book_;
  Env* const env_;
};

}  // namespace

void RouterBook::OnStatus(const std::string& address, const worker::v1::WorkerStatus& status) {
  Heard& heard = heard_[address];
  if (heard.incarnation != status.incarnation()) heard = Heard();
  heard.incarnation = status.incarnation();
  heard.state = status.state();
  heard.at = clock_.Now();
  heard.silent = false;
}

void RouterBook::OnSweep() {
  for (auto& [address, heard] : heard_) heard.silent = clock_.Now() - heard.at >= kSilent;
}

void RouterBook::OnAnswer(const std::string& address) {
  heard_[address].refusals = 0;
  heard_[address].answered_at = clock_.Now();
}

void RouterBook::OnRefusal(const std::string& address) {
  Heard& heard = heard_[address];
  // A call that goes well speaks for its worker when it ends, a little after its last message.
  if (clock_.Now() - heard.answered_at < kLastWord) return;
  // Calls that were under way when the pause began do not make it longer.
  if (++heard.refusals == kRefusalsMax) heard.pause_began_at = clock_.Now();
}

std::string RouterBook::WhyNot(const std::string& address) const {
  const auto found = heard_.find(address);
  if (found == heard_.end()) return "has never been heard of";
  const Heard& heard = found->second;
  if (heard.state == worker::v1::WORKER_STATE_DRAINING) return "drains";
  if (heard.state != worker::v1::WORKER_STATE_READY) return "is not there";
  if (heard.silent) return "has been silent";
  if (heard.refusals >= kRefusalsSure && clock_.Now() < heard.pause_began_at + kPauseMin)
    return absl::StrCat("has just refused ", heard.refusals, " calls in a row");
  return "";
}

std::unique_ptr<router::RoutePolicy> WatchChoices(std::unique_ptr<router::RoutePolicy> policy,
                                                  const RouterBook* book,
                                                  Env* env) {
  return std::make_unique<WatchedPolicy>(std::move(policy), book, env);
}

}  // namespace baton::sim
