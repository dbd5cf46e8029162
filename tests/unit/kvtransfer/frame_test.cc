#include "kvtransfer/frame.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace baton::kvtransfer {
namespace {

// Feeds `bytes` in pieces of at most `piece`; returns the frames, or the first error.
absl::StatusOr<std::vector<Frame>> ReadAll(const std::string& bytes, size_t piece) {
  FrameReader reader;
  std::vector<Frame> frames;
  size_t at = 0;
  while (at < bytes.size()) {
    const auto want = reader.Want();
    const size_t count = std::min({want.size(), piece, bytes.size() - at});
    std::memcpy(want.data(), bytes.data() + at, count);
    at += count;
    auto event = reader.Advance(count);
    if (!event.ok()) return event.status();
    if (*event == FrameReader::Event::kFrame) frames.push_back(reader.frame());
  }
  return frames;
}

TEST(FrameTest, EveryFrameComesBackAsSent) {
  GrantFrame grant;
  grant.reservation_id = 77;
  grant.status = absl::NotFoundError("no such reservation");
  grant.prompt_tokens = 300;
  grant.first_missing_block = 2;
  grant.blocks = {5, 1, 9};
  UnitFrame unit;
  unit.reservation_id = 0x1122334455667788;
  unit.epoch = 9;
  unit.sequence = 3;
  unit.rect = {1, 2, 3, 4, 5, 6};
  unit.bytes = 4096;
  unit.has_checksum = true;
  unit.checksum = 0xfedcba9876543210;
  NcclJoinFrame join;
  join.id.fill('i');
  const std::string stream = Encode(AttachFrame{"secret"}) + Encode(WelcomeFrame{1, 2, 3, 4, 5}) +
                             Encode(OpenFrame{6, 7}) + Encode(grant) + Encode(unit) +
                             Encode(AckFrame{8, 9}) + Encode(ProbeFrame{10}) + EncodeProbeAck() +
                             Encode(ReportFrame{11}) + Encode(NcclOfferFrame{22809, 12}) +
                             Encode(join);
  for (size_t piece : {size_t{1}, size_t{7}, size_t{1000}}) {
    const auto frames = ReadAll(stream, piece);
    ASSERT_TRUE(frames.ok()) << frames.status();
    ASSERT_EQ(frames->size(), 11u);
    EXPECT_EQ(ParseAttach((*frames)[0])->token, "secret");
    EXPECT_EQ(ParseWelcome((*frames)[1])->num_blocks, 4u);
    EXPECT_EQ(ParseOpen((*frames)[2])->epoch, 7u);
    const GrantFrame got = *ParseGrant((*frames)[3]);
    EXPECT_EQ(got.status, grant.status);
    EXPECT_EQ(got.blocks, grant.blocks);
    EXPECT_EQ(got.prompt_tokens, 300u);
    const UnitFrame got_unit = *ParseUnit((*frames)[4]);
    EXPECT_EQ(got_unit.reservation_id, unit.reservation_id);
    EXPECT_EQ(got_unit.rect, unit.rect);
    EXPECT_EQ(got_unit.checksum, unit.checksum);
    EXPECT_EQ(ParseAck((*frames)[5])->sequence, 9u);
    EXPECT_EQ(ParseProbe((*frames)[6])->bytes, 10u);
    EXPECT_EQ((*frames)[7].type, FrameType::kProbeAck);
    EXPECT_EQ(ParseReport((*frames)[8])->bytes_per_second, 11u);
    EXPECT_EQ(ParseNcclOffer((*frames)[9])->version, 22809u);
    EXPECT_EQ(ParseNcclOffer((*frames)[9])->slot_bytes, 12u);
    EXPECT_EQ(ParseNcclJoin((*frames)[10])->id, join.id);
  }
}

// One rank is what a peer that knows no ranks reads and writes.
TEST(FrameTest, WelcomeNamesRanksOnlyWhereThereAreSeveral) {
  const auto body = [](uint32_t tp) {
    return Encode(WelcomeFrame{1, 2, 3, 4, 5, tp}).substr(kFrameHeaderBytes);
  };
  EXPECT_EQ(body(1).size(), 5 * sizeof(uint32_t));
  EXPECT_EQ(ParseWelcome({FrameType::kWelcome, body(1)})->tp, 1u);
  EXPECT_EQ(ParseWelcome({FrameType::kWelcome, body(2)})->tp, 2u);
  EXPECT_EQ(ParseWelcome({FrameType::kWelcome, body(3)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseWelcome({FrameType::kWelcome, body(0)}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseWelcome({FrameType::kWelcome, body(2) + "x"}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(FrameTest, CutOrLengthenedBodiesAreRefused) {
  UnitFrame unit;
  unit.bytes = 1;
  Frame frame{FrameType::kUnit, Encode(unit).substr(kFrameHeaderBytes)};
  EXPECT_TRUE(ParseUnit(frame).ok());
  const std::string body = frame.body;
  for (size_t size = 0; size < body.size(); ++size) {
    frame.body = body.substr(0, size);
    EXPECT_EQ(ParseUnit(frame).status().code(), absl::StatusCode::kInvalidArgument);
  }
  frame.body = body + "x";
  EXPECT_FALSE(ParseUnit(frame).ok());
  frame = {FrameType::kOpen, body};
  EXPECT_FALSE(ParseUnit(frame).ok()) << "another type";
}

TEST(FrameTest, SizesOutOfBoundsAreRefused) {
  UnitFrame unit;
  unit.bytes = kMaxUnitBytes + 1;
  EXPECT_FALSE(ParseUnit({FrameType::kUnit, Encode(unit).substr(kFrameHeaderBytes)}).ok());
  unit.bytes = 0;
  EXPECT_FALSE(ParseUnit({FrameType::kUnit, Encode(unit).substr(kFrameHeaderBytes)}).ok());
  EXPECT_FALSE(
      ParseProbe({FrameType::kProbe, Encode(ProbeFrame{~uint64_t{0}}).substr(kFrameHeaderBytes)})
          .ok());
  EXPECT_FALSE(ParseAttach({FrameType::kAttach, std::string(1000, 'x')}).ok());
  for (const NcclOfferFrame& offer :
       {NcclOfferFrame{1, 0}, NcclOfferFrame{1, kMaxUnitBytes + 1}, NcclOfferFrame{~0u, 1}})
    EXPECT_FALSE(
        ParseNcclOffer({FrameType::kNcclOffer, Encode(offer).substr(kFrameHeaderBytes)}).ok());
  for (size_t size : {0, 127, 129})
    EXPECT_FALSE(ParseNcclJoin({FrameType::kNcclJoin, std::string(size, 'i')}).ok());
}

TEST(FrameReaderTest, EveryWrongBitOfAFrameIsNoticed) {
  const std::string good = Encode(OpenFrame{1, 2});
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    const auto frames = ReadAll(bad, 5);
    if (frames.ok()) {
      EXPECT_TRUE(frames->empty()) << "bit=" << bit;  // it waits for a longer body
    } else {
      EXPECT_EQ(frames.status().code(), absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST(FrameReaderTest, PayloadGoesStraightIntoItsPlaces) {
  FrameReader reader;
  std::vector<uint8_t> first(3), second(5);
  reader.ReceivePayload({absl::MakeSpan(first), absl::MakeSpan(second)});
  const std::string stream = "abcdefgh" + Encode(AckFrame{1, 2});
  size_t at = 0;
  int payloads = 0, frames = 0;
  while (at < stream.size()) {
    const auto want = reader.Want();
    const size_t count = std::min({want.size(), size_t{2}, stream.size() - at});
    std::memcpy(want.data(), stream.data() + at, count);
    at += count;
    const auto event = *reader.Advance(count);
    payloads += event == FrameReader::Event::kPayloadDone ? 1 : 0;
    frames += event == FrameReader::Event::kFrame ? 1 : 0;
  }
  EXPECT_EQ(std::string(first.begin(), first.end()), "abc");
  EXPECT_EQ(std::string(second.begin(), second.end()), "defgh");
  EXPECT_EQ(payloads, 1);
  EXPECT_EQ(frames, 1);
}

TEST(FrameReaderTest, RestOfAPayloadCanBeDroppedAnywhere) {
  for (size_t before = 0; before < 8; ++before) {
    FrameReader reader;
    std::vector<uint8_t> first(3, 0), second(5, 0);
    reader.ReceivePayload({absl::MakeSpan(first), absl::MakeSpan(second)});
    const std::string stream = "abcdefgh" + Encode(AckFrame{1, 2});
    size_t at = 0;
    int frames = 0;
    while (at < stream.size()) {
      if (at == before) reader.SkipRestOfPayload();
      const auto want = reader.Want();
      const size_t count = std::min({want.size(), size_t{1}, stream.size() - at});
      std::memcpy(want.data(), stream.data() + at, count);
      at += count;
      frames += *reader.Advance(count) == FrameReader::Event::kFrame ? 1 : 0;
    }
    EXPECT_EQ(frames, 1);
    size_t written = 0;
    for (uint8_t byte : first) written += byte != 0 ? 1 : 0;
    for (uint8_t byte : second) written += byte != 0 ? 1 : 0;
    EXPECT_EQ(written, before);
  }
}

}  // namespace
}  // namespace baton::kvtransfer
