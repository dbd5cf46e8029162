// Control sessions between a prefill and a decode worker over real gRPC, with the real hand-over
// behind them.

#include <future>
#include <memory>
#include <string>

#include <grpcpp/grpcpp.h>

#include "gtest/gtest.h"

#include "decode_worker/peer_service.h"
#include "kvtransfer/receiver.h"
#include "prefill_worker/peer_client.h"
#include "tests/support/fake_runner.h"
#include "tests/support/keep_grpc_running.h"
#include "tests/support/test_fingerprint.h"

namespace baton {
namespace {

using Found = absl::StatusOr<std::shared_ptr<kvtransfer::Sender>>;

// The part of a decode worker that peers see.
class DecodeSide {
 public:
  DecodeSide(const std::string& incarnation,
             int port,
             worker::v1::LayoutFingerprint fingerprint,
             bool loading = false)
      : runner_(8) {
    kvtransfer::ReceiverOptions options;
    options.pool = &runner_.kv_pool();
    options.layout = runner_.layout();
    options.fingerprint = testing::TestFingerprint(runner_.layout());
    options.incarnation = incarnation;
    options.transports = {"shm", "tcp"};
    options.fingerprint = std::move(fingerprint);
    absl::StatusOr<std::unique_ptr<kvtransfer::Receiver>> receiver =
        kvtransfer::Receiver::Create(options, [](kvtransfer::ReceiverEvent) {});
    BATON_CHECK(receiver.ok(), "receiver: ", receiver.status().ToString());
    receiver_ = *std::move(receiver);
    if (!loading) service_.SetReceiver(receiver_.get());
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:" + std::to_string(port), grpc::InsecureServerCredentials(),
                             &port_);
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.RegisterService(service_.service());
    server_ = builder.BuildAndStart();
    BATON_CHECK(server_ != nullptr);
  }
  ~DecodeSide() { server_->Shutdown(std::chrono::system_clock::now()); }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  int port() const { return port_; }
  size_t num_peers() const { return receiver_->peers().size(); }

 private:
  testing::FakeRunner runner_;
  std::unique_ptr<kvtransfer::Receiver> receiver_;
  decode::PeerService service_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

class PeerSessionTest : public ::testing::Test {
 protected:
  PeerSessionTest() : runner_(8) {
    prefill::PeerClientOptions options;
    options.sender.pool = &runner_.kv_pool();
    options.sender.layout = runner_.layout();
    options.sender.hello.set_incarnation("prefill-prefill-");
    options.sender.hello.set_role("prefill");
    *options.sender.hello.mutable_fingerprint() = testing::TestFingerprint(runner_.layout());
    options.hello_timeout = absl::Seconds(2);
    client_ = std::make_unique<prefill::PeerClient>(options);
  }

  worker::v1::LayoutFingerprint Equal() { return testing::TestFingerprint(runner_.layout()); }
  Found Connect(const std::string& address, const std::string& incarnation) {
    auto promise = std::make_shared<std::promise<Found>>();
    client_->Connect(address, incarnation,
                     [promise](Found found) { promise->set_value(std::move(found)); });
    return promise->get_future().get();
  }

  testing::FakeRunner runner_;
  std::unique_ptr<prefill::PeerClient> client_;
};

constexpr char kFirst[] = "decode-worker-01";
constexpr char kSecond[] = "decode-worker-02";

TEST_F(PeerSessionTest, OneSessionServesEveryRequest) {
  DecodeSide decode(kFirst, 0, Equal());
  const Found first = Connect(decode.address(), kFirst);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ((*first)->transport_name(), "shm");
  const Found again = Connect(decode.address(), kFirst);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*first, *again);
  EXPECT_EQ(decode.num_peers(), 1u);
  ASSERT_EQ(client_->peers().size(), 1u);
  EXPECT_EQ(client_->peers()[0].address, decode.address());
}

// Case 11.4: one test per field; the refusal names it.
TEST_F(PeerSessionTest, PairsThatDifferAreRefusedByName) {
  const auto refuse = [&](auto change, const std::string& field) {
    worker::v1::LayoutFingerprint fingerprint = Equal();
    change(&fingerprint);
    DecodeSide decode(kFirst, 0, fingerprint);
    const Found found = Connect(decode.address(), kFirst);
    EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition) << field;
    EXPECT_NE(found.status().message().find(field), std::string::npos) << found.status();
  };
  using F = worker::v1::LayoutFingerprint;
  refuse([](F* f) { f->set_model("other"); }, "model");
  refuse([](F* f) { f->set_tokenizer("other"); }, "tokenizer");
  refuse([](F* f) { f->set_weight_dtype("f32"); }, "weight_dtype");
  refuse([](F* f) { f->set_activation_dtype("f32"); }, "activation_dtype");
  refuse([](F* f) { f->set_sum_order_version(2); }, "sum_order_version");
  refuse([](F* f) { f->set_kv_scales("other"); }, "kv_scales");
  refuse([](F* f) { f->set_rope("other"); }, "rope");
}

// Case 11.6: a worker that has restarted on the same address is found at once, its predecessor is
// not asked for.
TEST_F(PeerSessionTest, RestartedWorkerIsMetAnew) {
  auto decode = std::make_unique<DecodeSide>(kFirst, 0, Equal());
  const int port = decode->port();
  const std::string address = decode->address();
  ASSERT_TRUE(Connect(address, kFirst).ok());
  decode.reset();
  decode = std::make_unique<DecodeSide>(kSecond, port, Equal());
  const Found found = Connect(address, kSecond);
  ASSERT_TRUE(found.ok()) << found.status();
  // A request for the predecessor does not end the session with the successor.
  const Found late = Connect(address, kFirst);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(late.status().message().find("another instance"), std::string::npos);
  const Found again = Connect(address, kSecond);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, *found);
}

TEST_F(PeerSessionTest, NobodyThereIsABoundedWait) {
  std::string address;
  {
    DecodeSide gone(kFirst, 0, Equal());
    address = gone.address();
  }
  EXPECT_EQ(Connect(address, kFirst).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PeerSessionTest, LoadingWorkerIsUnavailable) {
  DecodeSide decode(kFirst, 0, Equal(), /*loading=*/true);
  EXPECT_EQ(Connect(decode.address(), kFirst).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(PeerSessionTest, ShutdownEndsSessionsAndRefusesNewOnes) {
  DecodeSide decode(kFirst, 0, Equal());
  ASSERT_TRUE(Connect(decode.address(), kFirst).ok());
  client_->Shutdown();
  EXPECT_TRUE(client_->peers().empty());
  EXPECT_EQ(Connect(decode.address(), kFirst).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace baton
