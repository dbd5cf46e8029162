// Cuts a byte stream into frames and payloads.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/log.h"
#include "kvtransfer/frame.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kSkipBytes = size_t{64} << 10;

// Little-endian.
template <typename Integer>
Integer HeaderField(const char* in) {
  uint64_t value = 0;
  for (size_t i = 0; i < sizeof(Integer); ++i)
    value |= uint64_t{static_cast<uint8_t>(in[i])} << (8 * i);
  return static_cast<Integer>(value);
}

}  // namespace

absl::Span<uint8_t> FrameReader::Want() {
  switch (state_) {
    case State::kHeader:
      return absl::MakeSpan(header_).subspan(done_);
    case State::kBody:
      return absl::MakeSpan(reinterpret_cast<uint8_t*>(frame_.body.data()), frame_.body.size())
          .subspan(done_);
    case State::kPayload:
      return places_[place_].subspan(done_);
    case State::kSkip:
      break;
  }
  scratch_.resize(kSkipBytes);
  return absl::MakeSpan(scratch_).subspan(0, std::min<uint64_t>(skip_bytes_, kSkipBytes));
}

absl::StatusOr<FrameReader::Event> FrameReader::Advance(size_t count) {
  if (state_ == State::kSkip) {
    skip_bytes_ -= count;
    if (skip_bytes_ > 0) return Event::kMore;
    state_ = State::kHeader;
    return Event::kPayloadDone;
  }
  const size_t wanted = Want().size();
  done_ += count;
  if (count < wanted) return Event::kMore;
  done_ = 0;
  switch (state_) {
    case State::kHeader:
      return HeaderDone();
    case State::kBody:
      return BodyDone();
    default:
      break;
  }
  if (++place_ < places_.size()) return Event::kMore;
  places_.clear();
  state_ = State::kHeader;
  return Event::kPayloadDone;
}

absl::StatusOr<FrameReader::Event> FrameReader::HeaderDone() {
  const char* header = reinterpret_cast<const char*>(header_.data());
  const uint16_t type = HeaderField<uint16_t>(header + 4);
  const uint32_t body_bytes = HeaderField<uint32_t>(header + 8);
  if (HeaderField<uint32_t>(header) != kFrameMagic ||
      type < static_cast<uint16_t>(FrameType::kAttach) ||
      type > static_cast<uint16_t>(FrameType::kNcclJoin) ||
      HeaderField<uint16_t>(header + 6) != 0) {
    return absl::InvalidArgumentError("data frame: not a frame header");
  }
  if (body_bytes > kMaxFrameBody) {
    return absl::InvalidArgumentError(
        absl::StrCat("data frame: body_bytes=", body_bytes, " limit=", kMaxFrameBody));
  }
  frame_.type = static_cast<FrameType>(type);
  frame_.body.resize(body_bytes);
  if (body_bytes == 0) return BodyDone();
  state_ = State::kBody;
  return Event::kMore;
}

absl::StatusOr<FrameReader::Event> FrameReader::BodyDone() {
  const char* header = reinterpret_cast<const char*>(header_.data());
  if (HeaderField<uint32_t>(header + 12) != FrameCheck(header, frame_.body))
    return absl::InvalidArgumentError("data frame: damaged");
  state_ = State::kHeader;
  return Event::kFrame;
}

void FrameReader::ReceivePayload(std::vector<absl::Span<uint8_t>> places) {
  BATON_CHECK(state_ == State::kHeader && done_ == 0 && !places.empty());
  places_ = std::move(places);
  place_ = 0;
  state_ = State::kPayload;
}

void FrameReader::SkipPayload(uint64_t bytes) {
  BATON_CHECK(state_ == State::kHeader && done_ == 0 && bytes > 0);
  skip_bytes_ = bytes;
  state_ = State::kSkip;
}

void FrameReader::SkipRestOfPayload() {
  if (state_ != State::kPayload) return;
  skip_bytes_ = places_[place_].size() - done_;
  for (size_t i = place_ + 1; i < places_.size(); ++i) skip_bytes_ += places_[i].size();
  done_ = 0;
  places_.clear();
  state_ = State::kSkip;
}

}  // namespace baton::kvtransfer
