#include "kvtransfer/private_socket.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

// A folder that was there already may be anybody's.
absl::Status CheckPrivate(const std::string& dir) {
  struct stat info;
  if (lstat(dir.c_str(), &info) != 0) return SocketError(absl::StrCat("stat ", dir));
  if (S_ISDIR(info.st_mode) && info.st_uid == geteuid() && (info.st_mode & 077) == 0)
    return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(dir, ": must be a folder of this user alone (mode 0700)"));
}

}  // namespace

PrivateSocket::~PrivateSocket() {
  if (address_[0] != '@') unlink(address_.c_str());
}

absl::Status PrivateSocket::Listen(const std::string& dir) {
  const std::string name = absl::BytesToHexString(RandomToken().substr(0, 16));
  if (dir.empty()) {
    address_ = absl::StrCat("@baton-kv-", name);
  } else {
    if (mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST)
      return SocketError(absl::StrCat("mkdir ", dir));
    BATON_RETURN_IF_ERROR(CheckPrivate(dir));
    address_ = absl::StrCat(dir, "/kv-", name.substr(0, 16));
  }
  BATON_ASSIGN_OR_RETURN(fd_, ListenUnix(address_));
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> PrivateSocket::Accept() {
  BATON_ASSIGN_OR_RETURN(UniqueFd fd, AcceptSocket(fd_.get()));
  BATON_RETURN_IF_ERROR(CheckSameUser(fd.get()));
  return fd;
}

absl::StatusOr<UniqueFd> ConnectPrivate(absl::string_view address, absl::Duration timeout) {
  BATON_ASSIGN_OR_RETURN(UniqueFd fd, ConnectUnix(address, timeout));
  BATON_RETURN_IF_ERROR(CheckSameUser(fd.get()));
  return fd;
}

}  // namespace baton::kvtransfer
