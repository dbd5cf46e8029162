#pragma once

// Where an engine loop sends what happens to a call. Implemented over gRPC by the services, in
// memory by tests.

#include "absl/status/status.h"

namespace baton::worker {

// Thread-safe.
template <typename Response>
class CallSink {
 public:
  virtual ~CallSink() = default;
  // Queues a message; never blocks. False: the reader is gone or too slow, and the message is
  // dropped.
  virtual bool Send(Response response) = 0;
  // Ends the call, after what has been sent. Called exactly once.
  virtual void Finish(absl::Status status) = 0;
};

}  // namespace baton::worker
