#include "prefill_worker/peer_client.h"

#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/unreachable_transports.h"
#include "prefill_worker/peer_session.h"
#include "prefill_worker/peer_table.h"

namespace baton::prefill {

namespace {

// From the end of a process until its stream has ended here too.
constexpr absl::Duration kEndTimeout = absl::Milliseconds(100);

}  // namespace

struct PeerClient::Impl {
  explicit Impl(PeerClientOptions client_options)
      : options(std::move(client_options)),
        sender_options(options.sender),
        table(options.max_peers) {
    sender_options.unreachable = &unreachable;
  }

  absl::StatusOr<PeerTable::Opened> Open(const std::string& address);
  void OpenThread(const std::string& address);
  void SessionEnded();

  const PeerClientOptions options;
  kvtransfer::UnreachableTransports unreachable;
  kvtransfer::SenderOptions sender_options;  // the options', with that
  mutable base::Mutex mutex;
  base::CondVar session_ended;
  PeerTable table ABSL_GUARDED_BY(mutex);
  std::map<std::string, std::thread> threads ABSL_GUARDED_BY(mutex);  // the last one by address
  int open_sessions ABSL_GUARDED_BY(mutex) = 0;
};

PeerClient::PeerClient(PeerClientOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}

PeerClient::~PeerClient() { Shutdown(); }

void PeerClient::Connect(const std::string& address, const std::string& incarnation, Found found) {
  std::vector<PeerTable::Answer> answers;
  std::thread finished;
  {
    base::MutexLock lock(&impl_->mutex);
    if (impl_->table.Connect(address, incarnation, std::move(found), &answers)) {
      finished =
          std::exchange(impl_->threads[address],
                        std::thread([impl = impl_.get(), address] { impl->OpenThread(address); }));
    }
  }
  // It has said its last word already: only its return is waited for.
  if (finished.joinable()) finished.join();
  for (PeerTable::Answer& answer : answers) answer.found(std::move(answer.sender));
}

absl::StatusOr<PeerTable::Opened> PeerClient::Impl::Open(const std::string& address) {
  PeerTable::Opened opened;
  {
    base::MutexLock lock(&mutex);
    ++open_sessions;
  }
  const std::shared_ptr<PeerSession> session = PeerSession::Start(
      address, options.security, options.sender.hello, [this] { SessionEnded(); });
  opened.stream = session;
  auto create = [&]() -> absl::Status {
    BATON_ASSIGN_OR_RETURN(const worker::v1::Hello hello,
                           session->WaitForHello(options.hello_timeout));
    absl::StatusOr<std::unique_ptr<kvtransfer::Sender>> sender =
        kvtransfer::Sender::Create(sender_options, hello, session.get());
    // A worker that has just gone cannot be connected to either, and that is no misfit.
    if (absl::IsFailedPrecondition(sender.status()) && session->WaitForEnd(kEndTimeout)) {
      return absl::UnavailableError(sender.status().message());
    }
    BATON_RETURN_IF_ERROR(sender.status());
    opened.incarnation = hello.incarnation();
    opened.sender = *std::move(sender);
    session->Attach(opened.sender);
    return absl::OkStatus();
  };
  const absl::Status status = create();
  if (status.ok()) return opened;
  session->Close();
  const absl::Status named = Annotate(status, absl::StrCat("decode worker ", address));
  BATON_LOG(Warning, "peer session failed", LogField("reason", named.message()));
  return absl::IsDeadlineExceeded(named) ? absl::UnavailableError(named.message()) : named;
}

void PeerClient::Impl::OpenThread(const std::string& address) {
  absl::StatusOr<PeerTable::Opened> opened = Open(address);
  std::shared_ptr<PeerStream> unwanted;
  std::vector<PeerTable::Answer> answers;
  {
    base::MutexLock lock(&mutex);
    unwanted = table.OnOpened(address, std::move(opened), &answers);
  }
  if (unwanted != nullptr) unwanted->Close();
  for (PeerTable::Answer& answer : answers) answer.found(std::move(answer.sender));
  if (options.on_change) options.on_change();
}

void PeerClient::Impl::SessionEnded() {
  if (options.on_change) options.on_change();
  base::MutexLock lock(&mutex);
  --open_sessions;
  session_ended.NotifyAll();
}

void PeerClient::Shutdown() {
  std::map<std::string, std::thread> threads;
  {
    base::MutexLock lock(&impl_->mutex);
    impl_->table.Stop();
    for (const auto& [address, session] : impl_->table.Standing()) session.stream->Close();
    threads.swap(impl_->threads);
  }
  for (auto& [address, thread] : threads) {
    if (thread.joinable()) thread.join();
  }
  PeerTable gone(0);
  base::MutexLock lock(&impl_->mutex);
  while (impl_->open_sessions > 0) impl_->session_ended.Wait(&impl_->mutex);
  std::swap(gone, impl_->table);  // senders end without the lock
  impl_->table.Stop();
}

std::vector<PeerClient::Info> PeerClient::peers() const {
  std::vector<Info> infos;
  base::MutexLock lock(&impl_->mutex);
  for (const auto& [address, session] : impl_->table.Standing()) {
    infos.push_back(
        {address, session.sender->transport_name(), session.sender->probe_bytes_per_second()});
  }
  return infos;
}

}  // namespace baton::prefill
