#pragma once

// What travels on a data connection: frames of 16 bytes of header and a body of at most
// kMaxFrameBody bytes, all integers little-endian. On transports that carry bytes in the stream,
// the payload follows a unit's or probe's frame.
//
//   header   magic u32, type u16, zero u16, body bytes u32, check u32 (FrameCheck)
//   P -> D   Attach (nccl: and NcclJoin), then any of Open, Unit, Probe, Report
//   D -> P   Welcome (cuda_ipc: and DeviceMemory; nccl: and NcclOffer), then Grant per Open,
//            Ack per Unit (in order), ProbeAck per Probe
//   P -> D   cuda_ipc: Farewell, the last one

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "engine/kv/kv_layout.h"
#include "kvtransfer/transfer_plan.h"

namespace baton::kvtransfer {

inline constexpr uint32_t kFrameMagic = 0x314e5442;  // "BTN1"
inline constexpr size_t kFrameHeaderBytes = 16;
inline constexpr size_t kMaxFrameBody = size_t{1} << 20;
inline constexpr size_t kMaxUnitBytes = size_t{16} << 20;
inline constexpr uint32_t kMaxTp = 2;

enum class FrameType : uint16_t {
  kAttach = 1,
  kWelcome = 2,
  kOpen = 3,
  kGrant = 4,
  kUnit = 5,
  kAck = 6,
  kProbe = 7,
  kProbeAck = 8,
  kReport = 9,
  kDeviceMemory = 10,
  kFarewell = 11,
  kNcclOffer = 12,
  kNcclJoin = 13,
};

// The token of the endpoint in the decode worker's Hello.
struct AttachFrame {
  std::string token;
};

// The decode worker's pool; shm passes its descriptors along with this frame.
struct WelcomeFrame {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;
  uint32_t num_blocks = 0;
  uint32_t format = 0;  // KvFormat
  // Ranks that share the heads. On the wire only where it is not 1, so that older peers, which know
  // one rank only, read what they always did.
  uint32_t tp = 1;
};

// Where memory of a device can be opened by another process.
struct DeviceMemoryEntry {
  enum Method : uint32_t { kDescriptor = 1, kLegacyHandle = 2 };
  Method method = kDescriptor;
  std::array<uint8_t, 16> uuid{};  // of the device
  uint64_t allocation_bytes = 0;   // what the handle names
  uint64_t offset = 0;             // of the memory in it
  uint64_t size = 0;
  std::array<uint8_t, 64> handle{};  // kLegacyHandle
};

// The decode worker's pool, and a place for probes. Descriptors go along, in this order, one for
// each of the two that has one.
struct DeviceMemoryFrame {
  DeviceMemoryEntry pool, probe;
};

// What the decode worker's end of a communicator is like.
struct NcclOfferFrame {
  uint32_t version = 0;     // of its library; those of a communicator are the same
  uint64_t slot_bytes = 0;  // the largest unit that it takes
};

// Names the communicator that the prefill worker has made and that both now join.
struct NcclJoinFrame {
  std::array<char, 128> id{};
};

// Asks to write into a reservation.
struct OpenFrame {
  uint64_t reservation_id = 0;
  uint64_t epoch = 0;
};

// The answer. Only with kOk may the sender write, and only into these blocks.
struct GrantFrame {
  uint64_t reservation_id = 0;
  absl::Status status;
  uint32_t prompt_tokens = 0;
  uint32_t first_missing_block = 0;
  std::vector<kv::BlockId> blocks;
};

struct UnitFrame {
  uint64_t reservation_id = 0;
  uint64_t epoch = 0;
  uint32_t sequence = 0;  // of this hand-over, from 0
  UnitRect rect;
  uint64_t bytes = 0;
  bool has_checksum = false;
  uint64_t checksum = 0;  // XXH3-64
};

// A unit has been consumed, whether or not its hand-over still wanted it.
struct AckFrame {
  uint64_t reservation_id = 0;
  uint32_t sequence = 0;
};

// Payload of probes goes nowhere.
struct ProbeFrame {
  uint64_t bytes = 0;
};

// What the probes came to, for the decode worker's own gauge.
struct ReportFrame {
  uint64_t bytes_per_second = 0;
};

struct Frame {
  FrameType type = FrameType::kAttach;
  std::string body;
};

// Of the header before the check itself, and of the body: low half of an XXH3-64. A frame says
// where bytes go, so it is checked on every transport; payload only where SenderOptions ask for it.
uint32_t FrameCheck(const char* header, absl::string_view body);

std::string Encode(const AttachFrame& frame);
std::string Encode(const WelcomeFrame& frame);
std::string Encode(const OpenFrame& frame);
std::string Encode(const GrantFrame& frame);
std::string Encode(const UnitFrame& frame);
std::string Encode(const AckFrame& frame);
std::string Encode(const ProbeFrame& frame);
std::string Encode(const ReportFrame& frame);
std::string Encode(const DeviceMemoryFrame& frame);
std::string Encode(const NcclOfferFrame& frame);
std::string Encode(const NcclJoinFrame& frame);
std::string EncodeProbeAck();
// No write of ours is under way or will follow: what the end of the connection does not prove by
// itself.
std::string EncodeFarewell();

// Errors of all: INVALID_ARGUMENT when the frame is of another type, too short or too long, or a
// value is out of bounds.
absl::StatusOr<AttachFrame> ParseAttach(const Frame& frame);
absl::StatusOr<WelcomeFrame> ParseWelcome(const Frame& frame);
absl::StatusOr<OpenFrame> ParseOpen(const Frame& frame);
absl::StatusOr<GrantFrame> ParseGrant(const Frame& frame);
absl::StatusOr<UnitFrame> ParseUnit(const Frame& frame);
absl::StatusOr<AckFrame> ParseAck(const Frame& frame);
absl::StatusOr<ProbeFrame> ParseProbe(const Frame& frame);
absl::StatusOr<ReportFrame> ParseReport(const Frame& frame);
absl::StatusOr<DeviceMemoryFrame> ParseDeviceMemory(const Frame& frame);
absl::StatusOr<NcclOfferFrame> ParseNcclOffer(const Frame& frame);
absl::StatusOr<NcclJoinFrame> ParseNcclJoin(const Frame& frame);

// Cuts a byte stream into frames and payloads, without copying payload: the caller reads straight
// into Want(). Trusts nothing that it reads. Thread-compatible.
class FrameReader {
 public:
  enum class Event { kMore, kFrame, kPayloadDone };

  // Where the next bytes of the stream belong; never empty.
  absl::Span<uint8_t> Want();
  // `count` bytes (at most Want().size()) have been read into Want().
  // Errors: INVALID_ARGUMENT on a malformed header or a damaged frame; the stream cannot be used
  // any more.
  absl::StatusOr<Event> Advance(size_t count);
  // After kFrame.
  const Frame& frame() const { return frame_; }

  // The frame just read is followed by payload that belongs into `places`, in order; none is empty.
  void ReceivePayload(std::vector<absl::Span<uint8_t>> places);
  // ... that nobody wants.
  void SkipPayload(uint64_t bytes);
  // What is left of the current payload goes nowhere from now on.
  void SkipRestOfPayload();
  bool in_payload() const { return state_ == State::kPayload || state_ == State::kSkip; }

 private:
  enum class State { kHeader, kBody, kPayload, kSkip };

  absl::StatusOr<Event> HeaderDone();
  absl::StatusOr<Event> BodyDone();

  State state_ = State::kHeader;
  std::array<uint8_t, kFrameHeaderBytes> header_{};
  size_t done_ = 0;  // bytes of the header or the body, or of the current place
  Frame frame_;
  std::vector<absl::Span<uint8_t>> places_;
  size_t place_ = 0;
  uint64_t skip_bytes_ = 0;
  std::vector<uint8_t> scratch_;
};

}  // namespace baton::kvtransfer
