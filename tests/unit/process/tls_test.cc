#include "engine/process/tls.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "baton/worker/v1/cluster.grpc.pb.h"
#include "engine/process/server_process.h"
#include "engine/process/status_publisher.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "gtest/gtest.h"
#include "tests/support/keep_grpc_running.h"
#include "tests/support/test_certs.h"

namespace baton::process {
namespace {

using test_support::CertAuthority;
using test_support::CertFolder;
using test_support::PemPair;

constexpr char kNames[] = "DNS:localhost,DNS:worker.test,IP:127.0.0.1";

TEST(TlsTest, LoopbackIsWhatNoOtherMachineReaches) {
  for (const char* host : {"localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"})
    EXPECT_TRUE(IsLoopbackHost(host)) << host;
  for (const char* host : {"0.0.0.0", "::", "[::]", "10.0.0.1", "128.0.0.1", "localhost.example",
                           "127.0.0.1.example", "", "worker"})
    EXPECT_FALSE(IsLoopbackHost(host)) << host;
}

TEST(TlsTest, PlaintextBeyondLoopbackWantsItsFlag) {
  TlsServerOptions options;
  EXPECT_TRUE(CheckTls(options, "127.0.0.1:0").ok());
  EXPECT_TRUE(CheckTls(options, "[::1]:0").ok());
  for (const char* listen : {"0.0.0.0:1", "[::]:1", "10.1.2.3:1", "worker:1"}) {
    const absl::Status status = CheckTls(options, listen);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << listen;
    EXPECT_TRUE(absl::StrContains(status.message(), "--allow-plaintext")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "--tls-cert")) << status;
  }
  options.allow_plaintext = true;
  EXPECT_TRUE(CheckTls(options, "0.0.0.0:1").ok());
}

class TlsFilesTest : public testing::Test {
 protected:
  TlsFilesTest() : ca_("test CA"), other_ca_("another CA") {
    Use(ca_.Sign("server", kNames));
    server_.client_ca = folder_.Write("client-ca.pem", ca_.pem());
    client_.ca = folder_.Write("ca.pem", ca_.pem());
    server_.reload_interval = client_.reload_interval = absl::Seconds(1);
  }

  // The server's files from here on.
  void Use(const PemPair& pair) {
    server_.cert = folder_.Write("server.pem", pair.cert);
    server_.key = folder_.Write("server.key", pair.key);
  }
  void UseClient(const PemPair& pair) {
    client_.cert = folder_.Write("client.pem", pair.cert);
    client_.key = folder_.Write("client.key", pair.key);
  }

  void StartServer() {
    ServerOptions options;
    options.handle_signals = false;
    options.http_port = -1;
    options.tls = server_;
    auto started = ServerProcess::Start(options, metrics_.get(), {publisher_.service()});
    ASSERT_TRUE(started.ok()) << started.status();
    process_ = *std::move(started);
  }

  // One call over a new connection.
  grpc::Status Call(const ChannelSecurity& security) {
    const auto stub = worker::v1::Cluster::NewStub(MakeChannel(process_->grpc_address(), security));
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
    worker::v1::WatchStatusRequest request;
    const auto reader = stub->WatchStatus(&context, request);
    worker::v1::WorkerStatus status;
    const bool answered = reader->Read(&status);
    context.TryCancel();
    const grpc::Status end = reader->Finish();
    return answered ? grpc::Status::OK : end;
  }
  grpc::Status Call() { return Call(MakeChannelSecurity(client_)); }

  // Files are looked at once a second.
  bool Becomes(bool ok) {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (absl::Now() < deadline) {
      if (Call().ok() == ok) return true;
      absl::SleepFor(absl::Milliseconds(50));
    }
    return false;
  }

  const CertAuthority ca_, other_ca_;
  const CertFolder folder_;
  TlsServerOptions server_;
  TlsClientOptions client_;
  const std::unique_ptr<base::Metrics> metrics_ =
      base::Metrics::Create(base::Role::kDecode, "test");
  StatusPublisher publisher_{[](worker::v1::WorkerStatus*) {}};
  std::unique_ptr<ServerProcess> process_;
};

TEST_F(TlsFilesTest, BadFilesAreNamedWithTheirFlag) {
  const auto refused = [&](absl::string_view words) {
    const absl::Status status = CheckTls(server_, "0.0.0.0:1");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_TRUE(absl::StrContains(status.message(), words)) << status;
  };
  EXPECT_TRUE(CheckTls(server_, "0.0.0.0:1").ok());
  const TlsServerOptions good = server_;
  server_.key.clear();
  refused("--tls-key: both or neither");
  server_ = good;
  server_.cert = folder_.Write("empty.pem", "");
  refused("--tls-cert");
  server_ = good;
  server_.cert = "/nonexistent/cert.pem";
  refused("/nonexistent/cert.pem: cannot be read");
  server_ = good;
  server_.key = folder_.Write("other.key", ca_.Sign("x", kNames).key);
  refused("is not the key of");
  server_.key = folder_.Write("garbage.key", "-----BEGIN PRIVATE KEY-----\nAAAA\n");
  refused("--tls-key");
  server_ = good;
  server_.client_ca = server_.key;
  refused("--tls-client-ca");
  server_ = good;
  server_.reload_interval = absl::Milliseconds(10);
  refused("--tls-reload-interval");
  server_ = TlsServerOptions{.client_ca = good.client_ca, .allow_plaintext = true};
  refused("--tls-client-ca: needs");
}

TEST_F(TlsFilesTest, BadFilesOfAClientAreNamedWithTheirFlag) {
  EXPECT_TRUE(CheckTls(client_).ok());
  EXPECT_TRUE(CheckTls(TlsClientOptions{}).ok());
  TlsClientOptions options{.server_name = "x"};
  EXPECT_TRUE(absl::StrContains(CheckTls(options).message(), "need --tls-ca"));
  options = client_;
  options.ca = "/nonexistent/ca.pem";
  EXPECT_TRUE(absl::StrContains(CheckTls(options).message(), "--tls-ca"));
  options = client_;
  options.cert = server_.cert;
  EXPECT_TRUE(absl::StrContains(CheckTls(options).message(), "both or neither"));
}

TEST_F(TlsFilesTest, AServerWithBadFilesDoesNotStart) {
  ServerOptions options;
  options.handle_signals = false;
  options.tls = server_;
  options.tls.key = "/nonexistent/key";
  EXPECT_EQ(ServerProcess::Start(options, metrics_.get(), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(TlsFilesTest, WithoutClientCaAClientNeedsNoCertificate) {
  server_.client_ca.clear();
  StartServer();
  EXPECT_TRUE(Call().ok());
  EXPECT_EQ(Call({}).error_code(), grpc::StatusCode::UNAVAILABLE) << "plaintext";
}

TEST_F(TlsFilesTest, MutualTlsWantsACertificateOfItsCa) {
  StartServer();
  EXPECT_FALSE(Call().ok()) << "no certificate";
  UseClient(other_ca_.Sign("client", "DNS:client"));
  EXPECT_FALSE(Call().ok()) << "another CA's";
  UseClient(ca_.Sign("client", "DNS:client", /*days=*/-1));
  EXPECT_FALSE(Call().ok()) << "expired";
  UseClient(ca_.Sign("client", "DNS:client"));
  EXPECT_TRUE(Call().ok());
}

TEST_F(TlsFilesTest, AServerOfAnotherCaOrNameIsNotTalkedTo) {
  server_.client_ca.clear();
  StartServer();
  client_.server_name = "worker.test";
  EXPECT_TRUE(Call().ok());
  client_.server_name = "elsewhere.test";
  EXPECT_FALSE(Call().ok());
  client_.server_name.clear();
  client_.ca = folder_.Write("ca.pem", other_ca_.pem());
  EXPECT_FALSE(Call().ok());
}

TEST_F(TlsFilesTest, ChangedFilesCountForNewConnections) {
  UseClient(ca_.Sign("client", "DNS:client"));
  StartServer();
  ASSERT_TRUE(Call().ok());
  // The server moves to another CA: the clients' roots no longer fit, then they do.
  Use(other_ca_.Sign("server", kNames));
  EXPECT_TRUE(Becomes(false));
  client_.ca = folder_.Write("ca.pem", other_ca_.pem());
  EXPECT_TRUE(Becomes(true));
  // Its clients' CA changes too.
  folder_.Write("client-ca.pem", other_ca_.pem());
  EXPECT_TRUE(Becomes(false));
  UseClient(other_ca_.Sign("client", "DNS:client"));
  EXPECT_TRUE(Becomes(true));
}

// The same credentials all the time, as a process has them.
TEST_F(TlsFilesTest, AClientTakesUpItsOwnChangedFiles) {
  UseClient(other_ca_.Sign("client", "DNS:client"));
  StartServer();
  const ChannelSecurity security = MakeChannelSecurity(client_);
  EXPECT_FALSE(Call(security).ok());
  UseClient(ca_.Sign("client", "DNS:client"));
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  bool ok = false;
  while (!(ok = Call(security).ok()) && absl::Now() < deadline)
    absl::SleepFor(absl::Milliseconds(50));
  EXPECT_TRUE(ok);
}

TEST_F(TlsFilesTest, TheServersOwnProcessNeedsNoCertificate) {
  StartServer();
  const auto stub = worker::v1::Cluster::NewStub(process_->InProcessChannel());
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(10)));
  const auto reader = stub->WatchStatus(&context, worker::v1::WatchStatusRequest());
  worker::v1::WorkerStatus status;
  EXPECT_TRUE(reader->Read(&status));
  context.TryCancel();
  [[maybe_unused]] const grpc::Status end = reader->Finish();
}

}  // namespace
}  // namespace baton::process
