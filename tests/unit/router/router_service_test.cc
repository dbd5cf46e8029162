// The router over real gRPC, with workers that compute nothing: token ids follow from positions.

#include "router/router_service.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "baton/v1/generation.grpc.pb.h"
#include "baton/worker/v1/decode.grpc.pb.h"
#include "baton/worker/v1/prefill.grpc.pb.h"
#include "engine/process/channel.h"
#include "engine/process/grpc_status.h"
#include "engine/process/status_publisher.h"
#include "grpcpp/channel.h"
#include "grpcpp/server_builder.h"
#include "gtest/gtest.h"
#include "router/router.h"
#include "tests/unit/router/router_fakes.h"
#include "tests/support/keep_grpc_running.h"

namespace baton::router {
namespace {

uint32_t IdAt(uint32_t position) { return 20 + position % 40; }

worker::v1::Token TokenAt(uint32_t choice, uint32_t position) {
  worker::v1::Token token;
  token.set_choice(choice);
  token.set_position(position);
  token.set_id(IdAt(position));
  return token;
}

// What both fakes share: counters, and a worker that never answers.
struct Behaviour {
  std::atomic<bool> stall{false};
  std::atomic<int> open_calls{0};
  std::atomic<int> cancelled{0};
};

class OpenCall {
 public:
  explicit OpenCall(Behaviour* behaviour) : behaviour_(behaviour) { ++behaviour_->open_calls; }
  ~OpenCall() { --behaviour_->open_calls; }

 private:
  Behaviour* behaviour_;
};

class NullPrefill : public worker::v1::PrefillWorker::Service {
 public:
  explicit NullPrefill(Behaviour* behaviour) : behaviour_(behaviour) {}
  grpc::Status Prefill(grpc::ServerContext* context,
                       grpc::ServerReaderWriter<worker::v1::PrefillResponse,
                                                worker::v1::PrefillRequest>* stream) override {
    OpenCall open_call(behaviour_);
    worker::v1::PrefillRequest request;
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    const auto spec = request.open().spec();
    worker::v1::PrefillResponse response;
    for (uint32_t choice = 0; choice < spec.sampling().n(); ++choice) {
      *response.mutable_first_tokens()->add_tokens() =
          TokenAt(choice, static_cast<uint32_t>(spec.prompt_ids_size()));
      if (spec.sampling().max_tokens() == 1) {
        auto* finished = response.mutable_first_tokens()->add_finished();
        finished->set_choice(choice);
        finished->set_finish(worker::v1::FINISH_LENGTH);
      }
    }
    stream->Write(response);
    if (request.open().needs_handoff() && !stream->Read(&request)) return grpc::Status::CANCELLED;
    response.mutable_done()->set_transport("shm");
    stream->Write(response);
    return grpc::Status::OK;
  }

 private:
  Behaviour* behaviour_;
};

class NullDecode : public worker::v1::DecodeWorker::Service {
 public:
  explicit NullDecode(Behaviour* behaviour) : behaviour_(behaviour) {}
  grpc::Status Generate(grpc::ServerContext* context,
                        grpc::ServerReaderWriter<worker::v1::DecodeResponse,
                                                 worker::v1::DecodeRequest>* stream) override {
    OpenCall open_call(behaviour_);
    worker::v1::DecodeRequest request;
    if (!stream->Read(&request)) return grpc::Status::CANCELLED;
    worker::v1::DecodeResponse response;
    const bool locally = request.open().prefill_locally();
    if (!locally) {
      response.mutable_reserved()->mutable_handoff()->set_reservation_id(1);
      stream->Write(response);
    }
    if (behaviour_->stall.load()) {
      stream->Read(&request);  // ends when the router cancels
      ++behaviour_->cancelled;
      return grpc::Status::CANCELLED;
    }
    const auto& sampling = request.open().spec().sampling();
    const auto prompt = static_cast<uint32_t>(request.open().spec().prompt_ids_size());
    // Of a prompt that was handed over, the prefill worker has sent the first token.
    for (uint32_t i = locally ? 0 : 1; i < sampling.max_tokens(); ++i) {
      response.mutable_tokens()->Clear();
      for (uint32_t choice = 0; choice < sampling.n(); ++choice) {
        *response.mutable_tokens()->add_tokens() = TokenAt(choice, prompt + i);
        if (i + 1 < sampling.max_tokens()) continue;
        auto* finished = response.mutable_tokens()->add_finished();
        finished->set_choice(choice);
        finished->set_finish(worker::v1::FINISH_LENGTH);
      }
      if (!stream->Write(response)) return grpc::Status::CANCELLED;
    }
    response.mutable_done()->set_steps(sampling.max_tokens());
    stream->Write(response);
    return grpc::Status::OK;
  }

 private:
  Behaviour* behaviour_;
};

class Worker {
 public:
  Worker(const std::string& role, grpc::Service* service, const std::string& tokenizer)
      : publisher_([role, tokenizer](worker::v1::WorkerStatus* out) {
          *out = ReadyStatus(role);
          out->mutable_fingerprint()->set_tokenizer(tokenizer);
        }) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(service);
    builder.RegisterService(publisher_.service());
    server_ = builder.BuildAndStart();
  }
  ~Worker() { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  process::StatusPublisher publisher_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class RouterServiceTest : public testing::Test {
 protected:
  static std::string ChainModel() {
    return std::string(BATON_SOURCE_DIR) + "/tests/data/models/chain";
  }
  static std::string TokenizerFingerprint() {
    static const std::string fingerprint =
        text::Tokenizer::Load(ChainModel()).value()->fingerprint();
    return fingerprint;
  }

  void SetUp() override {
    RouterOptions options;
    options.model = ChainModel();
    options.listen = "127.0.0.1:0";
    options.http_port = -1;
    options.prefill = prefill_.address();
    options.decode = decode_.address();
    options.request_timeout_max = absl::Seconds(30);
    auto router = Router::Start(options, /*handle_signals=*/false);
    ASSERT_TRUE(router.ok()) << router.status();
    router_ = *std::move(router);
    channel_ = process::MakeChannel(router_->server().grpc_address());
    stub_ = v1::Generation::NewStub(channel_);
    WaitFor([&] { return router_->server().ready(); });
  }

  // Things happen on other threads; how long that takes is the machine's business.
  static void WaitFor(const std::function<bool()>& condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (!condition() && absl::Now() < deadline) std::this_thread::yield();
    EXPECT_TRUE(condition());
  }

  static v1::GenerateRequest Request(uint32_t max_tokens, uint32_t n = 1) {
    v1::GenerateRequest request;
    for (uint32_t id : {5, 6, 7}) request.mutable_token_ids()->add_ids(id);
    request.mutable_sampling()->set_max_tokens(max_tokens);
    request.mutable_sampling()->set_n(n);
    request.mutable_sampling()->set_ignore_eos(true);
    return request;
  }

  struct Answer {
    std::vector<std::vector<uint32_t>> ids;
    absl::Status status;
    int with_usage = 0;
    int finished = 0;
  };
  Answer Stream(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    auto reader = stub_->Generate(&context, request);
    Answer answer;
    answer.ids.resize(request.sampling().n());
    v1::GenerateResponse message;
    while (reader->Read(&message)) {
      auto& ids = answer.ids[message.index()];
      ids.insert(ids.end(), message.token_ids().begin(), message.token_ids().end());
      EXPECT_EQ(message.completion_tokens(), ids.size());
      answer.finished += message.has_finished();
      answer.with_usage += message.finished().has_usage();
    }
    answer.status = process::FromGrpcStatus(reader->Finish());
    return answer;
  }
  static std::vector<uint32_t> Expected(uint32_t max_tokens) {
    std::vector<uint32_t> ids;
    for (uint32_t i = 0; i < max_tokens; ++i) ids.push_back(IdAt(3 + i));
    return ids;
  }

  Behaviour behaviour_;
  NullPrefill prefill_service_{&behaviour_};
  NullDecode decode_service_{&behaviour_};
  Worker prefill_{"prefill", &prefill_service_, TokenizerFingerprint()};
  Worker decode_{"decode", &decode_service_, TokenizerFingerprint()};
  std::unique_ptr<Router> router_;
  std::shared_ptr<grpc::Channel> channel_;  // gRPC's channels are shared by their stubs
  std::unique_ptr<v1::Generation::Stub> stub_;
};

TEST_F(RouterServiceTest, StreamHasEveryTokenOnceInOrder) {
  for (uint32_t max_tokens : {1u, 2u, 3u, 200u}) {
    const Answer answer = Stream(Request(max_tokens, 2));
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_EQ(answer.ids[0], Expected(max_tokens));
    EXPECT_EQ(answer.ids[1], Expected(max_tokens));
    EXPECT_EQ(answer.finished, 2);
    EXPECT_EQ(answer.with_usage, 1);
  }
}

TEST_F(RouterServiceTest, ManyStreamsAtATimeKeepTheirOrder) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10; ++i) {
        const Answer answer = Stream(Request(60));
        if (!answer.status.ok() || answer.ids[0] != Expected(60)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  WaitFor([&] { return behaviour_.open_calls == 0; });
  EXPECT_EQ(router_->metrics().gauge(base::GaugeId::kRouterRequestsInFlight).value(), 0);
  EXPECT_EQ(router_->metrics()
                .counter(base::CounterId::kRouterRequests, {"grpc", "generate", "OK"})
                .value(),
            80);
}

TEST_F(RouterServiceTest, UnaryIsTheSameAnswer) {
  grpc::ClientContext context;
  context.AddMetadata("x-request-id", "mine-7");
  v1::GenerateUnaryResponse response;
  v1::GenerateRequest request = Request(20, 2);
  request.set_request_label("night run");
  const grpc::Status status = stub_->GenerateUnary(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(response.choices_size(), 2);
  EXPECT_EQ(std::vector<uint32_t>(response.choices(1).token_ids().begin(),
                                  response.choices(1).token_ids().end()),
            Expected(20));
  EXPECT_EQ(response.usage().completion_tokens(), 40u);
  EXPECT_EQ(response.choices(0).finished().reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_FALSE(response.choices(0).finished().has_usage());
  // Case 15.3: measured for unary calls too.
  EXPECT_GT(response.timings().ttft_s(), 0);
  EXPECT_LT(response.timings().ttft_s(), response.timings().e2e_s());
  EXPECT_EQ(response.timings().kv_transport(), "shm");
  const auto id = context.GetServerInitialMetadata().find("x-request-id");
  ASSERT_NE(id, context.GetServerInitialMetadata().end());
  EXPECT_EQ(std::string(id->second.data(), id->second.size()), "mine-7");
  EXPECT_EQ(context.GetServerInitialMetadata().count("x-request-label"), 1u);
  EXPECT_TRUE(absl::StartsWith(response.request_id(), "req-")) << "the server's own id is another";
}

TEST_F(RouterServiceTest, CancelReachesTheWorkers) {
  behaviour_.stall = true;
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request(50));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message)) << "the first token does not wait for decode";
  context.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  WaitFor([&] { return behaviour_.cancelled == 1 && behaviour_.open_calls == 0; });
  const auto count = [&] {
    return router_->metrics()
        .counter(base::CounterId::kRouterRequests, {"grpc", "generate", "CANCELLED"})
        .value();
  };
  WaitFor([&] { return count() == 1; });
}

TEST_F(RouterServiceTest, DeadlineReachesTheWorkersAndIsCountedAsSuch) {
  behaviour_.stall = true;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  auto reader = stub_->Generate(&context, Request(50));
  v1::GenerateResponse message;
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  const auto count = [&] {
    return router_->metrics()
        .counter(base::CounterId::kRouterRequests, {"grpc", "generate", "DEADLINE_EXCEEDED"})
        .value();
  };
  WaitFor([&] { return behaviour_.open_calls == 0 && count() == 1; });
}

TEST_F(RouterServiceTest, OtherModelIsNotFound) {
  v1::GenerateRequest request = Request(3);
  request.set_model("gpt-17");
  const Answer answer = Stream(request);
  EXPECT_TRUE(absl::IsNotFound(answer.status));
  EXPECT_TRUE(absl::StrContains(answer.status.message(), "gpt-17"));
  request.set_model("chain");
  EXPECT_TRUE(Stream(request).status.ok());
}

TEST_F(RouterServiceTest, BadFieldIsNamedInTheDetails) {
  v1::GenerateRequest request = Request(3);
  request.mutable_sampling()->set_top_p(7);
  const absl::Status status = Stream(request).status;
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  ASSERT_EQ(process::FieldViolations(status).size(), 1u);
  EXPECT_EQ(process::FieldViolations(status)[0].field, "sampling.top_p");
}

TEST_F(RouterServiceTest, TokenizeAndDetokenizeAreInverse) {
  v1::TokenizeRequest request;
  request.set_text("abc - bread");
  v1::TokenizeResponse tokens;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->Tokenize(&context, request, &tokens).ok());
  v1::DetokenizeRequest back;
  *back.mutable_ids() = tokens.ids();
  v1::DetokenizeResponse text;
  grpc::ClientContext again;
  ASSERT_TRUE(stub_->Detokenize(&again, back, &text).ok());
  EXPECT_EQ(text.text(), request.text());
  back.add_ids(1u << 30);
  grpc::ClientContext bad;
  EXPECT_EQ(stub_->Detokenize(&bad, back, &text).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(RouterServiceTest, ModelAndStatusAreShown) {
  v1::GetModelInfoResponse info;
  grpc::ClientContext a;
  ASSERT_TRUE(stub_->GetModelInfo(&a, {}, &info).ok());
  EXPECT_EQ(info.name(), "chain");
  EXPECT_EQ(info.max_model_len(), 1024u);
  EXPECT_EQ(info.kv_dtype(), "fp8");
  EXPECT_GE(info.eos_token_ids_size(), 2);
  EXPECT_EQ(info.defaults().n(), 1u);
  v1::ListModelsResponse models;
  grpc::ClientContext b;
  ASSERT_TRUE(stub_->ListModels(&b, {}, &models).ok());
  EXPECT_EQ(models.names_size(), 1);
  v1::GetStatusResponse status;
  grpc::ClientContext c;
  ASSERT_TRUE(stub_->GetStatus(&c, {}, &status).ok());
  EXPECT_TRUE(status.serving());
  ASSERT_EQ(status.workers_size(), 2);
  EXPECT_EQ(status.workers(0).role(), "prefill");
  EXPECT_EQ(status.workers(0).state(), "ready");
  EXPECT_EQ(status.workers(1).kv_blocks_total(), 100u);
}

// Case 16.2: new calls are refused, running ones finish.
TEST_F(RouterServiceTest, DrainLetsRunningCallsFinishAndRefusesNewOnes) {
  behaviour_.stall = true;
  grpc::ClientContext context;
  auto reader = stub_->Generate(&context, Request(50));
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  router_->server().RequestTermination();
  std::thread drain([&] { router_->RunUntilTerminated(); });
  const absl::Status refused = Stream(Request(3)).status;
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  WaitFor([&] { return !router_->server().ready(); });
  WaitFor([&] { return router_->server().calls_in_flight() == 1; });  // the refused one is gone
  context.TryCancel();
  reader->Finish();
  drain.join();
  EXPECT_EQ(behaviour_.cancelled, 1);
}

}  // namespace
}  // namespace baton::router
