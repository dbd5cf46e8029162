#include "kvtransfer/stream_put.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/clock.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

constexpr int kProbeRounds = 3;
constexpr size_t kMaxVectors = 64;
// One Write: the thread must come back to look at revokes.
constexpr size_t kMaxWriteBytes = size_t{4} << 20;

absl::Status Differs(absl::string_view what, uint64_t ours, uint64_t peer) {
  return absl::FailedPreconditionError(
      absl::StrCat("peer's pool: field=", what, " ours=", ours, " peer=", peer));
}

absl::StatusOr<kv::KvLayout> PeerLayout(const WelcomeFrame& welcome, const kv::KvLayout& ours) {
  if (welcome.num_layers != static_cast<uint32_t>(ours.num_layers)) {
    return Differs("num_layers", ours.num_layers, welcome.num_layers);
  }
  if (welcome.num_kv_heads != static_cast<uint32_t>(ours.num_kv_heads)) {
    return Differs("num_kv_heads", ours.num_kv_heads, welcome.num_kv_heads);
  }
  if (welcome.head_dim != static_cast<uint32_t>(ours.head_dim))
    return Differs("head_dim", ours.head_dim, welcome.head_dim);
  if (welcome.format != static_cast<uint32_t>(ours.format)) {
    return Differs("kv_dtype", static_cast<uint64_t>(ours.format), welcome.format);
  }
  if (ours.num_kv_heads % static_cast<int>(welcome.tp) != 0)
    return Differs("tp", ours.tp, welcome.tp);
  kv::KvLayout layout = ours;
  layout.tp = static_cast<int>(welcome.tp);
  layout.num_blocks = static_cast<int>(welcome.num_blocks);
  return layout;
}

}  // namespace

absl::Status StreamPut::Attach(UniqueFd fd,
                               absl::string_view token,
                               const ConnectOptions& options,
                               std::vector<UniqueFd>* descriptors) {
  fd_ = std::move(fd);
  BATON_RETURN_IF_ERROR(
      SendAll(fd_.get(), Encode(AttachFrame{std::string(token)}), options.timeout));
  BATON_ASSIGN_OR_RETURN(const Frame answer, ReceiveFrame(fd_.get(), options.timeout, descriptors));
  BATON_ASSIGN_OR_RETURN(const WelcomeFrame welcome, ParseWelcome(answer));
  BATON_ASSIGN_OR_RETURN(peer_layout_, PeerLayout(welcome, options.layout));
  return absl::OkStatus();
}

absl::StatusOr<double> StreamPut::Probe(absl::Duration timeout) {
  const std::vector<uint8_t> bytes(kProbeBytes, 0x5a);
  double best = 0;
  for (int round = 0; round < kProbeRounds; ++round) {
    const absl::Duration start = base::Clock::Real().Now();
    BATON_RETURN_IF_ERROR(MoveProbe(bytes, timeout));
    BATON_ASSIGN_OR_RETURN(const Frame answer, ReceiveFrame(fd_.get(), timeout, nullptr));
    if (answer.type != FrameType::kProbeAck)
      return absl::InvalidArgumentError("probe: not answered by an ack");
    const double seconds = absl::ToDoubleSeconds(base::Clock::Real().Now() - start);
    best = std::max(best, static_cast<double>(kProbeBytes) / std::max(seconds, 1e-9));
  }
  BATON_RETURN_IF_ERROR(
      SendAll(fd_.get(), Encode(ReportFrame{static_cast<uint64_t>(best)}), timeout));
  return best;
}

absl::Status StreamPut::SendRest(const std::string& bytes, absl::Duration timeout) {
  const absl::Duration deadline = base::Clock::Real().Now() + timeout;
  Queue(bytes);
  for (const Segment& segment : segments_) {
    const absl::Span<const uint8_t> left =
        segment.bytes().subspan(&segment == &segments_.front() ? written_ : 0);
    BATON_RETURN_IF_ERROR(SendAll(
        fd_.get(), absl::string_view(reinterpret_cast<const char*>(left.data()), left.size()),
        deadline - base::Clock::Real().Now()));
  }
  segments_.clear();
  return absl::OkStatus();
}

void StreamPut::Queue(std::string bytes) { segments_.push_back({std::move(bytes), {}}); }

void StreamPut::QueueBorrowed(absl::Span<const uint8_t> bytes) {
  segments_.push_back({"", bytes});
  ++borrowed_;
}

absl::StatusOr<size_t> StreamPut::Write() {
  if (segments_.empty()) return size_t{0};
  std::array<iovec, kMaxVectors> vectors;
  size_t count = 0;
  size_t offered = 0;
  for (const Segment& segment : segments_) {
    if (count == kMaxVectors || offered >= kMaxWriteBytes) break;
    const absl::Span<const uint8_t> bytes = segment.bytes().subspan(count == 0 ? written_ : 0);
    const size_t size = std::min(bytes.size(), kMaxWriteBytes - offered);
    vectors[count++] = {const_cast<uint8_t*>(bytes.data()), size};
    offered += size;
  }
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = count;
  const ssize_t sent = sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EINTR) return size_t{0};
    return SocketError("data connection: send");
  }
  written_ += static_cast<size_t>(sent);
  while (!segments_.empty() && written_ >= segments_.front().bytes().size()) {
    written_ -= segments_.front().bytes().size();
    if (segments_.front().is_borrowed()) --borrowed_;
    segments_.pop_front();
  }
  return static_cast<size_t>(sent);
}

absl::Status StreamPut::Read(std::vector<Reply>* replies) {
  while (true) {
    const absl::Span<uint8_t> want = reader_.Want();
    BATON_ASSIGN_OR_RETURN(const size_t count, ReceiveSome(fd_.get(), want.data(), want.size()));
    if (count == 0) return absl::OkStatus();
    BATON_ASSIGN_OR_RETURN(const FrameReader::Event event, reader_.Advance(count));
    if (event != FrameReader::Event::kFrame) continue;
    if (reader_.frame().type == FrameType::kGrant) {
      BATON_ASSIGN_OR_RETURN(GrantFrame grant, ParseGrant(reader_.frame()));
      replies->push_back(std::move(grant));
    } else {
      BATON_ASSIGN_OR_RETURN(const AckFrame ack, ParseAck(reader_.frame()));
      replies->push_back(ack);
    }
  }
}

}  // namespace baton::kvtransfer
