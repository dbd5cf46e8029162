#include "kvtransfer/tcp_socket.h"

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {

absl::Status TcpSocket::Listen(const std::string& host,
                               int port,
                               const std::string& advertised_host) {
  BATON_ASSIGN_OR_RETURN(fd_, ListenTcp(host, port));
  BATON_ASSIGN_OR_RETURN(const int local_port, LocalPort(fd_.get()));
  address_ = absl::StrCat(advertised_host.empty() ? host : advertised_host, ":", local_port);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> TcpSocket::Accept() {
  BATON_ASSIGN_OR_RETURN(UniqueFd fd, AcceptSocket(fd_.get()));
  SetNoDelay(fd.get());
  return fd;
}

}  // namespace baton::kvtransfer
