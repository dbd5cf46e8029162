#pragma once

// The two calls to workers that serve a request, as its state machine sees them: over gRPC in the
// router, by hand in tests.

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "baton/worker/v1/decode.pb.h"
#include "baton/worker/v1/prefill.pb.h"

namespace baton::router {

// What comes back from a worker. Messages in order, then exactly one end; nothing after it. Never
// called from inside a call to the leg or its factory.
template <typename Response>
struct LegEvents {
  std::function<void(Response)> on_message;
  std::function<void(absl::Status)> on_end;
};
using PrefillEvents = LegEvents<worker::v1::PrefillResponse>;
using DecodeEvents = LegEvents<worker::v1::DecodeResponse>;

// Thread-compatible handle. Destroying it does not end the call: on_end still comes.
class PrefillLeg {
 public:
  virtual ~PrefillLeg() = default;
  virtual void SendTicket(worker::v1::PrefillRequest::Ticket ticket) = 0;
  // The worker releases everything. on_end still comes.
  virtual void Cancel() = 0;
};

class DecodeLeg {
 public:
  virtual ~DecodeLeg() = default;
  virtual void Cancel() = 0;
};

// Thread-safe.
class LegFactory {
 public:
  virtual ~LegFactory() = default;
  // `deadline` is a time of the router's clock and travels with the call.
  virtual std::unique_ptr<PrefillLeg> OpenPrefill(const std::string& address,
                                                  worker::v1::PrefillRequest::Open open,
                                                  absl::Duration deadline,
                                                  PrefillEvents events) = 0;
  virtual std::unique_ptr<DecodeLeg> OpenDecode(const std::string& address,
                                                worker::v1::DecodeRequest::Open open,
                                                absl::Duration deadline,
                                                DecodeEvents events) = 0;
};

}  // namespace baton::router
