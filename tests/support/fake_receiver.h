#pragma once

#include <map>
#include <vector>

#include "kvtransfer/receiver.h"

namespace baton::testing {

// Numbers reservations; what happens to them is the test's to say.
class FakeReceiver : public kvtransfer::Receiver {
 public:
  worker::v1::Handoff Reserve(kvtransfer::Reservation reservation) override {
    worker::v1::Handoff handoff;
    handoff.set_reservation_id(next_id++);
    handoff.set_decode_incarnation("0123456789abcdef");
    reservations[handoff.reservation_id()] = std::move(reservation);
    return handoff;
  }
  bool Revoke(uint64_t reservation_id, absl::string_view reason) override {
    revoked.push_back(reservation_id);
    return revoke_answer;
  }
  absl::StatusOr<worker::v1::Hello> OnPeerHello(const worker::v1::Hello&,
                                                kvtransfer::PeerLink*,
                                                kvtransfer::SessionId*) override {
    return absl::UnimplementedError("");
  }
  void OnMessage(kvtransfer::SessionId, const worker::v1::PeerMessage&) override {}
  void OnPeerGone(kvtransfer::SessionId) override {}
  std::vector<PeerInfo> peers() const override { return {}; }

  uint64_t next_id = 1;
  bool revoke_answer = true;
  std::map<uint64_t, kvtransfer::Reservation> reservations;
  std::vector<uint64_t> revoked;
};

}  // namespace baton::testing
