#include "kvtransfer/frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kMaxTokenBytes = 64;
constexpr size_t kMaxReasonBytes = 1024;

template <typename Integer>
void Put(Integer value, std::string* out) {
  for (size_t i = 0; i < sizeof(Integer); ++i)
    out->push_back(static_cast<char>(static_cast<uint64_t>(value) >> (8 * i)));
}

template <typename Integer>
Integer Get(const char* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Integer); ++i)
    value |= uint64_t{static_cast<uint8_t>(in[i])} << (8 * i);
  return static_cast<Integer>(value);
}

std::string WithHeader(FrameType type, absl::string_view body) {
  std::string frame;
  frame.reserve(kFrameHeaderBytes + body.size());
  Put<uint32_t>(kFrameMagic, &frame);
  Put<uint16_t>(static_cast<uint16_t>(type), &frame);
  Put<uint16_t>(0, &frame);
  Put<uint32_t>(static_cast<uint32_t>(body.size()), &frame);
  Put<uint32_t>(FrameCheck(frame.data(), body), &frame);
  frame.append(body.data(), body.size());
  return frame;
}

// Reads a body from front to back; Finish() says whether it was long enough and is used up.
class BodyReader {
 public:
  BodyReader(const Frame& frame, FrameType type) : left_(frame.body), ok_(frame.type == type) {}

  template <typename Integer>
  Integer Take() {
    const absl::string_view bytes = TakeBytes(sizeof(Integer));
    return ok_ ? Get<Integer>(bytes.data()) : Integer{0};
  }
  absl::string_view TakeBytes(size_t count) {
    if (!ok_ || left_.size() < count) {
      ok_ = false;
      return {};
    }
    const absl::string_view bytes = left_.substr(0, count);
    left_.remove_prefix(count);
    return bytes;
  }
  void TakeInto(absl::Span<uint8_t> out) {
    const absl::string_view bytes = TakeBytes(out.size());
    if (ok_) std::memcpy(out.data(), bytes.data(), bytes.size());
  }
  size_t left() const { return left_.size(); }
  absl::Status Finish(absl::string_view name) const {
    if (ok_ && left_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("data frame: not a well-formed ", name));
  }

 private:
  absl::string_view left_;
  bool ok_;
};

absl::Status OutOfBounds(absl::string_view what, uint64_t value, uint64_t limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("data frame: ", what, "=", value, " limit=", limit));
}

}  // namespace

uint32_t FrameCheck(const char* header, absl::string_view body) {
  const uint64_t seed = XXH3_64bits(header, kFrameHeaderBytes - sizeof(uint32_t));
  return static_cast<uint32_t>(XXH3_64bits_withSeed(body.data(), body.size(), seed));
}

std::string Encode(const AttachFrame& frame) { return WithHeader(FrameType::kAttach, frame.token); }

absl::StatusOr<AttachFrame> ParseAttach(const Frame& frame) {
  if (frame.type != FrameType::kAttach)
    return absl::InvalidArgumentError("data frame: not an attach");
  if (frame.body.size() > kMaxTokenBytes)
    return OutOfBounds("token_bytes", frame.body.size(), kMaxTokenBytes);
  return AttachFrame{frame.body};
}

std::string Encode(const WelcomeFrame& frame) {
  std::string body;
  Put(frame.num_layers, &body);
  Put(frame.num_kv_heads, &body);
  Put(frame.head_dim, &body);
  Put(frame.num_blocks, &body);
  Put(frame.format, &body);
  if (frame.tp != 1) Put(frame.tp, &body);
  return WithHeader(FrameType::kWelcome, body);
}

absl::StatusOr<WelcomeFrame> ParseWelcome(const Frame& frame) {
  BodyReader body(frame, FrameType::kWelcome);
  WelcomeFrame welcome;
  welcome.num_layers = body.Take<uint32_t>();
  welcome.num_kv_heads = body.Take<uint32_t>();
  welcome.head_dim = body.Take<uint32_t>();
  welcome.num_blocks = body.Take<uint32_t>();
  welcome.format = body.Take<uint32_t>();
  if (body.left() > 0) welcome.tp = body.Take<uint32_t>();
  BATON_RETURN_IF_ERROR(body.Finish("welcome"));
  if (welcome.tp < 1 || welcome.tp > kMaxTp) return OutOfBounds("tp", welcome.tp, kMaxTp);
  if (welcome.num_blocks > (1u << 26))
    return OutOfBounds("num_blocks", welcome.num_blocks, 1u << 26);
  return welcome;
}

std::string Encode(const DeviceMemoryFrame& frame) {
  std::string body;
  for (const DeviceMemoryEntry* entry : {&frame.pool, &frame.probe}) {
    Put(static_cast<uint32_t>(entry->method), &body);
    body.append(reinterpret_cast<const char*>(entry->uuid.data()), entry->uuid.size());
    Put(entry->allocation_bytes, &body);
    Put(entry->offset, &body);
    Put(entry->size, &body);
    body.append(reinterpret_cast<const char*>(entry->handle.data()), entry->handle.size());
  }
  return WithHeader(FrameType::kDeviceMemory, body);
}

absl::StatusOr<DeviceMemoryFrame> ParseDeviceMemory(const Frame& frame) {
  BodyReader body(frame, FrameType::kDeviceMemory);
  DeviceMemoryFrame memory;
  for (DeviceMemoryEntry* entry : {&memory.pool, &memory.probe}) {
    const auto method = body.Take<uint32_t>();
    body.TakeInto(absl::MakeSpan(entry->uuid));
    entry->allocation_bytes = body.Take<uint64_t>();
    entry->offset = body.Take<uint64_t>();
    entry->size = body.Take<uint64_t>();
    body.TakeInto(absl::MakeSpan(entry->handle));
    entry->method = static_cast<DeviceMemoryEntry::Method>(method);
  }
  BATON_RETURN_IF_ERROR(body.Finish("device memory"));
  for (const DeviceMemoryEntry* entry : {&memory.pool, &memory.probe}) {
    if (entry->method != DeviceMemoryEntry::kDescriptor &&
        entry->method != DeviceMemoryEntry::kLegacyHandle)
      return OutOfBounds("method", entry->method, DeviceMemoryEntry::kLegacyHandle);
  }
  return memory;
}

std::string Encode(const NcclOfferFrame& frame) {
  std::string body;
  Put(frame.version, &body);
  Put(frame.slot_bytes, &body);
  return WithHeader(FrameType::kNcclOffer, body);
}

absl::StatusOr<NcclOfferFrame> ParseNcclOffer(const Frame& frame) {
  BodyReader body(frame, FrameType::kNcclOffer);
  NcclOfferFrame offer;
  offer.version = body.Take<uint32_t>();
  offer.slot_bytes = body.Take<uint64_t>();
  BATON_RETURN_IF_ERROR(body.Finish("nccl offer"));
  if (offer.version > INT32_MAX) return OutOfBounds("version", offer.version, INT32_MAX);
  if (offer.slot_bytes == 0 || offer.slot_bytes > kMaxUnitBytes)
    return OutOfBounds("slot_bytes", offer.slot_bytes, kMaxUnitBytes);
  return offer;
}

std::string Encode(const NcclJoinFrame& frame) {
  return WithHeader(FrameType::kNcclJoin, absl::string_view(frame.id.data(), frame.id.size()));
}

absl::StatusOr<NcclJoinFrame> ParseNcclJoin(const Frame& frame) {
  BodyReader body(frame, FrameType::kNcclJoin);
  NcclJoinFrame join;
  body.TakeInto(absl::MakeSpan(reinterpret_cast<uint8_t*>(join.id.data()), join.id.size()));
  BATON_RETURN_IF_ERROR(body.Finish("nccl join"));
  return join;
}

std::string Encode(const OpenFrame& frame) {
  std::string body;
  Put(frame.reservation_id, &body);
  Put(frame.epoch, &body);
  return WithHeader(FrameType::kOpen, body);
}

absl::StatusOr<OpenFrame> ParseOpen(const Frame& frame) {
  BodyReader body(frame, FrameType::kOpen);
  OpenFrame open;
  open.reservation_id = body.Take<uint64_t>();
  open.epoch = body.Take<uint64_t>();
  BATON_RETURN_IF_ERROR(body.Finish("open"));
  return open;
}

std::string Encode(const GrantFrame& frame) {
  std::string body;
  Put(frame.reservation_id, &body);
  Put(static_cast<uint32_t>(frame.status.code()), &body);
  const absl::string_view reason = frame.status.message().substr(0, kMaxReasonBytes);
  Put(static_cast<uint32_t>(reason.size()), &body);
  body.append(reason.data(), reason.size());
  Put(frame.prompt_tokens, &body);
  Put(frame.first_missing_block, &body);
  for (kv::BlockId block : frame.blocks) Put(static_cast<uint32_t>(block), &body);
  return WithHeader(FrameType::kGrant, body);
}

absl::StatusOr<GrantFrame> ParseGrant(const Frame& frame) {
  BodyReader body(frame, FrameType::kGrant);
  GrantFrame grant;
  grant.reservation_id = body.Take<uint64_t>();
  const uint32_t code = body.Take<uint32_t>();
  const absl::string_view reason = body.TakeBytes(body.Take<uint32_t>());
  if (code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated))
    return OutOfBounds("status", code, 16);
  grant.status = absl::Status(static_cast<absl::StatusCode>(code), reason);
  grant.prompt_tokens = body.Take<uint32_t>();
  grant.first_missing_block = body.Take<uint32_t>();
  const size_t num_blocks = body.left() / sizeof(uint32_t);
  grant.blocks.reserve(num_blocks);
  for (size_t i = 0; i < num_blocks; ++i)
    grant.blocks.push_back(static_cast<kv::BlockId>(body.Take<uint32_t>()));
  BATON_RETURN_IF_ERROR(body.Finish("grant"));
  return grant;
}

std::string Encode(const UnitFrame& frame) {
  std::string body;
  Put(frame.reservation_id, &body);
  Put(frame.epoch, &body);
  Put(frame.sequence, &body);
  Put(frame.rect.block_begin, &body);
  Put(frame.rect.block_end, &body);
  Put(frame.rect.layer_begin, &body);
  Put(frame.rect.layer_end, &body);
  Put(frame.rect.head_begin, &body);
  Put(frame.rect.head_end, &body);
  Put(static_cast<uint32_t>(frame.has_checksum ? 1 : 0), &body);
  Put(frame.bytes, &body);
  Put(frame.checksum, &body);
  return WithHeader(FrameType::kUnit, body);
}

absl::StatusOr<UnitFrame> ParseUnit(const Frame& frame) {
  BodyReader body(frame, FrameType::kUnit);
  UnitFrame unit;
  unit.reservation_id = body.Take<uint64_t>();
  unit.epoch = body.Take<uint64_t>();
  unit.sequence = body.Take<uint32_t>();
  unit.rect.block_begin = body.Take<uint32_t>();
  unit.rect.block_end = body.Take<uint32_t>();
  unit.rect.layer_begin = body.Take<uint32_t>();
  unit.rect.layer_end = body.Take<uint32_t>();
  unit.rect.head_begin = body.Take<uint32_t>();
  unit.rect.head_end = body.Take<uint32_t>();
  const uint32_t flags = body.Take<uint32_t>();
  unit.bytes = body.Take<uint64_t>();
  unit.checksum = body.Take<uint64_t>();
  BATON_RETURN_IF_ERROR(body.Finish("unit"));
  if (flags > 1) return OutOfBounds("flags", flags, 1);
  if (unit.bytes == 0 || unit.bytes > kMaxUnitBytes)
    return OutOfBounds("unit_bytes", unit.bytes, kMaxUnitBytes);
  unit.has_checksum = flags == 1;
  return unit;
}

std::string Encode(const AckFrame& frame) {
  std::string body;
  Put(frame.reservation_id, &body);
  Put(frame.sequence, &body);
  return WithHeader(FrameType::kAck, body);
}

absl::StatusOr<AckFrame> ParseAck(const Frame& frame) {
  BodyReader body(frame, FrameType::kAck);
  AckFrame ack;
  ack.reservation_id = body.Take<uint64_t>();
  ack.sequence = body.Take<uint32_t>();
  BATON_RETURN_IF_ERROR(body.Finish("ack"));
  return ack;
}

std::string Encode(const ProbeFrame& frame) {
  std::string body;
  Put(frame.bytes, &body);
  return WithHeader(FrameType::kProbe, body);
}

absl::StatusOr<ProbeFrame> ParseProbe(const Frame& frame) {
  BodyReader body(frame, FrameType::kProbe);
  ProbeFrame probe;
  probe.bytes = body.Take<uint64_t>();
  BATON_RETURN_IF_ERROR(body.Finish("probe"));
  if (probe.bytes == 0 || probe.bytes > kMaxUnitBytes)
    return OutOfBounds("probe_bytes", probe.bytes, kMaxUnitBytes);
  return probe;
}

std::string Encode(const ReportFrame& frame) {
  std::string body;
  Put(frame.bytes_per_second, &body);
  return WithHeader(FrameType::kReport, body);
}

absl::StatusOr<ReportFrame> ParseReport(const Frame& frame) {
  BodyReader body(frame, FrameType::kReport);
  ReportFrame report;
  report.bytes_per_second = body.Take<uint64_t>();
  BATON_RETURN_IF_ERROR(body.Finish("report"));
  return report;
}

std::string EncodeFarewell() { return WithHeader(FrameType::kFarewell, ""); }

std::string EncodeProbeAck() { return WithHeader(FrameType::kProbeAck, ""); }

}  // namespace baton::kvtransfer
