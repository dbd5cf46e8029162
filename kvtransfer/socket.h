#pragma once

// Descriptors and stream sockets, as the transports need them. All sockets are non-blocking and
// close-on-exec.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvtransfer/frame.h"

namespace baton::kvtransfer {

// Owns a descriptor. Thread-compatible.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    Reset();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void Reset();

 private:
  int fd_ = -1;
};

// Wakes a thread that polls. Thread-safe.
class WakeFd {
 public:
  WakeFd();
  void Wake();
  // Called by the polling thread.
  void Drain();
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

// UNAVAILABLE "<what>: error=<errno>".
absl::Status SocketError(absl::string_view what);

// 32 bytes nobody can guess.
std::string RandomToken();
uint64_t RandomId();

// "@name" is an abstract Unix socket (nothing in the file system, gone with the process); else a
// path.
absl::StatusOr<UniqueFd> ListenUnix(absl::string_view address);
absl::StatusOr<UniqueFd> ConnectUnix(absl::string_view address, absl::Duration timeout);
// `port` 0 takes any; LocalPort says which.
absl::StatusOr<UniqueFd> ListenTcp(const std::string& host, int port);
absl::StatusOr<int> LocalPort(int fd);
// "10.0.0.7:41234", for messages.
std::string PeerAddress(int fd);
absl::StatusOr<UniqueFd> ConnectTcp(absl::string_view host_port, absl::Duration timeout);
absl::StatusOr<UniqueFd> AcceptSocket(int listen_fd);
// Small frames leave at once: grants and acknowledgements would else wait for the other side's
// delayed ACK (40 ms).
void SetNoDelay(int fd);

// Errors: FAILED_PRECONDITION when the process at the other end of a Unix socket runs as another
// user.
absl::Status CheckSameUser(int fd);

// The process at the other end of a Unix socket, as a descriptor that poll finds readable when it
// has ended. Errors: FAILED_PRECONDITION when the kernel cannot name it.
absl::StatusOr<UniqueFd> PeerProcess(int fd);

// Writes what fits. 0: nothing fits now. Errors: UNAVAILABLE.
absl::StatusOr<size_t> SendSome(int fd, const void* data, size_t size);
// Reads what is there. 0: nothing now. Errors: UNAVAILABLE, also when the peer has closed.
absl::StatusOr<size_t> ReceiveSome(int fd, void* data, size_t size);

// For the exchange at connect only: waits, at most until `timeout`.
absl::Status SendAll(int fd, absl::string_view bytes, absl::Duration timeout);
// One frame, and the descriptors that came with it. Errors: UNAVAILABLE (closed, or nothing in
// time), INVALID_ARGUMENT.
absl::StatusOr<Frame> ReceiveFrame(int fd,
                                   absl::Duration timeout,
                                   std::vector<UniqueFd>* descriptors);
absl::Status SendWithDescriptors(int fd,
                                 absl::string_view bytes,
                                 const std::vector<int>& descriptors);

}  // namespace baton::kvtransfer
