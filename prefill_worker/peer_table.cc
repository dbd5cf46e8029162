#include "prefill_worker/peer_table.h"

#include "absl/strings/str_cat.h"

namespace baton::prefill {

bool PeerTable::Connect(const std::string& address,
                        const std::string& incarnation,
                        Found found,
                        std::vector<Answer>* answers) {
  const auto refuse = [&](absl::Status status) {
    answers->push_back({std::move(found), std::move(status)});
    return false;
  };
  if (stopping_) return refuse(absl::UnavailableError("prefill: stopping"));
  if (!peers_.contains(address) && peers_.size() >= static_cast<size_t>(max_peers_))
    return refuse(absl::UnavailableError(absl::StrCat("prefill: max_peers=", max_peers_)));
  Peer& peer = peers_[address];
  if (!peer.opening && peer.Stands() && peer.session.incarnation == incarnation) {
    if (peer.session.sender->suspect()) {
      return refuse(absl::UnavailableError(
          absl::StrCat("decode worker ", address, " is suspect: no heartbeat")));
    }
    answers->push_back({std::move(found), peer.session.sender});
    return false;
  }
  peer.waiters.push_back({incarnation, std::move(found)});
  return !std::exchange(peer.opening, true);
}

std::shared_ptr<PeerStream> PeerTable::OnOpened(const std::string& address,
                                                absl::StatusOr<Opened> opened,
                                                std::vector<Answer>* answers) {
  Peer& peer = peers_[address];
  peer.opening = false;
  std::shared_ptr<PeerStream> unwanted;
  const std::string incarnation = opened.ok() ? opened->incarnation : "";
  const bool stands_already =
      opened.ok() && peer.Stands() && peer.session.incarnation == incarnation;
  if (opened.ok() && (stopping_ || stands_already)) {
    // The request was for an instance that has gone; the session with its successor stands.
    unwanted = opened->stream;
  } else if (opened.ok()) {
    unwanted = peer.session.stream;
    peer.session = *std::move(opened);
  }
  for (Waiter& waiter : std::exchange(peer.waiters, {})) {
    absl::StatusOr<SharedSender> answer = peer.session.sender;
    if (!opened.ok()) {
      answer = opened.status();
    } else if (stopping_) {
      answer = absl::UnavailableError("prefill: stopping");
    } else if (waiter.incarnation != incarnation) {
      answer = absl::UnavailableError(
          absl::StrCat("decode worker ", address, " is another instance than the reservation's"));
    }
    answers->push_back({std::move(waiter.found), std::move(answer)});
  }
  return unwanted;
}

std::vector<std::pair<std::string, PeerTable::Opened>> PeerTable::Standing() const {
  std::vector<std::pair<std::string, Opened>> standing;
  for (const auto& [address, peer] : peers_) {
    if (peer.Stands()) standing.emplace_back(address, peer.session);
  }
  return standing;
}

}  // namespace baton::prefill
