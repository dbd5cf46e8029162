#include "tests/sim/data_plane.h"

#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/base/log.h"
#include "engine/base/status_macros.h"

namespace baton::sim {
namespace {

using kvtransfer::AckFrame;
using kvtransfer::FrameReader;
using kvtransfer::GrantFrame;
using kvtransfer::UnitFrame;

constexpr size_t kPieceBytes = 4 << 10;
constexpr absl::Duration kPatience = absl::Seconds(1);

// Two lists of ranges with equal totals, cut alike.
template <typename Piece>
std::vector<Piece> PairRanges(absl::Span<const ByteRange> from, absl::Span<const ByteRange> to) {
  std::vector<Piece> pieces;
  size_t i = 0, j = 0, from_done = 0, to_done = 0;
  while (i < from.size() && j < to.size()) {
    const size_t size = std::min({from[i].size - from_done, to[j].size - to_done, kPieceBytes});
    pieces.push_back({from[i].offset + from_done, to[j].offset + to_done, size});
    from_done += size;
    to_done += size;
    if (from_done == from[i].size) ++i, from_done = 0;
    if (to_done == to[j].size) ++j, to_done = 0;
  }
  return pieces;
}

}  // namespace

SimPut::SimPut(World* world,
               const DataPlaneOptions& options,
               std::shared_ptr<Stream> stream,
               const base::Buffer* pool,
               std::weak_ptr<PeerMemory> memory)
    : world_(world),
      options_(options),
      stream_(std::move(stream)),
      pool_(pool),
      memory_(std::move(memory)) {
  stream_->set_on_closed(0, [this] {
    closed_ = true;
    if (wake_) wake_();
  });
  stream_->set_on_bytes(0, [this](const std::string& bytes) { OnAnswer(bytes); });
}

SimPut::~SimPut() {
  *alive_ = false;
  stream_->set_on_closed(0, nullptr);
  stream_->set_on_bytes(0, nullptr);
  stream_->Close(0);
}

void SimPut::Attach(const std::string& token,
                    const kv::KvLayout& our_layout,
                    std::function<void()> attached) {
  peer_layout_ = our_layout;
  attached_ = std::move(attached);
  SendBytes(Encode(kvtransfer::AttachFrame{token}));
}

void SimPut::Open(const kvtransfer::OpenFrame& open) { Queue(Encode(open)); }

void SimPut::Queue(std::string bytes) { segments_.push_back({std::move(bytes), {}}); }

void SimPut::Put(const UnitFrame& unit,
                 absl::Span<const ByteRange> from,
                 absl::Span<const ByteRange> to) {
  if (!options_.peer_writes) {
    Queue(Encode(unit));
    for (const ByteRange& range : from) {
      segments_.push_back({"", absl::MakeConstSpan(pool_->data() + range.offset, range.size)});
      ++borrowed_;
    }
    return;
  }
  auto copy = std::make_shared<Copy>();  // shared with the events that go on with it
  copy->unit = unit;
  copy->pieces = PairRanges<Piece>(from, to);
  ++borrowed_;
  if (options_.plant == Plant::kAnnounceBeforeCopy) Queue(Encode(unit));
  WritePiece(copy);
}

void SimPut::WritePiece(const std::shared_ptr<Copy>& copy) {
  const absl::Duration takes =
      world_->random().Between(absl::Microseconds(1), options_.piece_time_max);
  world_->After(takes, stream_->process(0), "copy", [this, copy, alive = alive_] {
    if (!*alive) return;
    if (copy->next < copy->pieces.size()) {
      CopyPiece(copy->unit, copy->pieces[copy->next++]);
      return WritePiece(copy);
    }
    if (options_.plant == Plant::kWriteAfterQuiet && world_->random().OneIn(4)) {
      const Piece piece = copy->pieces.back();
      world_->After(world_->random().Between(absl::Milliseconds(1), absl::Milliseconds(50)),
                    stream_->process(0), "late copy", [this, copy, piece, alive] {
                      if (*alive) CopyPiece(copy->unit, piece);
                    });
    }
    --borrowed_;
    if (options_.plant != Plant::kAnnounceBeforeCopy) Queue(Encode(copy->unit));
    if (wake_) wake_();
  });
}

void SimPut::CopyPiece(const UnitFrame& unit, const Piece& piece) {
  const std::shared_ptr<PeerMemory> memory = memory_.lock();
  if (memory == nullptr) return;  // the peer's process is gone, and its memory is nobody's
  if (options_.plant == Plant::kSkipUnit && world_->random().OneIn(20)) return;
  ByteRange to{piece.to, piece.size};
  if (options_.plant == Plant::kWrongBlock && world_->random().OneIn(20)) {
    const size_t block = memory->layout.block_bytes();
    to.offset = to.offset >= block ? to.offset - block : to.offset + block;
  }
  memory->on_write(unit.reservation_id, absl::MakeConstSpan(&to, 1));
  std::memcpy(memory->data + to.offset, pool_->data() + piece.from, to.size);
  if (options_.flip_one_in > 0 && world_->random().OneIn(options_.flip_one_in)) {
    world_->Trace("  flipped a bit in memory");
    memory->data[to.offset + world_->random().Next() % to.size] ^= 1;
  }
}

absl::StatusOr<size_t> SimPut::Write() {
  if (closed_) return absl::UnavailableError("data connection: closed by the peer");
  std::string bytes;
  const size_t room =
      options_.socket_bytes > *under_way_ ? options_.socket_bytes - *under_way_ : size_t{0};
  size_t limit = std::min(room, kPieceBytes);
  while (!segments_.empty() && limit > 0) {
    const Segment& segment = segments_.front();
    const absl::string_view all =
        segment.borrowed.empty()
            ? absl::string_view(segment.owned)
            : absl::string_view(reinterpret_cast<const char*>(segment.borrowed.data()),
                                segment.borrowed.size());
    const absl::string_view part = all.substr(written_, limit);
    bytes.append(part.data(), part.size());
    written_ += part.size();
    limit -= part.size();
    if (written_ < all.size()) continue;
    written_ = 0;
    // In peer_writes mode only WritePiece borrows.
    if (!segment.borrowed.empty()) --borrowed_;
    segments_.pop_front();
  }
  const size_t count = bytes.size();
  if (count > 0) SendBytes(std::move(bytes));
  return count;
}

void SimPut::SendBytes(std::string bytes) {
  if (options_.flip_one_in > 0 && world_->random().OneIn(options_.flip_one_in)) {
    world_->Trace("  flipped a bit on the way");
    bytes[world_->random().Next() % bytes.size()] ^= 1;
  }
  const size_t size = bytes.size();
  *under_way_ += size;
  stream_->SendBytes(0, "data", std::move(bytes));
  // Behind the bytes: the socket has room again.
  stream_->Send(0, "data read",
                [stream = stream_, size, under_way = under_way_, alive = alive_, this] {
                  *under_way -= size;
                  stream->Send(1, "room", [alive, this] {
                    if (*alive && wake_) wake_();
                  });
                });
}

void SimPut::OnAnswer(const std::string& bytes) {
  if (bytes.empty()) closed_ = true;
  answers_ += bytes;
  if (attached_ && !answers_.empty()) {
    std::vector<Reply> none;
    const absl::Status status = Read(&none);
    if (!status.ok()) closed_ = true;
    return;
  }
  if (wake_) wake_();
}

absl::Status SimPut::Read(std::vector<Reply>* replies) {
  while (!answers_.empty()) {
    const absl::Span<uint8_t> want = reader_.Want();
    const size_t count = std::min(want.size(), answers_.size());
    std::memcpy(want.data(), answers_.data(), count);
    answers_.erase(0, count);
    BATON_ASSIGN_OR_RETURN(const FrameReader::Event event, reader_.Advance(count));
    if (event != FrameReader::Event::kFrame) continue;
    const kvtransfer::Frame& frame = reader_.frame();
    if (attached_) {
      BATON_ASSIGN_OR_RETURN(const kvtransfer::WelcomeFrame welcome, ParseWelcome(frame));
      peer_layout_.num_blocks = static_cast<int>(welcome.num_blocks);
      std::exchange(attached_, nullptr)();
    } else if (frame.type == kvtransfer::FrameType::kGrant) {
      BATON_ASSIGN_OR_RETURN(GrantFrame grant, ParseGrant(frame));
      replies->push_back(std::move(grant));
    } else {
      BATON_ASSIGN_OR_RETURN(const AckFrame ack, ParseAck(frame));
      replies->push_back(ack);
    }
  }
  if (closed_) return absl::UnavailableError("data connection: closed by the peer");
  return absl::OkStatus();
}

DataEnd::DataEnd(std::shared_ptr<Stream> stream,
                 kvtransfer::PutListener* listener,
                 kvtransfer::DataSink* sink,
                 base::Buffer* pool,
                 absl::Duration now)
    : stream_(std::move(stream)) {
  int ends[2];
  BATON_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
  outside_ = kvtransfer::UniqueFd(ends[0]);
  connection_ = std::make_unique<kvtransfer::DataConnection>(kvtransfer::UniqueFd(ends[1]),
                                                             listener, sink, pool, now);
}

absl::Status DataEnd::ReadAll() {
  while (true) {
    const absl::Status status = connection_->OnReadable();
    Drain();
    if (!status.ok()) return status;
    int left = 0;
    if (ioctl(connection_->fd(), FIONREAD, &left) != 0 || left == 0) return absl::OkStatus();
  }
}

absl::Status DataEnd::OnBytes(const std::string& bytes) {
  BATON_CHECK(send(outside_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
              static_cast<ssize_t>(bytes.size()));
  return ReadAll();
}

absl::Status DataEnd::OnHangUp() {
  shutdown(outside_.get(), SHUT_WR);
  return ReadAll();
}

void DataEnd::Drain() {
  std::string answers;
  char buffer[4096];
  while (!shut_) {
    const ssize_t count = recv(outside_.get(), buffer, sizeof(buffer), 0);
    if (count < 0) break;
    if (count == 0) shut_ = true;
    answers.append(buffer, static_cast<size_t>(count));
  }
  if (!answers.empty()) stream_->SendBytes(1, "answer", std::move(answers));
  if (shut_ && !std::exchange(end_sent_, true)) stream_->SendBytes(1, "end of answers", "");
}

absl::StatusOr<kvtransfer::UniqueFd> SimListener::Accept() {
  return absl::UnavailableError("nobody");
}

absl::Status SimListener::Welcome(int fd) {
  const kvtransfer::WelcomeFrame welcome{
      static_cast<uint32_t>(layout_.num_layers), static_cast<uint32_t>(layout_.num_kv_heads),
      static_cast<uint32_t>(layout_.head_dim), static_cast<uint32_t>(layout_.num_blocks),
      static_cast<uint32_t>(layout_.format)};
  return kvtransfer::SendAll(fd, Encode(welcome), kPatience);
}

}  // namespace baton::sim
