#pragma once

// The states of one request: wait for a place, encode, reserve and prefill, decode, finish; and
// what happens when a worker fails on the way. Knows workers and client through small interfaces
// only.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "baton/v1/generation.pb.h"

#include "engine/base/clock.h"
#include "router/admission.h"
#include "router/answer_text.h"
#include "router/call_times.h"
#include "router/legs.h"
#include "router/model_facts.h"
#include "router/prompt_encoder.h"
#include "router/request_report.h"
#include "router/route_policy.h"
#include "router/strand.h"
#include "router/timers.h"
#include "router/trace_context.h"
#include "router/worker_table.h"

namespace baton::router {

// Where the answer goes. Thread-safe; calls return at once.
class ClientSink {
 public:
  virtual ~ClientSink() = default;
  // Errors: CANCELLED when the client is gone, RESOURCE_EXHAUSTED when it reads so slowly that too
  // much waits.
  virtual absl::Status Write(v1::GenerateResponse response) = 0;
  // Metadata that goes with the end. Before Finish.
  virtual void AddTrailer(const std::string& key, const std::string& value) {}
  // Exactly once, last.
  virtual void Finish(const absl::Status& status) = 0;
};

// What all calls of a router share; everything outlives every call.
struct CallDeps {
  const ModelFacts* facts = nullptr;
  WorkerTable* table = nullptr;
  const RoutePolicy* policy = nullptr;
  LegFactory* legs = nullptr;
  PromptEncoder* encoder = nullptr;
  Admission* admission = nullptr;
  Timers* timers = nullptr;
  const base::Clock* clock = nullptr;
  const RouterMetrics* metrics = nullptr;
  std::function<uint64_t()> draw_seed;
  Topology topology = Topology::kPd;
  uint32_t max_model_len = 0;  // the operator's; 0: what the workers take
  int max_retries = 2;         // after failures of workers
  absl::Duration capacity_wait =
      absl::Milliseconds(20);  // before asking a full decode worker again
  absl::Duration done_grace =
      absl::Milliseconds(100);  // for figures of the prefill side, after the last token
  std::function<void(const RequestReport&)> on_end;  // of every request; null: nobody asks
};

struct CallRequest {
  std::shared_ptr<const v1::GenerateRequest> request;  // shared with the encoder's thread
  std::string request_id;
  std::string method;       // generate, generate_unary: a label of metrics
  absl::Duration received;  // times of the clock
  absl::Duration deadline;
  TraceContext trace;
};

// Thread-safe. Shared, because workers' events may arrive after the client has gone: each open leg
// holds it.
class GenerateCall : public std::enable_shared_from_this<GenerateCall> {
 public:
  // `sink` is used until its Finish.
  GenerateCall(const CallDeps& deps, CallRequest request, std::unique_ptr<ClientSink> sink);
  ~GenerateCall();

  // Once. Refuses with `refusal` where it is no OK (draining, another model).
  void Start(absl::Status refusal, absl::string_view refusal_reason);
  // The client has gone: CANCELLED, or DEADLINE_EXCEEDED when that was why. No call of the sink
  // follows but Finish.
  void OnClientCancel(absl::Status status);

 private:
  // One try at the request on one pair.
  struct Attempt;

  void Begin(const absl::Status& refusal, absl::string_view refusal_reason);
  void OnAdmitted(const absl::Status& status);
  void OnEncoded(absl::StatusOr<EncodedPrompt> prompt);
  absl::Status Prepare(EncodedPrompt prompt);

  // Chooses workers and opens the legs.
  void Dispatch();
  absl::StatusOr<Route> ChooseRoute(const RouteRequest& request);
  void OpenDecode(bool locally);
  void OpenPrefill();
  worker::v1::RequestSpec MakeSpec() const;
  uint32_t prompt_tokens() const { return static_cast<uint32_t>(prompt_ids_.size()); }
  uint32_t sent_tokens() const;

  // Events of attempt number `attempt`; those of earlier ones are dropped.
  void OnPrefillMessage(uint32_t attempt, worker::v1::PrefillResponse message);
  void OnPrefillEnd(uint32_t attempt, const absl::Status& status);
  void OnDecodeMessage(uint32_t attempt, worker::v1::DecodeResponse message);
  void OnDecodeEnd(uint32_t attempt, const absl::Status& status);
  void OnReserved(worker::v1::DecodeResponse::Reserved reserved);
  bool IsCurrent(uint32_t attempt) const;

  // The first tokens, once they may go to the client, and what the decode worker said meanwhile.
  void DeliverFirst();
  void Deliver(const google::protobuf::RepeatedPtrField<worker::v1::Token>& tokens,
               const google::protobuf::RepeatedPtrField<worker::v1::ChoiceFinished>& finished,
               bool from_decode);
  bool Accept(const worker::v1::Token& token);
  void Emit();
  bool AllFinished() const;
  void NoteToken(uint32_t choice);
  // Ends the call if nothing more is to come.
  void MaybeComplete();
  void Complete();

  // A leg failed: try again, wait, or end.
  void OnLegFailed(const absl::Status& status, std::string address);
  void WaitForCapacity();
  absl::Status LostStatus(const absl::Status& cause) const;
  void DropAttempt();

  void Reject(const absl::Status& status, absl::string_view reason);
  // The one terminal event.
  void End(const absl::Status& status);
  v1::Timings MakeTimings() const;
  // Log line, trailer and whoever asked for reports.
  void Report(const absl::Status& status);

  const CallDeps deps_;
  const CallRequest request_;
  const std::unique_ptr<ClientSink> sink_;
  Strand strand_;

  // Touched by events of the strand only.
  bool ended_ = false;
  bool has_place_ = false;
  std::optional<Admission::Id> waiting_;
  std::optional<Timers::Id> timer_;
  std::vector<uint32_t> prompt_ids_;
  worker::v1::Sampling sampling_;
  std::vector<AnswerText> answers_;
  std::vector<absl::Duration> last_token_;            // of each answer; zero: none yet
  std::optional<v1::GenerateResponse> last_message_;  // held until usage and timings are known
  std::unique_ptr<Attempt> attempt_;
  uint32_t num_attempts_ = 0;
  int num_failures_ = 0;
  std::vector<std::string> excluded_;
  absl::Status last_failure_;
  uint32_t cached_prompt_tokens_ = 0;
  CallTimes times_;
};

}  // namespace baton::router
