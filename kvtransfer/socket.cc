#include "kvtransfer/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

constexpr int kSocketFlags = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr int kBacklog = 64;
constexpr size_t kMaxDescriptors = 4;

absl::StatusOr<sockaddr_un> UnixAddress(absl::string_view address, socklen_t* size) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (address.empty() || address.size() >= sizeof(name.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("unix socket address: bytes=", address.size(),
                                                   " limit=", sizeof(name.sun_path) - 1));
  }
  std::memcpy(name.sun_path, address.data(), address.size());
  const bool abstract = address[0] == '@';
  if (abstract) name.sun_path[0] = '\0';
  *size =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address.size() + (abstract ? 0 : 1));
  return name;
}

// False when `timeout` passed first.
bool WaitFor(int fd, short events, absl::Duration timeout) {
  pollfd entry{fd, events, 0};
  const int64_t ms =
      std::max<int64_t>(0, absl::ToInt64Milliseconds(absl::Ceil(timeout, absl::Milliseconds(1))));
  int ready = 0;
  do {
    ready = poll(&entry, 1, static_cast<int>(ms));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

absl::Status FinishConnect(int fd, absl::string_view address, absl::Duration timeout) {
  if (!WaitFor(fd, POLLOUT, timeout))
    return absl::UnavailableError(absl::StrCat("connect ", address, ": timed out"));
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) return absl::OkStatus();
  errno = error;
  return SocketError(absl::StrCat("connect ", address));
}

struct AddressList {
  addrinfo* list = nullptr;
  ~AddressList() {
    if (list != nullptr) freeaddrinfo(list);
  }
};

absl::Status Resolve(const std::string& host,
                     const std::string& port,
                     bool passive,
                     AddressList* out) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  const int error =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), port.c_str(), &hints, &out->list);
  if (error == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("resolve ", host, ": ", gai_strerror(error)));
}

std::vector<UniqueFd> TakeDescriptors(msghdr* message) {
  std::vector<UniqueFd> taken;
  for (cmsghdr* control = CMSG_FIRSTHDR(message); control != nullptr;
       control = CMSG_NXTHDR(message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof(int));
      taken.emplace_back(fd);
    }
  }
  return taken;
}

// 0 bytes: nothing now.
absl::StatusOr<size_t> ReceiveWithDescriptors(int fd,
                                              absl::Span<uint8_t> into,
                                              std::vector<UniqueFd>* descriptors) {
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))];
  iovec vector{into.data(), into.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (count == 0) return absl::UnavailableError("data connection: closed by the peer");
  if (count < 0) {
    if (errno == EAGAIN || errno == EINTR) return size_t{0};
    return SocketError("data connection: receive");
  }
  for (UniqueFd& taken : TakeDescriptors(&message)) {
    if (descriptors != nullptr) descriptors->push_back(std::move(taken));
  }
  return static_cast<size_t>(count);
}

}  // namespace

void UniqueFd::Reset() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

WakeFd::WakeFd() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  BATON_CHECK(fd_.valid(), "eventfd");
}

void WakeFd::Wake() {
  const uint64_t one = 1;
  // EAGAIN means that the counter is full: the thread will wake up anyway.
  [[maybe_unused]] const ssize_t written = write(fd_.get(), &one, sizeof(one));
}

void WakeFd::Drain() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
}

absl::Status SocketError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": error=", std::strerror(errno)));
}

std::string RandomToken() {
  std::string token(32, '\0');
  BATON_CHECK(getrandom(token.data(), token.size(), 0) == static_cast<ssize_t>(token.size()),
              "getrandom");
  return token;
}

uint64_t RandomId() {
  uint64_t id = 0;
  while (id == 0) BATON_CHECK(getrandom(&id, sizeof(id), 0) == sizeof(id), "getrandom");
  return id;
}

absl::StatusOr<UniqueFd> ListenUnix(absl::string_view address) {
  socklen_t size = 0;
  BATON_ASSIGN_OR_RETURN(const sockaddr_un name, UnixAddress(address, &size));
  UniqueFd fd(socket(AF_UNIX, kSocketFlags, 0));
  if (!fd.valid() || bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) != 0 ||
      listen(fd.get(), kBacklog) != 0) {
    return SocketError(absl::StrCat("listen on unix socket ", address));
  }
  return fd;
}

absl::StatusOr<UniqueFd> ConnectUnix(absl::string_view address, absl::Duration timeout) {
  socklen_t size = 0;
  BATON_ASSIGN_OR_RETURN(const sockaddr_un name, UnixAddress(address, &size));
  UniqueFd fd(socket(AF_UNIX, kSocketFlags, 0));
  if (!fd.valid()) return SocketError("unix socket");
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&name), size) == 0) return fd;
  if (errno != EINPROGRESS) return SocketError(absl::StrCat("connect ", address));
  BATON_RETURN_IF_ERROR(FinishConnect(fd.get(), address, timeout));
  return fd;
}

absl::StatusOr<UniqueFd> ListenTcp(const std::string& host, int port) {
  AddressList addresses;
  BATON_RETURN_IF_ERROR(Resolve(host, absl::StrCat(port), /*passive=*/true, &addresses));
  absl::Status last = absl::UnavailableError("no address");
  for (const addrinfo* address = addresses.list; address != nullptr; address = address->ai_next) {
    UniqueFd fd(socket(address->ai_family, kSocketFlags, 0));
    const int on = 1;
    if (fd.valid() && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        bind(fd.get(), address->ai_addr, address->ai_addrlen) == 0 &&
        listen(fd.get(), kBacklog) == 0) {
      return fd;
    }
    last = SocketError(absl::StrCat("listen on ", host, ":", port));
  }
  return last;
}

absl::StatusOr<int> LocalPort(int fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &size) != 0)
    return SocketError("getsockname");
  const uint16_t port = name.ss_family == AF_INET6
                            ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                            : reinterpret_cast<sockaddr_in*>(&name)->sin_port;
  return static_cast<int>(ntohs(port));
}

std::string PeerAddress(int fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  auto* const address = reinterpret_cast<sockaddr*>(&name);
  if (getpeername(fd, address, &size) != 0 ||
      getnameinfo(address, size, host, sizeof(host), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return "an unknown address";
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<UniqueFd> ConnectTcp(absl::string_view host_port, absl::Duration timeout) {
  const size_t colon = host_port.rfind(':');
  int port = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(host_port.substr(colon + 1), &port) ||
      port <= 0 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("tcp address \"", host_port, "\": not host:port"));
  }
  absl::string_view host = host_port.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  AddressList addresses;
  BATON_RETURN_IF_ERROR(
      Resolve(std::string(host), absl::StrCat(port), /*passive=*/false, &addresses));
  absl::Status last = absl::UnavailableError("no address");
  for (const addrinfo* address = addresses.list; address != nullptr; address = address->ai_next) {
    UniqueFd fd(socket(address->ai_family, kSocketFlags, 0));
    if (!fd.valid()) return SocketError("tcp socket");
    const int connected = connect(fd.get(), address->ai_addr, address->ai_addrlen);
    last = connected == 0         ? absl::OkStatus()
           : errno == EINPROGRESS ? FinishConnect(fd.get(), host_port, timeout)
                                  : SocketError(absl::StrCat("connect ", host_port));
    if (!last.ok()) continue;
    SetNoDelay(fd.get());
    return fd;
  }
  return last;
}

void SetNoDelay(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

absl::StatusOr<UniqueFd> AcceptSocket(int listen_fd) {
  UniqueFd fd(accept4(listen_fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) return SocketError("accept");
  return fd;
}

absl::Status CheckSameUser(int fd) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return SocketError("SO_PEERCRED");
  if (peer.uid == geteuid()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("unix socket: peer_uid=", peer.uid,
                                                    " our_uid=", geteuid(),
                                                    ": both workers must run as one user"));
}

absl::StatusOr<UniqueFd> PeerProcess(int fd) {
#ifndef SO_PEERPIDFD
  constexpr int SO_PEERPIDFD = 77;  // Linux 6.5, newer than the headers
#endif
  int process = -1;
  socklen_t size = sizeof(process);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &process, &size) == 0) return UniqueFd(process);
  // Older kernels: by number, which another PID namespace does not know.
  ucred peer{};
  size = sizeof(peer);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid > 0)
    process = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
  if (process >= 0) return UniqueFd(process);
  return absl::FailedPreconditionError(
      "unix socket: the peer's process cannot be watched (Linux 6.5, or one PID namespace)");
}

absl::StatusOr<size_t> SendSome(int fd, const void* data, size_t size) {
  const ssize_t count = send(fd, data, size, MSG_NOSIGNAL);
  if (count >= 0) return static_cast<size_t>(count);
  if (errno == EAGAIN || errno == EINTR) return size_t{0};
  return SocketError("data connection: send");
}

absl::StatusOr<size_t> ReceiveSome(int fd, void* data, size_t size) {
  const ssize_t count = recv(fd, data, size, 0);
  if (count > 0) return static_cast<size_t>(count);
  if (count == 0) return absl::UnavailableError("data connection: closed by the peer");
  if (errno == EAGAIN || errno == EINTR) return size_t{0};
  return SocketError("data connection: receive");
}

absl::Status SendAll(int fd, absl::string_view bytes, absl::Duration timeout) {
  const absl::Duration deadline = base::Clock::Real().Now() + timeout;
  while (!bytes.empty()) {
    BATON_ASSIGN_OR_RETURN(const size_t count, SendSome(fd, bytes.data(), bytes.size()));
    bytes.remove_prefix(count);
    if (count == 0 && !WaitFor(fd, POLLOUT, deadline - base::Clock::Real().Now())) {
      return absl::UnavailableError("data connection: the peer does not read");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Frame> ReceiveFrame(int fd,
                                   absl::Duration timeout,
                                   std::vector<UniqueFd>* descriptors) {
  const absl::Duration deadline = base::Clock::Real().Now() + timeout;
  FrameReader reader;
  while (true) {
    BATON_ASSIGN_OR_RETURN(const size_t count,
                           ReceiveWithDescriptors(fd, reader.Want(), descriptors));
    if (count == 0) {
      if (WaitFor(fd, POLLIN, deadline - base::Clock::Real().Now())) continue;
      return absl::UnavailableError("data connection: the peer does not answer");
    }
    BATON_ASSIGN_OR_RETURN(const FrameReader::Event event, reader.Advance(count));
    if (event == FrameReader::Event::kFrame) return reader.frame();
  }
}

absl::Status SendWithDescriptors(int fd,
                                 absl::string_view bytes,
                                 const std::vector<int>& descriptors) {
  BATON_CHECK(descriptors.size() <= kMaxDescriptors);
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  iovec vector{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size() * sizeof(int));
  }
  // The connection is new and the frame small: it fits into the socket's buffer, or the peer is not
  // worth waiting for.
  const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
  if (sent == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
  return SocketError("data connection: send welcome");
}

}  // namespace baton::kvtransfer
