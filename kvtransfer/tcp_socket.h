#pragma once

// A listening TCP socket for peers on any host, as tcp and nccl take their frames from.

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/socket.h"

namespace baton::kvtransfer {

// Thread-compatible.
class TcpSocket {
 public:
  // `port` 0 takes any. Peers are told `advertised_host`, or `host` where that is empty.
  // Errors: UNAVAILABLE.
  absl::Status Listen(const std::string& host, int port, const std::string& advertised_host);
  // Errors: UNAVAILABLE.
  absl::StatusOr<UniqueFd> Accept();

  // "10.0.0.7:41234".
  const std::string& address() const { return address_; }
  int fd() const { return fd_.get(); }

 private:
  std::string address_;
  UniqueFd fd_;
};

}  // namespace baton::kvtransfer
