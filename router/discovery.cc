#include "router/discovery.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <utility>

#include "absl/strings/str_cat.h"

#include "engine/base/log.h"

namespace baton::router {
namespace {

// Most workers behind one name; more are not looked at.
constexpr size_t kMaxAddresses = 4096;

std::string AddressText(const sockaddr* address, int port) {
  char text[INET6_ADDRSTRLEN];
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    if (inet_ntop(AF_INET, &v4->sin_addr, text, sizeof(text)) == nullptr) return "";
    return absl::StrCat(text, ":", port);
  }
  if (address->sa_family != AF_INET6) return "";
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  if (inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof(text)) == nullptr) return "";
  return absl::StrCat("[", text, "]:", port);
}

}  // namespace

Discovery::Discovery(std::vector<ServiceName> names, Resolver resolver, Callbacks callbacks)
    : names_(std::move(names)),
      resolver_(std::move(resolver)),
      callbacks_(std::move(callbacks)),
      known_(names_.size()) {}

void Discovery::Step() {
  for (size_t i = 0; i < names_.size(); ++i) {
    const absl::StatusOr<std::vector<std::string>> addresses = resolver_(names_[i]);
    if (!addresses.ok()) {
      BATON_LOG(Debug, "name not resolved", LogField("name", names_[i].host),
                LogField("reason", addresses.status().message()));
      continue;
    }
    std::map<std::string, int>& known = known_[i];
    for (auto& [address, misses] : known) ++misses;
    for (const std::string& address : *addresses) {
      const bool is_new = !known.contains(address);
      known[address] = 0;
      if (is_new) callbacks_.found(names_[i].role, address);
    }
    for (auto it = known.begin(); it != known.end();) {
      const bool gone = it->second >= kMissesMax && !callbacks_.alive(it->first);
      if (gone) callbacks_.gone(it->first);
      it = gone ? known.erase(it) : std::next(it);
    }
  }
}

absl::StatusOr<std::vector<std::string>> ResolveByDns(const ServiceName& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(name.host.c_str(), nullptr, &hints, &list);
  if (error == EAI_NONAME) return std::vector<std::string>();  // no worker is there
  if (error != 0) return absl::UnavailableError(absl::StrCat(name.host, ": ", gai_strerror(error)));
  std::set<std::string> found;
  for (const addrinfo* at = list; at != nullptr && found.size() < kMaxAddresses; at = at->ai_next) {
    const std::string text = AddressText(at->ai_addr, name.port);
    if (!text.empty()) found.insert(text);
  }
  freeaddrinfo(list);
  return std::vector<std::string>(found.begin(), found.end());
}

DiscoveryThread::DiscoveryThread(Discovery discovery, absl::Duration interval)
    : discovery_(std::move(discovery)), interval_(interval), thread_([this] { Run(); }) {}

DiscoveryThread::~DiscoveryThread() {
  {
    base::MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.join();
}

void DiscoveryThread::Run() {
  while (true) {
    discovery_.Step();
    base::MutexLock lock(&mutex_);
    if (!stopping_) wake_.WaitFor(&mutex_, interval_);
    if (stopping_) return;
  }
}

}  // namespace baton::router
