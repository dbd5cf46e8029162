#pragma once

// The data plane of the hand-over between simulated workers: the prefill side's transport, and the
// decode side's end with the project's own DataConnection behind it.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvtransfer/data_connection.h"
#include "kvtransfer/frame.h"
#include "kvtransfer/transport.h"
#include "tests/sim/network.h"

namespace baton::sim {

using kvtransfer::ByteRange;

// A fault planted on purpose in the data plane, to see that it is found.
enum class Plant {
  kNone,
  kAnnounceBeforeCopy,  // a unit is said to have landed while its bytes are still on the way
  kFreeAtRevoke,        // blocks are given back before the writer is quiet
  kWriteAfterQuiet,     // a unit of a revoked hand-over is written once more, later
  kSkipUnit,            // a unit is acknowledged and counted, but its bytes never arrive
  kWrongBlock,          // a unit's bytes go to a neighbouring block
  kLoseFinish,          // a worker never tells the end of a call
  kLoseBlocks,          // a quarantine is never ended
};

// What the decode side lets a peer write into, if its transport writes itself.
struct PeerMemory {
  kv::KvLayout layout;
  uint8_t* data = nullptr;
  // Before each write of hand-over `reservation_id` into `to`.
  std::function<void(uint64_t reservation_id, absl::Span<const ByteRange> to)> on_write;
};
struct DataPlaneOptions {
  bool peer_writes = false;
  absl::Duration piece_time_max = absl::Microseconds(200);  // of 4 KiB written by the peer
  size_t socket_bytes = 16 << 10;                           // most bytes under way
  uint64_t flip_one_in = 0;                                 // pieces with a wrong bit; 0: none
  Plant plant = Plant::kNone;
};

// Connected to end 1 of `stream`; the process of end 0 owns it.
class SimPut : public kvtransfer::PutTransport {
 public:
  // `memory` only if the peer's memory can be written. `wake`: something can be read or written.
  SimPut(World* world,
         const DataPlaneOptions& options,
         std::shared_ptr<Stream> stream,
         const base::Buffer* pool,
         std::weak_ptr<PeerMemory> memory);
  ~SimPut() override;

  void set_wake(std::function<void()> wake) { wake_ = std::move(wake); }
  // Presents the token; `attached` runs when the peer has answered.
  void Attach(const std::string& token,
              const kv::KvLayout& our_layout,
              std::function<void()> attached);

  absl::string_view name() const override { return "sim"; }
  const kv::KvLayout& peer_layout() const override { return peer_layout_; }
  absl::StatusOr<double> Probe(absl::Duration timeout) override { return 1e8; }
  void Open(const kvtransfer::OpenFrame& open) override;
  void Put(const kvtransfer::UnitFrame& unit,
           absl::Span<const ByteRange> from,
           absl::Span<const ByteRange> to) override;
  bool busy() const override { return borrowed_ > 0; }
  absl::StatusOr<size_t> Write() override;
  absl::Status Read(std::vector<Reply>* replies) override;
  int fd() const override { return -1; }
  bool wants_write() const override { return !segments_.empty(); }

 private:
  struct Segment {
    std::string owned;
    absl::Span<const uint8_t> borrowed;
  };
  struct Piece {
    size_t from, to, size;
  };
  // One copy into the peer's memory: a piece at a time.
  struct Copy {
    kvtransfer::UnitFrame unit;
    std::vector<Piece> pieces;
    size_t next = 0;
  };

  void Queue(std::string bytes);
  void OnAnswer(const std::string& bytes);
  void WritePiece(const std::shared_ptr<Copy>& copy);
  void CopyPiece(const kvtransfer::UnitFrame& unit, const Piece& piece);
  void SendBytes(std::string bytes);

  World* const world_;
  const DataPlaneOptions options_;
  const std::shared_ptr<Stream> stream_;
  const base::Buffer* const pool_;
  const std::weak_ptr<PeerMemory> memory_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // shared with events under way
  std::function<void()> wake_;
  std::function<void()> attached_;
  kv::KvLayout peer_layout_;
  std::deque<Segment> segments_;
  size_t written_ = 0;  // of the first segment
  int borrowed_ = 0;
  std::shared_ptr<size_t> under_way_ = std::make_shared<size_t>(0);  // as alive_
  std::string answers_;
  bool closed_ = false;
  kvtransfer::FrameReader reader_;
};

// One data connection at the decode worker: bytes from the stream go through a socket pair into the
// real DataConnection.
class DataEnd {
 public:
  DataEnd(std::shared_ptr<Stream> stream,
          kvtransfer::PutListener* listener,
          kvtransfer::DataSink* sink,
          base::Buffer* pool,
          absl::Duration now);

  kvtransfer::DataConnection& connection() { return *connection_; }
  const std::shared_ptr<Stream>& stream() const { return stream_; }
  // Errors: those of OnReadable: the connection has failed.
  absl::Status OnBytes(const std::string& bytes);
  absl::Status OnHangUp();
  // What the connection has written goes to the peer; also its shutdown.
  void Drain();

 private:
  absl::Status ReadAll();

  const std::shared_ptr<Stream> stream_;
  kvtransfer::UniqueFd outside_;
  std::unique_ptr<kvtransfer::DataConnection> connection_;
  bool shut_ = false;
  bool end_sent_ = false;
};

// The listener of all simulated decode workers: there is nothing to listen on.
class SimListener : public kvtransfer::PutListener {
 public:
  SimListener(const kv::KvLayout& layout, bool peer_writes)
      : layout_(layout), peer_writes_(peer_writes) {}
  absl::string_view name() const override { return "sim"; }
  std::string address() const override { return "sim"; }
  bool peer_writes() const override { return peer_writes_; }
  int fd() const override { return -1; }
  absl::StatusOr<kvtransfer::UniqueFd> Accept() override;
  absl::Status Welcome(int fd) override;

 private:
  const kv::KvLayout layout_;
  const bool peer_writes_;
};

}  // namespace baton::sim
