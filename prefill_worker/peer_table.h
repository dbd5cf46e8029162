#pragma once

// Which sessions with decode workers stand and who waits for one, as a plain table: no threads, no
// gRPC.

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "prefill_worker/prefill_loop.h"

namespace baton::prefill {

// One control stream, as the table sees it.
class PeerStream {
 public:
  virtual ~PeerStream() = default;
  virtual bool ended() const = 0;
  virtual void Close() = 0;
};

// Thread-compatible.
class PeerTable {
 public:
  using Found = PeerConnector::Found;
  using SharedSender = std::shared_ptr<kvtransfer::Sender>;
  // A session that has been opened. Shared with the transport's callbacks and with the loop's
  // transfers, which end independently of it.
  struct Opened {
    std::string incarnation;
    std::shared_ptr<PeerStream> stream;
    SharedSender sender;
  };
  struct Answer {
    Found found;
    absl::StatusOr<SharedSender> sender;
  };

  explicit PeerTable(int max_peers) : max_peers_(max_peers) {}

  // A request for the instance `incarnation` at `address`. The caller gives the answers when it
  // holds no lock. True: nobody opens a session with that address, and the caller must begin, then
  // say OnOpened.
  bool Connect(const std::string& address,
               const std::string& incarnation,
               Found found,
               std::vector<Answer>* answers);
  // How it ended. The stream returned, if any, is not wanted any more: to be closed.
  std::shared_ptr<PeerStream> OnOpened(const std::string& address,
                                       absl::StatusOr<Opened> opened,
                                       std::vector<Answer>* answers);
  // From here on everything is refused, and what is opened is not wanted.
  void Stop() { stopping_ = true; }

  // The sessions that stand, by address.
  std::vector<std::pair<std::string, Opened>> Standing() const;

 private:
  struct Waiter {
    std::string incarnation;
    Found found;
  };
  struct Peer {
    bool opening = false;
    Opened session;
    std::vector<Waiter> waiters;
    bool Stands() const { return session.stream != nullptr && !session.stream->ended(); }
  };

  int max_peers_;
  bool stopping_ = false;
  std::map<std::string, Peer> peers_;
};

}  // namespace baton::prefill
