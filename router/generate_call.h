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
#include "router/blame.h"
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

// What a refused client is told to wait for where nothing better is known.
inline constexpr absl::Duration kRetryDelay = absl::Seconds(1);

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
  LegFactory* legs = nullptr;
  PromptEncoder* encoder = nullptr;
  Admission* admission = nullptr;
  Timers* timers = nullptr;
  const base::Clock* clock = nullptr;
  const RouterMetrics* metrics = nullptr;
  std::function<uint64_t()> draw_seed;
  Topology topology = Topology::kPd;
  uint32_t max_model_len = 0;  // the operator's; 0: what the workers take
  int max_retries = 2;         // after failures of workers, of each choice
  // A first token predicted for later than this after the request's arrival: refused.
  absl::Duration ttft_max = absl::InfiniteDuration();
  // Objectives that finished requests are counted by; infinite: not counted.
  absl::Duration slo_ttft = absl::InfiniteDuration();
  absl::Duration slo_tpot = absl::InfiniteDuration();
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
  std::string tenant;  // who shares fairly with whom
  // Who shares cached prefixes with whom, instead of the request's own salt.
  std::optional<std::string> cache_salt;
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
  struct Attempt;

  void Begin(const absl::Status& refusal, absl::string_view refusal_reason);
  void OnEncoded(absl::StatusOr<EncodedPrompt> prompt);
  absl::Status Prepare(EncodedPrompt prompt);

  // Asks for workers, and opens the legs when they have room.
  void Submit(std::unique_ptr<Attempt> attempt);
  AdmissionRequest MakeAdmission(const Attempt& attempt) const;
  void OnPlaced(uint32_t id, bool takes_place, absl::StatusOr<Placement> placement);
  void OnNotPlaced(const Attempt& attempt, const absl::Status& status);
  void Dispatch(Attempt* attempt);
  void OpenDecode(Attempt* attempt);
  void OpenPrefill(Attempt* attempt);
  worker::v1::RequestSpec MakeSpec(const Attempt& attempt) const;
  const std::string& cache_salt() const {
    return request_.cache_salt.has_value() ? *request_.cache_salt : request_.request->cache_salt();
  }
  uint32_t prompt_tokens() const { return static_cast<uint32_t>(prompt_ids_.size()); }
  uint32_t sent_tokens() const;
  uint32_t sent_tokens(const Attempt& attempt) const;

  // Events of one attempt; those of attempts that are gone are dropped.
  Attempt* Find(uint32_t id);
  void OnPrefillMessage(uint32_t id, worker::v1::PrefillResponse message);
  void OnPrefillEnd(uint32_t id, const absl::Status& status);
  void OnDecodeMessage(uint32_t id, worker::v1::DecodeResponse message);
  void OnDecodeEnd(uint32_t id, const absl::Status& status);
  void OnReserved(Attempt* attempt, worker::v1::DecodeResponse::Reserved reserved);
  void OnDecodeDone(Attempt* attempt, worker::v1::DecodeResponse::Done done);
  void OnFirstTokens(Attempt* attempt, worker::v1::PrefillResponse::FirstTokens first);

  // The first tokens, once they may go to the client, and what the decode worker said meanwhile.
  void DeliverFirst(uint32_t id);
  void Deliver(uint32_t id,
               const google::protobuf::RepeatedPtrField<worker::v1::Token>& tokens,
               const google::protobuf::RepeatedPtrField<worker::v1::ChoiceFinished>& finished,
               bool from_decode);
  bool Accept(const Attempt& attempt, const worker::v1::Token& token);
  void Emit();
  bool AllFinished() const;
  bool AllFinished(const Attempt& attempt) const;
  void NoteToken(uint32_t choice);
  void NoteFirstComputed(const Attempt& attempt);
  // A worker's message that arrived then has been dealt with.
  void NoteForwarded(absl::Duration arrived);
  // Ends the call if nothing more is to come.
  void MaybeComplete();
  bool DecodeKnowsTheEnd(const Attempt& attempt) const;
  bool WaitsForFigures(Attempt* attempt);
  void Complete();

  // The decode worker says that the prefill worker let go of the hand-over, which that one also
  // does when the answer is over with its first tokens: then they are on their way here.
  void AwaitFirstTokens(Attempt* attempt, const absl::Status& decode_failure);
  void OnAwaited(uint32_t id);
  // A leg failed: try again, wait, or end.
  void OnLegFailed(Attempt* attempt, Leg leg, const absl::Status& status);
  void Resubmit(const Attempt& old);
  absl::Status LostStatus(const absl::Status& cause) const;
  // Takes the attempt out of the list, ends its legs, and tells the table how its workers did.
  std::unique_ptr<Attempt> Drop(uint32_t id, Verdict prefill, Verdict decode);

  void Reject(const absl::Status& status, absl::string_view reason);
  // The one terminal event.
  void End(const absl::Status& status);
  v1::Timings MakeTimings() const;
  // Log line, trailer and whoever asked for reports.
  void Report(const absl::Status& status);
  void CountSlo() const;

  const CallDeps deps_;
  const CallRequest request_;
  const std::unique_ptr<ClientSink> sink_;
  Strand strand_;

  // Touched by events of the strand only.
  bool ended_ = false;
  bool has_place_ = false;
  std::optional<Timers::Id> timer_;
  std::vector<uint32_t> prompt_ids_;
  std::vector<BlockKey> prompt_keys_;  // of its full blocks
  worker::v1::Sampling sampling_;
  std::vector<AnswerText> answers_;
  std::vector<absl::Duration> last_token_;            // of each answer; zero: none yet
  std::optional<v1::GenerateResponse> last_message_;  // held until usage and timings are known
  std::vector<std::unique_ptr<Attempt>> attempts_;    // each choice that goes on is in one
  Route last_route_;                                  // of the newest attempt that was sent
  uint32_t next_attempt_ = 1;
  uint32_t num_attempts_ = 0;
  absl::Status last_failure_;
  uint32_t cached_prompt_tokens_ = 0;
  CallTimes times_;
};

}  // namespace baton::router
