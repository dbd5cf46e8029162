// The protos of clients and peers on any bytes. The first byte chooses: a client's GenerateRequest
// through the router's checks, and what it makes of it through the workers' own; a worker's
// RequestSpec as a stranger would send it; a peer's messages to the receiving side of hand-overs.
// What is accepted keeps the limits that everything behind relies on.

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "google/protobuf/stubs/logging.h"

#include "baton/v1/generation.pb.h"
#include "baton/worker/v1/common.pb.h"
#include "baton/worker/v1/peer.pb.h"
#include "engine/base/log.h"
#include "engine/runtime/sequence.h"
#include "kvtransfer/receiver_core.h"
#include "router/request_check.h"
#include "worker/convert.h"

namespace baton {
namespace {

constexpr uint32_t kVocab = 1000;
constexpr uint32_t kMaxModelLen = 4096;

const runtime::RequestLimits& Limits() {
  static const runtime::RequestLimits limits = [] {
    runtime::RequestLimits out;
    out.vocab_size = kVocab;
    out.max_prompt_tokens = kMaxModelLen - 1;
    return out;
  }();
  return limits;
}

void CheckBounds(const runtime::EngineRequest& request) {
  BATON_CHECK(!request.prompt_ids.empty() && request.prompt_ids.size() < kMaxModelLen);
  for (const uint32_t id : request.prompt_ids) BATON_CHECK(id < kVocab);
  BATON_CHECK(request.params.n >= 1 && request.params.n <= router::kMaxChoices);
  for (const auto& [id, bias] : request.params.logit_bias)
    BATON_CHECK(id < kVocab && std::isfinite(bias));
  for (const uint32_t id : request.params.stop_token_ids) BATON_CHECK(id < kVocab);
}

void FromClient(const std::string& bytes) {
  v1::GenerateRequest request;
  if (!request.ParseFromString(bytes) || !router::CheckRequest(request, kVocab).ok()) return;
  BATON_CHECK(request.sampling().stop_size() <= router::kMaxStops);
  BATON_CHECK(request.cache_salt().size() <= router::kMaxSaltBytes);
  worker::v1::RequestSpec spec;
  if (request.has_token_ids()) {
    *spec.mutable_prompt_ids() = request.token_ids().ids();
  } else {
    spec.add_prompt_ids(1);
  }
  const auto sampling = router::ResolveSampling(request, text::ModelTextConfig(),
                                                static_cast<uint32_t>(spec.prompt_ids_size()),
                                                kMaxModelLen, /*seed=*/1);
  if (!sampling.ok()) return;
  *spec.mutable_sampling() = *sampling;
  // What the router lets through, workers take.
  const auto engine_request = worker::RequestFromProto(spec, Limits());
  BATON_CHECK(engine_request.ok(), "workers refuse: ", engine_request.status().message());
  CheckBounds(*engine_request);
}

void FromStranger(const std::string& bytes) {
  worker::v1::RequestSpec spec;
  if (!spec.ParseFromString(bytes)) return;
  const auto request = worker::RequestFromProto(spec, Limits());
  if (request.ok()) CheckBounds(*request);
}

class NoLink : public kvtransfer::PeerLink {
 public:
  bool Send(worker::v1::PeerMessage message) override { return true; }
  void Close() override {}
};

class Core : public kvtransfer::ReceiverCore {
 public:
  using ReceiverCore::ReceiverCore;

 protected:
  void Wake() override {}
  std::vector<const kvtransfer::PutListener*> listeners() const override { return {}; }
};

class NoLines : public kvtransfer::ReceiverCore::Lines {
 public:
  kvtransfer::DataLine* Find(kvtransfer::SessionId session) override { return nullptr; }
  void Close(kvtransfer::DataLine* line) override {}
};

// Messages with a length byte before each.
void FromPeer(const std::string& bytes) {
  kvtransfer::ReceiverOptions options;
  options.layout = {.num_layers = 2,
                    .num_kv_heads = 1,
                    .head_dim = 4,
                    .num_blocks = 4,
                    .format = kv::KvFormat::kFp8};
  options.incarnation = "decode";
  options.fingerprint.set_tp(1);
  options.random_id = [] { return uint64_t{7}; };
  int ended = 0;
  Core core(options, [&ended](const kvtransfer::ReceiverEvent&) { ++ended; });
  kvtransfer::Reservation reservation;
  reservation.prompt_tokens = 40;
  reservation.blocks = {2};
  core.Reserve(std::move(reservation));
  NoLink link;
  worker::v1::Hello hello;
  hello.set_role("prefill");
  *hello.mutable_fingerprint() = options.fingerprint;
  kvtransfer::SessionId session = 0;
  BATON_CHECK(core.OnPeerHello(hello, &link, &session).status().ok());
  for (size_t at = 0; at < bytes.size();) {
    const size_t size = static_cast<uint8_t>(bytes[at]);
    worker::v1::PeerMessage message;
    if (message.ParseFromString(bytes.substr(at + 1, size))) {
      if (message.has_hello()) {
        kvtransfer::SessionId other = 0;
        if (core.OnPeerHello(message.hello(), &link, &other).ok()) core.OnPeerGone(other);
      }
      core.OnMessage(session, message);
    }
    at += 1 + size;
  }
  core.OnPeerGone(session);
  NoLines lines;
  core.EndSessions(&lines);
  core.FailAll(absl::UnavailableError("end"));
  BATON_CHECK(ended == 1, "events=", ended);  // no message lands or ends it twice
}

}  // namespace
}  // namespace baton

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // Text that is not UTF-8 is refused with a line of the library's, which says nothing new here.
  static auto* const old_handler = google::protobuf::SetLogHandler(nullptr);
  (void)old_handler;
  if (size == 0) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      baton::FromClient(bytes);
      break;
    case 1:
      baton::FromStranger(bytes);
      break;
    default:
      baton::FromPeer(bytes);
  }
  return 0;
}
