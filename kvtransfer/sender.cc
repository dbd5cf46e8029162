#include "kvtransfer/sender.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/fingerprint.h"
#include "kvtransfer/sender_engine.h"
#include "kvtransfer/socket.h"
#include "kvtransfer/transport.h"
#include "kvtransfer/transport_terms.h"
#include "kvtransfer/unreachable_transports.h"

namespace baton::kvtransfer {
namespace {

class SenderImpl : public SenderEngine {
 public:
  template <typename... Args>
  explicit SenderImpl(Args&&... args) : SenderEngine(std::forward<Args>(args)...) {
    thread_ = std::thread([this] { Run(); });
  }
  ~SenderImpl() override {
    stopping_.store(true);
    wake_.Wake();
    thread_.join();
  }

 private:
  void Wake() override { wake_.Wake(); }

  void Run() {
    while (!stopping_.load()) {
      if (!Step()) WaitForWork();
    }
    Stop();
  }

  void WaitForWork() {
    pollfd entries[2] = {{wake_.fd(), POLLIN, 0}, {-1, 0, 0}};
    if (transport() != nullptr) {
      entries[1] = {transport()->fd(),
                    static_cast<short>(transport()->wants_write() ? POLLIN | POLLOUT : POLLIN), 0};
    }
    const int64_t timer_ms = absl::ToInt64Milliseconds(NextTimer() - clock().Now());
    absl::Duration wait = absl::Milliseconds(std::clamp<int64_t>(timer_ms, 0, 1000) + 1);
    if (transport() != nullptr) wait = std::min(wait, transport()->poll_interval());
    const timespec timeout = absl::ToTimespec(wait);
    ppoll(entries, 2, &timeout, nullptr);
    wake_.Drain();
  }

  WakeFd wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// What we insist on: a transport that is named is used or nothing is.
TransportTerms OurTerms(const SenderOptions& options) {
  TransportTerms terms{
      "prefill",
      TransportsOf(options.transport, options.pool != nullptr, options.device_pool != nullptr),
      options.required_transport};
  if (options.transport != "auto") terms.required = options.transport;
  return terms;
}

struct Connected {
  std::unique_ptr<PutTransport> transport;
  double bytes_per_second = 0;
};

absl::StatusOr<Connected> TryOne(const worker::v1::TransportEndpoint& endpoint,
                                 const ConnectOptions& options) {
  Connected connected;
  BATON_ASSIGN_OR_RETURN(connected.transport, ConnectTo(endpoint, options));
  BATON_ASSIGN_OR_RETURN(connected.bytes_per_second, connected.transport->Probe(options.timeout));
  return connected;
}

// A transport that would have been better, and why it is not.
struct Miss {
  std::string name;
  absl::Status why;
  bool remembered = false;  // from an earlier meeting
};

std::vector<std::string> Reasons(const std::vector<Miss>& misses) {
  std::vector<std::string> reasons;
  for (const Miss& miss : misses)
    reasons.push_back(absl::StrCat(miss.name, ": ", miss.why.message()));
  return reasons;
}

void ReportFallback(const SenderOptions& options,
                    const std::vector<Miss>& misses,
                    const std::string& taken) {
  if (misses.empty()) return;
  for (const std::string& reason : Reasons(misses))
    BATON_LOG(Warning, "transport not usable ", reason);
  const TransportFallback fallback{misses.front().name, taken,
                                   std::string(FallbackReason(misses.front().why))};
  BATON_LOG(Warning, "transport fallback from=", fallback.from, " to=", fallback.to,
            " reason=", fallback.reason);
  if (options.on_fallback) options.on_fallback(fallback);
}

// What is known of a transport that would rather not be waited for. One that must be used is.
absl::Status KnownToFail(const SenderOptions& options,
                         const worker::v1::Hello& peer,
                         const std::string& transport,
                         bool required) {
  if (options.unreachable == nullptr || required) return absl::OkStatus();
  return options.unreachable->Find(peer.incarnation(), transport, *options.clock);
}

// The peer was reached after all.
void NoteMisses(const SenderOptions& options,
                const worker::v1::Hello& peer,
                const std::vector<Miss>& misses) {
  if (options.unreachable == nullptr) return;
  for (const Miss& miss : misses) {
    if (!miss.remembered)
      options.unreachable->Note(peer.incarnation(), miss.name, miss.why, *options.clock);
  }
}

// What did not answer at an earlier meeting may answer now, where there is nothing else. The first
// that does; `misses` are then those before it.
std::optional<Connected> TryRemembered(const worker::v1::Hello& peer,
                                       const ConnectOptions& connect,
                                       std::vector<Miss>* misses) {
  for (auto miss = misses->begin(); miss != misses->end(); ++miss) {
    if (!miss->remembered) continue;
    const auto endpoint =
        std::find_if(peer.transports().begin(), peer.transports().end(),
                     [&](const auto& other) { return other.name() == miss->name; });
    absl::StatusOr<Connected> connected = TryOne(*endpoint, connect);
    if (connected.ok()) {
      misses->erase(miss, misses->end());
      return *std::move(connected);
    }
    miss->why = connected.status();
  }
  return std::nullopt;
}

// The first of the peer's transports that works here, in its order, or exactly the one required.
absl::StatusOr<Connected> Connect(const SenderOptions& options, const worker::v1::Hello& peer) {
  const TransportTerms ours = OurTerms(options);
  const TransportTerms theirs{"decode", OffersOf(peer), ""};
  BATON_RETURN_IF_ERROR(CheckTerms(ours, theirs));
  ConnectOptions connect;
  connect.pool = options.pool;
  connect.device_pool = options.device_pool;
  connect.layout = options.layout;
  connect.timeout = options.reply_timeout;
  std::vector<Miss> misses;
  if (absl::Status best = CheckBestOffered(ours, theirs); !best.ok())
    misses.push_back({ours.offers.front(), std::move(best)});
  for (const worker::v1::TransportEndpoint& endpoint : peer.transports()) {
    if (!ours.required.empty() && ours.required != endpoint.name()) continue;
    if (std::find(ours.offers.begin(), ours.offers.end(), endpoint.name()) == ours.offers.end())
      continue;
    absl::Status known = KnownToFail(options, peer, endpoint.name(), !ours.required.empty());
    if (!known.ok()) {
      misses.push_back({endpoint.name(), std::move(known), true});
      continue;
    }
    absl::StatusOr<Connected> connected = TryOne(endpoint, connect);
    if (connected.ok()) {
      ReportFallback(options, misses, endpoint.name());
      NoteMisses(options, peer, misses);
      return connected;
    }
    misses.push_back({endpoint.name(), connected.status()});
  }
  if (std::optional<Connected> connected = TryRemembered(peer, connect, &misses)) {
    ReportFallback(options, misses, std::string(connected->transport->name()));
    return *std::move(connected);
  }
  std::vector<std::string> reasons = Reasons(misses);
  if (reasons.empty()) reasons.push_back("the decode worker offers none");
  const std::string message = absl::StrCat("transport: none works: ", absl::StrJoin(reasons, "; "),
                                           " (", DescribeTerms(ours, theirs), ")");
  return ours.required.empty() ? absl::UnavailableError(message)
                               : absl::FailedPreconditionError(message);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sender>> Sender::Create(const SenderOptions& options,
                                                       const worker::v1::Hello& peer,
                                                       PeerLink* link) {
  BATON_RETURN_IF_ERROR(CheckFingerprintOfPool(options.hello.fingerprint(), options.layout));
  BATON_RETURN_IF_ERROR(CompareFingerprints(options.hello.fingerprint(), peer.fingerprint()));
  BATON_RETURN_IF_ERROR(CheckPools(options.layout, options.pool, options.device_pool));
  BATON_ASSIGN_OR_RETURN(Connected connected, Connect(options, peer));
  BATON_LOG(Info, "hand-over connection ready ", LogField("transport", connected.transport->name()),
            " ", LogField("bytes_per_second", connected.bytes_per_second));
  return std::make_unique<SenderImpl>(options, peer.incarnation(), link,
                                      std::move(connected.transport), connected.bytes_per_second);
}

}  // namespace baton::kvtransfer
