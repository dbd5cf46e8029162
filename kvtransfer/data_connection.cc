#include "kvtransfer/data_connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace baton::kvtransfer {
namespace {

constexpr size_t kMaxReadBytes = size_t{1} << 20;  // a receive; between two, revokes are looked at
constexpr size_t kMaxTurnBytes = size_t{8} << 20;  // a turn of one connection
constexpr int kMaxTurnReads = 256;
constexpr size_t kMaxOutBytes = size_t{4} << 20;  // answers the peer does not read

}  // namespace

DataConnection::~DataConnection() {
  port_.reset();  // from here on we write nothing
  AbandonUnit(absl::UnavailableError("data connection: closed"));
}

void DataConnection::WatchProcess() {
  if (!listener_->writes_outlive_socket()) return;
  absl::StatusOr<UniqueFd> process = PeerProcess(fd_.get());
  if (process.ok()) process_ = *std::move(process);
}

absl::Status DataConnection::OnClosed(const absl::Status& reason) {
  if (!listener_->writes_outlive_socket() || farewell_) return reason;
  // Without a process to watch nothing would ever tell: the listener has refused such peers.
  awaits_exit_ = true;
  return absl::AbortedError("data connection: closed without a farewell");
}

void DataConnection::LookForFarewell(size_t count) {
  if (!listener_->writes_outlive_socket()) return;
  const absl::StatusOr<FrameReader::Event> event = reader_.Advance(count);
  if (event.ok() && *event == FrameReader::Event::kFrame)
    farewell_ = farewell_ || reader_.frame().type == FrameType::kFarewell;
}

absl::Status DataConnection::OnReadable() {
  if (awaits_exit_) return absl::UnavailableError("data connection: its process has ended");
  size_t turn_bytes = 0;
  for (int read = 0; read < kMaxTurnReads && turn_bytes < kMaxTurnBytes; ++read) {
    DropUnwantedUnit();
    const absl::Span<uint8_t> want = reader_.Want();
    const size_t limit = std::min(want.size(), kMaxReadBytes);
    const absl::StatusOr<size_t> received = ReceiveSome(fd_.get(), want.data(), limit);
    if (!received.ok()) return OnClosed(received.status());
    const size_t count = *received;
    if (count == 0) return absl::OkStatus();
    turn_bytes += count;
    if (shut_) {
      LookForFarewell(count);
      continue;
    }
    BATON_ASSIGN_OR_RETURN(const FrameReader::Event event, reader_.Advance(count));
    if (event == FrameReader::Event::kFrame) BATON_RETURN_IF_ERROR(OnFrame(reader_.frame()));
    if (event == FrameReader::Event::kPayloadDone) {
      if (probe_arriving_) {
        probe_arriving_ = false;
        BATON_RETURN_IF_ERROR(Answer(EncodeProbeAck()));
      } else {
        FinishUnit();
        BATON_RETURN_IF_ERROR(OnWritable());
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DataConnection::OnFrame(const Frame& frame) {
  if (session_ == 0) return OnAttach(frame);
  switch (frame.type) {
    case FrameType::kOpen: {
      BATON_ASSIGN_OR_RETURN(const OpenFrame open, ParseOpen(frame));
      return Answer(Encode(sink_->Open(session_, open, *listener_)));
    }
    case FrameType::kUnit: {
      BATON_ASSIGN_OR_RETURN(const UnitFrame unit, ParseUnit(frame));
      return OnUnit(unit);
    }
    case FrameType::kProbe: {
      BATON_ASSIGN_OR_RETURN(const ProbeFrame probe, ParseProbe(frame));
      return OnProbe(probe);
    }
    case FrameType::kNcclJoin: {
      BATON_ASSIGN_OR_RETURN(const NcclJoinFrame join, ParseNcclJoin(frame));
      if (port_ == nullptr)
        return absl::InvalidArgumentError("data frame: no communicator on this transport");
      return port_->Join(join);
    }
    case FrameType::kFarewell: {
      farewell_ = true;
      return absl::OkStatus();
    }
    case FrameType::kReport: {
      BATON_ASSIGN_OR_RETURN(const ReportFrame report, ParseReport(frame));
      sink_->Report(session_, static_cast<double>(report.bytes_per_second));
      return absl::OkStatus();
    }
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "data frame: type=", static_cast<int>(frame.type), " is not for a decode worker"));
  }
}

absl::Status DataConnection::OnAttach(const Frame& frame) {
  BATON_ASSIGN_OR_RETURN(const AttachFrame attach, ParseAttach(frame));
  BATON_ASSIGN_OR_RETURN(session_, sink_->Attach(*listener_, attach.token));
  BATON_ASSIGN_OR_RETURN(port_, listener_->OpenPort(fd_.get()));
  return listener_->Welcome(fd_.get());
}

absl::Status DataConnection::OnProbe(const ProbeFrame& probe) {
  if (listener_->peer_writes()) return Answer(EncodeProbeAck());
  if (port_ != nullptr) {
    announced_.push_back(std::nullopt);
    return port_->Expect(probe.bytes);
  }
  probe_arriving_ = true;
  reader_.SkipPayload(probe.bytes);
  return absl::OkStatus();
}

void DataConnection::BeginUnit(const UnitFrame& unit) {
  std::optional<std::vector<ByteRange>> ranges = sink_->BeginUnit(session_, unit);
  unit_ = unit;
  unit_wanted_ = ranges.has_value();
  unit_ranges_ = unit_wanted_ ? *std::move(ranges) : std::vector<ByteRange>();
}

absl::Status DataConnection::Advance() {
  if (port_ == nullptr) return absl::OkStatus();
  BATON_RETURN_IF_ERROR(port_->Poll());
  while (!announced_.empty()) {
    if (placing_) {
      BATON_ASSIGN_OR_RETURN(const bool placed, port_->Placed());
      if (!placed) return absl::OkStatus();
      placing_ = false;
      FinishUnit();
    } else if (port_->arrived()) {
      BATON_RETURN_IF_ERROR(TakeArrived());
      if (placing_) continue;
    } else {
      return absl::OkStatus();
    }
    announced_.pop_front();
    port_->Pop();
    BATON_RETURN_IF_ERROR(OnWritable());
    BATON_RETURN_IF_ERROR(port_->Poll());  // there is room for the next one
  }
  return absl::OkStatus();
}

// The reservation is looked at only now: a unit that nobody wants any more has arrived in memory of
// the port and goes nowhere.
absl::Status DataConnection::TakeArrived() {
  if (!announced_.front().has_value()) {
    out_ += EncodeProbeAck();
    return absl::OkStatus();
  }
  BeginUnit(*announced_.front());
  if (!unit_wanted_) {
    FinishUnit();
    return absl::OkStatus();
  }
  placing_ = true;
  return port_->Place(unit_ranges_);
}

absl::Status DataConnection::OnUnit(const UnitFrame& unit) {
  if (port_ != nullptr) {
    announced_.push_back(unit);
    return port_->Expect(unit.bytes);
  }
  BeginUnit(unit);
  if (listener_->peer_writes()) {  // the bytes are here already
    FinishUnit();
    return OnWritable();
  }
  if (!unit_wanted_) {
    reader_.SkipPayload(unit.bytes);
    return absl::OkStatus();
  }
  std::vector<absl::Span<uint8_t>> places;
  places.reserve(unit_ranges_.size());
  for (const ByteRange& range : unit_ranges_) {
    places.push_back(absl::MakeSpan(pool_->data() + range.offset, range.size));
  }
  reader_.ReceivePayload(std::move(places));
  return absl::OkStatus();
}

void DataConnection::FinishUnit() {
  if (unit_wanted_) {
    absl::Status arrived;
    if (unit_->has_checksum) {
      const absl::StatusOr<uint64_t> checksum = listener_->Checksum(pool_, unit_ranges_);
      if (!checksum.ok()) arrived = checksum.status();
      if (checksum.ok() && *checksum != unit_->checksum) {
        arrived = absl::DataLossError(
            absl::StrCat("hand-over: checksum of unit=", unit_->sequence, " is wrong"));
      }
    }
    sink_->EndUnit(*unit_, arrived);
  }
  out_ += Encode(AckFrame{unit_->reservation_id, unit_->sequence});
  unit_.reset();
}

void DataConnection::DropUnwantedUnit() {
  // (A copy into the pool cannot be called back, and is short.)
  if (!unit_.has_value() || !unit_wanted_ || placing_ || sink_->Wants(unit_->reservation_id))
    return;
  reader_.SkipRestOfPayload();
  unit_wanted_ = false;
  sink_->EndUnit(*unit_, absl::CancelledError("hand-over: revoked"));
}

void DataConnection::AbandonUnit(const absl::Status& reason) {
  if (unit_.has_value() && unit_wanted_) sink_->EndUnit(*unit_, reason);
  unit_.reset();
}

void DataConnection::Shut(const absl::Status& reason) {
  if (shut_) return;
  shut_ = true;
  port_.reset();  // from here on we write nothing
  placing_ = false;
  AbandonUnit(reason);
  // (What writes itself has no payload that the reader could still take anywhere.)
  if (!listener_->writes_outlive_socket()) reader_ = FrameReader();
  out_.clear();
  shutdown(fd_.get(), SHUT_WR);
}

absl::Status DataConnection::Answer(const std::string& frame) {
  out_ += frame;
  return OnWritable();
}

absl::Status DataConnection::OnWritable() {
  while (!out_.empty()) {
    BATON_ASSIGN_OR_RETURN(const size_t count, SendSome(fd_.get(), out_.data(), out_.size()));
    if (count == 0) break;
    out_.erase(0, count);
  }
  if (out_.size() <= kMaxOutBytes) return absl::OkStatus();
  return absl::ResourceExhaustedError("data connection: the peer does not read its answers");
}

}  // namespace baton::kvtransfer
