#pragma once

// A router without gRPC: two prefill workers, two decode workers, the chain model's tokenizer.

#include <memory>
#include <string>
#include <vector>

#include "engine/base/metrics.h"
#include "gtest/gtest.h"
#include "router/generate_call.h"
#include "tests/unit/router/router_fakes.h"

namespace baton::router {

class GenerateCallFixture : public testing::Test {
 protected:
  static const ModelFacts& Facts() {
    static const ModelFacts* const facts = [] {
      auto loaded =
          LoadModelFacts(std::string(BATON_SOURCE_DIR) + "/tests/data/models/chain", "model", "");
      EXPECT_TRUE(loaded.ok()) << loaded.status();
      return new ModelFacts(*std::move(loaded));
    }();
    return *facts;
  }
  static uint32_t Id(const std::string& text) { return Facts().tokenizer->FindToken(text).value(); }

  explicit GenerateCallFixture(Topology topology = Topology::kPd) : topology_(topology) {
    deps_ = {.facts = &Facts(),
             .table = &table_,
             .legs = &legs_,
             .encoder = &encoder_,
             .admission = &admission_,
             .timers = &timers_,
             .clock = &clock_,
             .metrics = &metrics_,
             .draw_seed = [] { return uint64_t{77}; },
             .topology = topology};
    clock_.Advance(absl::Seconds(100));
    table_.set_on_capacity([this] { admission_.Pump(); });
    for (const char* p : {"p1", "p2"}) table_.OnStatus(p, ReadyStatus("prefill"));
    for (const char* d : {"d1", "d2"}) table_.OnStatus(d, ReadyStatus("decode"));
  }

  // The leak rule: nothing that a request held is held any more.
  void TearDown() override {
    legs_.EndCancelled();
    for (const auto& leg : legs_.prefills) leg->End(absl::OkStatus());
    for (const auto& leg : legs_.decodes) leg->End(absl::OkStatus());
    EXPECT_EQ(admission_.num_running(), 0);
    EXPECT_EQ(admission_.num_waiting(), 0);
    EXPECT_EQ(metrics_.in_flight.value(), 0);
    EXPECT_EQ(timers_.num_waiting(), 0u);
    for (const WorkerView& view : table_.Snapshot())
      EXPECT_EQ(view.load_tokens, 0u) << view.address;
  }

  static v1::GenerateRequest Request(std::vector<uint32_t> ids = {5, 6, 7}) {
    v1::GenerateRequest request;
    request.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
    request.mutable_sampling()->set_max_tokens(10);
    return request;
  }

  struct Running {
    std::shared_ptr<GenerateCall> call;
    std::shared_ptr<Received> received = std::make_shared<Received>();
  };
  Running Start(const v1::GenerateRequest& request,
                absl::Duration timeout = absl::Seconds(30),
                const std::string& method = "generate") {
    Running running;
    CallRequest call_request{std::make_shared<v1::GenerateRequest>(request), "req-1", method,
                             clock_.Now(), clock_.Now() + timeout};
    running.call = std::make_shared<GenerateCall>(deps_, std::move(call_request),
                                                  std::make_unique<FakeSink>(running.received));
    running.call->Start(absl::OkStatus(), "");
    return running;
  }

  // What workers say. Positions are absolute.
  static worker::v1::Token Token(uint32_t choice, uint32_t position, uint32_t id) {
    worker::v1::Token token;
    token.set_choice(choice);
    token.set_position(position);
    token.set_id(id);
    return token;
  }
  static worker::v1::ChoiceFinished Length(uint32_t choice) {
    worker::v1::ChoiceFinished finished;
    finished.set_choice(choice);
    finished.set_finish(worker::v1::FINISH_LENGTH);
    return finished;
  }
  static worker::v1::PrefillResponse First(std::vector<worker::v1::Token> tokens,
                                           std::vector<worker::v1::ChoiceFinished> finished = {}) {
    worker::v1::PrefillResponse response;
    auto* first = response.mutable_first_tokens();
    for (auto& token : tokens) *first->add_tokens() = token;
    for (auto& end : finished) *first->add_finished() = end;
    first->set_cached_prompt_tokens(2);
    return response;
  }
  static worker::v1::PrefillResponse PrefillDone() {
    worker::v1::PrefillResponse response;
    response.mutable_done()->set_kv_bytes(640);
    response.mutable_done()->set_transport("shm");
    return response;
  }
  static worker::v1::DecodeResponse Reserved() {
    worker::v1::DecodeResponse response;
    response.mutable_reserved()->mutable_handoff()->set_reservation_id(9);
    response.mutable_reserved()->add_block_table(4);
    return response;
  }
  static worker::v1::DecodeResponse Tokens(std::vector<worker::v1::Token> tokens,
                                           std::vector<worker::v1::ChoiceFinished> finished = {}) {
    worker::v1::DecodeResponse response;
    for (auto& token : tokens) *response.mutable_tokens()->add_tokens() = token;
    for (auto& end : finished) *response.mutable_tokens()->add_finished() = end;
    return response;
  }
  static worker::v1::DecodeResponse DecodeDone() {
    worker::v1::DecodeResponse response;
    response.mutable_done()->set_steps(2);
    response.mutable_done()->set_kv_bytes(640);
    response.mutable_done()->set_kv_transport("shm");
    return response;
  }

  double Outcomes(const std::string& code) {
    return store_->counter(base::CounterId::kRouterRequests, {"grpc", "generate", code}).value();
  }
  double Rejected(const std::string& reason) {
    return store_->counter(base::CounterId::kRouterRejected, reason).value();
  }

  const Topology topology_;
  base::FakeClock clock_;
  ManualTimers timers_{&clock_};
  std::unique_ptr<base::Metrics> store_ = base::Metrics::Create(base::Role::kRouter, "model");
  RouterMetrics metrics_{store_.get()};
  WorkerTable table_{{.topology = topology_,
                      .prefill = topology_ == Topology::kPd ? std::vector<std::string>{"p1", "p2"}
                                                            : std::vector<std::string>{},
                      .decode = {"d1", "d2"},
                      .clock = &clock_}};
  // By load alone, so that a test knows which worker comes first and who computes the prompt.
  std::unique_ptr<RoutePolicy> policy_ =
      *MakeRoutePolicy("least_load", {.local_prefill_tokens = 0});
  FakeLegs legs_;
  InlineEncoder encoder_{&Facts()};
  Admission admission_{
      {.max_running = 2, .max_queue = 2}, policy_.get(), &table_, &timers_, &clock_};
  CallDeps deps_;
};

}  // namespace baton::router
