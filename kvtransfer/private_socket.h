#pragma once

// A listening Unix socket for processes of this user, as shm and cuda_ipc pass descriptors over.

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvtransfer/socket.h"

namespace baton::kvtransfer {

// Removes its file, if it has one. Thread-compatible.
class PrivateSocket {
 public:
  PrivateSocket() = default;
  ~PrivateSocket();
  PrivateSocket(const PrivateSocket&) = delete;
  PrivateSocket& operator=(const PrivateSocket&) = delete;

  // In `dir`, which is made if need be, or, where that is empty, under an abstract name nobody can
  // guess. Errors: UNAVAILABLE; FAILED_PRECONDITION when others may look into `dir`.
  absl::Status Listen(const std::string& dir);
  // Errors: FAILED_PRECONDITION for a process of another user.
  absl::StatusOr<UniqueFd> Accept();

  const std::string& address() const { return address_; }
  int fd() const { return fd_.get(); }

 private:
  std::string address_ = "@";
  UniqueFd fd_;
};

// Connects to one. Errors as above.
absl::StatusOr<UniqueFd> ConnectPrivate(absl::string_view address, absl::Duration timeout);

}  // namespace baton::kvtransfer
