#include "kvtransfer/nccl_port.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "kvtransfer/sender_table.h"

namespace baton::kvtransfer {
namespace {

// Announced and not placed. NCCL may take small units in before they are asked for, so it is the
// sender's window that bounds them and not its slots; a peer's may be another.
constexpr size_t kMaxExpected = 4 * SenderLimits{}.window_units;

}  // namespace

size_t NcclSlotBytes(const kv::KvLayout& layout) {
  return std::max({kProbeBytes, SenderLimits{}.unit_bytes, layout.block_bytes()});
}

absl::Status NamedNccl(absl::string_view who, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(who, ": ", status.message()));
}

NcclPort::NcclPort(const base::NcclLibrary& nccl,
                   const ListenOptions& options,
                   DeviceCopier copier,
                   std::string peer,
                   std::atomic<int>* num_ports)
    : nccl_(nccl),
      clock_(*options.clock),
      pool_(options.device_pool),
      slot_bytes_(NcclSlotBytes(options.layout)),
      timeout_(options.peer_timeout),
      copier_(std::move(copier)),
      peer_(std::move(peer)),
      num_ports_(num_ports),
      progress_at_(clock_.Now()) {
  ++*num_ports_;
}

NcclPort::~NcclPort() {
  // Reads a slot and writes the pool: short, as none of NCCL's work is in that stream.
  const absl::Status quiet = copier_.Wait();
  if (!quiet.ok())
    BATON_LOG(Warning, "nccl transport: copies ", LogField("reason", quiet.message()));
  --*num_ports_;
}

absl::Status NcclPort::Join(const NcclJoinFrame& join) {
  if (link_ != nullptr) return absl::InvalidArgumentError("data frame: joins a communicator twice");
  absl::StatusOr<std::unique_ptr<NcclLink>> link =
      NcclLink::Join(nccl_, {join.id}, NcclLink::kDecode, pool_->data(), slot_bytes_);
  // Whatever it is, device memory too: the peer may try another transport.
  if (!link.ok()) return NamedNccl(peer_, absl::UnavailableError(link.status().message()));
  link_ = *std::move(link);
  progress_at_ = clock_.Now();
  return absl::OkStatus();
}

absl::Status NcclPort::Expect(uint64_t bytes) {
  if (link_ == nullptr)
    return absl::InvalidArgumentError("data frame: a payload before its communicator");
  if (bytes > slot_bytes_) {
    return absl::InvalidArgumentError(
        absl::StrCat("data frame: payload_bytes=", bytes, " limit=", slot_bytes_));
  }
  if (expected_.size() >= kMaxExpected) {
    return absl::ResourceExhaustedError(
        absl::StrCat("data frame: payloads on their way limit=", kMaxExpected));
  }
  if (expected_.empty()) progress_at_ = clock_.Now();
  expected_.push_back({bytes, -1});
  return absl::OkStatus();
}

absl::Status NcclPort::Poll() {
  if (link_ != nullptr && link_->active()) BATON_RETURN_IF_ERROR(PollLink());
  if (link_ == nullptr || !link_->joined()) return CheckLate("has not joined the communicator");
  for (Payload& payload : expected_) {
    if (payload.slot >= 0) continue;
    payload.slot = link_->TakeSlot();
    if (payload.slot < 0) break;
    link_->Receive(payload.slot, payload.bytes);
    BATON_RETURN_IF_ERROR(PollLink());
  }
  if (expected_.empty() || arrived()) return absl::OkStatus();
  return CheckLate("has not sent what it announced");
}

bool NcclPort::arrived() const {
  return !expected_.empty() && expected_.front().slot >= 0 &&
         link_->received(expected_.front().slot);
}

absl::Status NcclPort::Place(absl::Span<const ByteRange> ranges) {
  const Payload& payload = expected_.front();
  return copier_.CopyRanges(link_->slot(payload.slot), {{0, payload.bytes}}, pool_->data(), ranges);
}

void NcclPort::Pop() {
  link_->GiveBack(expected_.front().slot);
  expected_.pop_front();
  progress_at_ = clock_.Now();
}

absl::Duration NcclPort::poll_interval() const {
  // (One that is not told yet is looked at now and then, for its limit.)
  if (link_ == nullptr) return absl::InfiniteDuration();
  if (!link_->joined()) return kNcclWaitInterval;
  return expected_.empty() ? absl::InfiniteDuration() : kNcclPollInterval;
}

absl::Status NcclPort::PollLink() {
  const bool was_joined = link_->joined();
  BATON_RETURN_IF_ERROR(NamedNccl(peer_, link_->Poll()));
  if (link_->joined() && !was_joined) progress_at_ = clock_.Now();
  return absl::OkStatus();
}

absl::Status NcclPort::CheckLate(absl::string_view what) const {
  if (clock_.Now() - progress_at_ <= timeout_) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(peer_, " ", what, " in ", absl::FormatDuration(timeout_)));
}

}  // namespace baton::kvtransfer
