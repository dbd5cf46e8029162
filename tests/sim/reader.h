#pragma once

// A simulated client of the router: reads its answer a message at a time, as gRPC would bring it,
// and may stop reading for a while. Between router and client is what the real service has there: a
// StreamWriter, which holds what is not read yet.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "baton/v1/generation.pb.h"
#include "engine/process/stream_writer.h"
#include "tests/sim/workers.h"

namespace baton::sim {

// How a client reads.
struct Reading {
  absl::Duration pause;      // zero: it never stops
  uint64_t pause_after = 0;  // messages
};

// What a client got, and when it was told the end.
struct ClientRecord {
  std::vector<std::vector<uint32_t>> ids;  // of each choice
  std::vector<v1::FinishReason> reasons;
  int num_finishes = 0;
  absl::Status status;
  bool overflowed = false;  // more waited for it than the router holds
};

// Shared: by the call's sink, by the client, and by what is under way.
class Reader : public std::enable_shared_from_this<Reader> {
 public:
  Reader(Env* env, const Reading& reading);

  // The router's side; both run in `router`.
  void Attach(std::shared_ptr<Process> router) { router_ = std::move(router); }
  absl::Status Write(v1::GenerateResponse response);
  void Finish(const absl::Status& status);

  // The client goes, or its time is over: what is being written fails. After the call was told.
  void Leave(const absl::Status& why);

  const ClientRecord& record() const { return record_; }
  // The router has said its last word, which the client may not have read.
  bool router_is_done() const { return finish_called_; }

 private:
  void StartWrite(const v1::GenerateResponse* message);
  void ReadSoon(absl::Duration delay);
  void Read();
  void Take(const v1::GenerateResponse& message);
  void OnFinish(const absl::Status& status);
  // What waits is within the bound; a message is refused only where it would not be.
  void CheckBound(const v1::GenerateResponse& next, process::WriteResult result);

  Env* const env_;
  Reading reading_;
  std::shared_ptr<Process> router_;
  const v1::GenerateResponse* being_written_ = nullptr;
  uint64_t messages_read_ = 0;
  // Since nothing waited.
  size_t weight_written_ = 0, tokens_written_ = 0, tokens_read_ = 0;
  bool finish_called_ = false;
  absl::Status left_;
  ClientRecord record_;
  process::StreamWriter<v1::GenerateResponse> writer_;
};

}  // namespace baton::sim
