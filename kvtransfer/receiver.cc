// The receiver's transfer thread: listeners, data connections, heartbeats. It waits for bytes and
// for nothing else.

#include "kvtransfer/receiver.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/receiver_core.h"
#include "kvtransfer/socket.h"
#include "kvtransfer/transport_terms.h"

namespace baton::kvtransfer {
namespace {

constexpr absl::Duration kAttachTimeout = absl::Seconds(5);
constexpr size_t kMaxConnections = 1024;

class ReceiverImpl : public ReceiverCore, private ReceiverCore::Lines {
 public:
  using ReceiverCore::ReceiverCore;
  ~ReceiverImpl() override {
    stopping_.store(true);
    wake_.Wake();
    if (thread_.joinable()) thread_.join();
  }

  absl::Status Start();

 private:
  // ReceiverCore.
  void Wake() override { wake_.Wake(); }
  std::vector<const PutListener*> listeners() const override;
  // Lines.
  DataLine* Find(SessionId session) override;
  void Close(DataLine* line) override;

  void Run();
  void PollOnce();
  void Accept(PutListener* listener);
  // Returns false when the connection has ended.
  bool Serve(DataConnection* connection, short events);

  std::vector<std::unique_ptr<PutListener>> listeners_;
  WakeFd wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::vector<std::unique_ptr<DataConnection>> connections_;  // transfer thread only
};

absl::Status ReceiverImpl::Start() {
  ListenOptions listen;
  listen.pool = options().pool;
  listen.device_pool = options().device_pool;
  listen.layout = options().layout;
  listen.tcp_host = options().tcp_listen_host;
  listen.tcp_port = options().tcp_listen_port;
  listen.tcp_advertise_host = options().tcp_advertise_host;
  listen.socket_dir = options().socket_dir;
  listen.clock = options().clock;
  listen.peer_timeout = options().peer_timeout;
  for (const std::string& name : options().transports) {
    if (!options().required_transport.empty() && name != options().required_transport) continue;
    absl::StatusOr<std::unique_ptr<PutListener>> listener = ListenOn(name, listen);
    // What a host's devices allow shows only here; peers are told of the others.
    if (!listener.ok() && IsBetweenDevices(name) && options().transports.size() > 1 &&
        options().required_transport.empty()) {
      BATON_LOG(Warning, "transport not usable ", name, ": ", listener.status().message());
      continue;
    }
    BATON_RETURN_IF_ERROR(listener.status());
    listeners_.push_back(*std::move(listener));
  }
  thread_ = std::thread([this] { Run(); });
  return absl::OkStatus();
}

std::vector<const PutListener*> ReceiverImpl::listeners() const {
  std::vector<const PutListener*> listeners;
  for (const auto& listener : listeners_) listeners.push_back(listener.get());
  return listeners;
}

DataLine* ReceiverImpl::Find(SessionId session) {
  const auto found = std::find_if(connections_.begin(), connections_.end(),
                                  [&](const auto& c) { return c->session() == session; });
  return found == connections_.end() ? nullptr : found->get();
}

void ReceiverImpl::Close(DataLine* line) {
  std::erase_if(connections_, [&](const auto& connection) { return connection.get() == line; });
}

void ReceiverImpl::Run() {
  while (!stopping_.load()) {
    PollOnce();
    EndSessions(this);
    Tick();
  }
  connections_.clear();
  FailAll(absl::CancelledError("decode worker is shutting down"));
}

void ReceiverImpl::PollOnce() {
  std::vector<pollfd> entries;
  entries.push_back({wake_.fd(), POLLIN, 0});
  for (const auto& listener : listeners_) entries.push_back({listener->fd(), POLLIN, 0});
  for (const auto& connection : connections_) {
    entries.push_back({connection->fd(),
                       static_cast<short>(connection->wants_write() ? POLLIN | POLLOUT : POLLIN),
                       0});
  }
  const absl::Duration until_tick = NextTick() - options().clock->Now();
  absl::Duration wait =
      absl::Milliseconds(std::clamp<int64_t>(absl::ToInt64Milliseconds(until_tick), 0, 1000) + 1);
  for (const auto& connection : connections_) wait = std::min(wait, connection->poll_interval());
  const timespec timeout = absl::ToTimespec(wait);
  if (ppoll(entries.data(), entries.size(), &timeout, nullptr) < 0) return;
  wake_.Drain();
  const size_t first_connection = 1 + listeners_.size();
  std::vector<std::unique_ptr<DataConnection>> kept;
  for (size_t i = 0; i < connections_.size(); ++i) {
    if (Serve(connections_[i].get(), entries[first_connection + i].revents))
      kept.push_back(std::move(connections_[i]));
  }
  connections_ = std::move(kept);
  for (size_t i = 0; i < listeners_.size(); ++i) {
    if (entries[1 + i].revents != 0) Accept(listeners_[i].get());
  }
}

void ReceiverImpl::Accept(PutListener* listener) {
  absl::StatusOr<UniqueFd> fd = listener->Accept();
  if (!fd.ok()) {
    BATON_LOG(Warning, "data connection refused ", LogField("transport", listener->name()), " ",
              LogField("reason", fd.status().message()));
    return;
  }
  if (connections_.size() >= kMaxConnections) return;  // closed at once
  DataSink* sink = this;
  connections_.push_back(std::make_unique<DataConnection>(*std::move(fd), listener, sink,
                                                          options().pool, options().clock->Now()));
}

bool ReceiverImpl::Serve(DataConnection* connection, short events) {
  connection->DropUnwantedUnit();
  absl::Status status;
  if ((events & POLLOUT) != 0) status = connection->OnWritable();
  if (status.ok() && (events & (POLLIN | POLLHUP | POLLERR)) != 0)
    status = connection->OnReadable();
  if (status.ok()) status = connection->Advance();
  if (!status.ok()) return OnLineFailed(connection, status);
  const bool late = connection->session() == 0 &&
                    options().clock->Now() - connection->accepted_at() > kAttachTimeout;
  return !late;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Receiver>> Receiver::Create(
    const ReceiverOptions& options, std::function<void(ReceiverEvent)> on_event) {
  BATON_RETURN_IF_ERROR(CheckReceiverOptions(options));
  auto receiver = std::make_unique<ReceiverImpl>(options, std::move(on_event));
  BATON_RETURN_IF_ERROR(receiver->Start());
  return receiver;
}

}  // namespace baton::kvtransfer
