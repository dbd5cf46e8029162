#pragma once

// Sessions with decode workers over gRPC: opened on demand, kept, replaced when a worker has
// restarted.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "baton/worker/v1/peer.pb.h"
#include "engine/process/channel.h"
#include "kvtransfer/sender.h"
#include "prefill_worker/prefill_loop.h"

namespace baton::prefill {

struct PeerClientOptions {
  // For the sender of each session. Its `hello` is ours.
  kvtransfer::SenderOptions sender;
  process::ChannelSecurity security;  // of the control streams
  // Until the peer's Hello; connecting the data plane has its own limit.
  absl::Duration hello_timeout = absl::Seconds(5);
  // Above it no new addresses are taken.
  int max_peers = 256;
  // A session has begun or ended. From any thread; must not block.
  std::function<void()> on_change;
};

// Thread-safe.
class PeerClient : public PeerConnector {
 public:
  explicit PeerClient(PeerClientOptions options);
  // Shuts down.
  ~PeerClient() override;
  PeerClient(const PeerClient&) = delete;
  PeerClient& operator=(const PeerClient&) = delete;

  void Connect(const std::string& address, const std::string& incarnation, Found found) override;

  // Ends every session. Open transfers end with UNAVAILABLE. Idempotent.
  void Shutdown();

  struct Info {
    std::string address;
    std::string transport;
    double probe_bytes_per_second = 0;
  };
  std::vector<Info> peers() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::prefill
