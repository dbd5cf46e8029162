#include "engine/process/server_process.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "baton/worker/v1/cluster.grpc.pb.h"
#include "engine/base/json.h"
#include "engine/base/mutex.h"
#include "engine/process/channel.h"
#include "engine/process/status_publisher.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"
#include "tests/support/keep_grpc_running.h"

namespace baton::process {
namespace {

using worker::v1::WorkerState;
using worker::v1::WorkerStatus;

ServerOptions TestOptions() {
  ServerOptions options;
  options.health_services = {"baton.v1.Generation"};
  options.handle_signals = false;
  options.drain_timeout = absl::Seconds(20);
  return options;
}

// grpc.health.v1 by hand: its messages are a string (field 1) and an enum (field 1).
grpc::ByteBuffer HealthRequest(const std::string& service) {
  std::string bytes;
  if (!service.empty())
    bytes = absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
  grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

enum class Health { kServing, kNotServing, kUnknownService, kNoAnswer };

Health ParseHealth(grpc::ByteBuffer* buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer->Dump(&slices).ok()) return Health::kNoAnswer;
  std::string bytes;
  for (const grpc::Slice& slice : slices)
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  if (bytes == "\x08\x01") return Health::kServing;
  if (bytes == "\x08\x03") return Health::kUnknownService;
  return bytes == "\x08\x02" ? Health::kNotServing : Health::kNoAnswer;
}

class Client {
 public:
  explicit Client(const ServerProcess& server) : Client(server.grpc_address()) {}
  explicit Client(const std::string& address) : channel_(MakeChannel(address)), stub_(channel_) {}

  std::pair<Health, grpc::Status> Check(const std::string& service) {
    grpc::ByteBuffer response;
    const grpc::Status status =
        Call("/grpc.health.v1.Health/Check", HealthRequest(service), &response);
    return {status.ok() ? ParseHealth(&response) : Health::kNoAnswer, status};
  }
  grpc::Status Call(const std::string& method) {
    grpc::ByteBuffer response;
    return Call(method, HealthRequest(""), &response);
  }
  const std::shared_ptr<grpc::Channel>& channel() { return channel_; }

 private:
  grpc::Status Call(const std::string& method,
                    const grpc::ByteBuffer& request,
                    grpc::ByteBuffer* response) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    grpc::Status status;
    absl::Notification done;
    stub_.UnaryCall(&context, method, grpc::StubOptions(), &request, response,
                    [&](grpc::Status result) {
                      status = result;
                      done.Notify();
                    });
    done.WaitForNotification();
    return status;
  }

  std::shared_ptr<grpc::Channel> channel_;
  grpc::GenericStub stub_;
};

// Negative: nobody listens.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

// Sends `request` and reads until the other side closes the connection.
std::string Exchange(int fd, const std::string& request) {
  std::string out;
  if (write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t n; (n = read(fd, buffer, sizeof(buffer))) > 0;)
      out.append(buffer, static_cast<size_t>(n));
  }
  return out;
}

std::string HttpRequest(int port, const std::string& request) {
  const int fd = Connect(port);
  const std::string out = Exchange(fd, request);
  close(fd);
  return out;
}

// Sends a request for /health and reads its answer alone.
std::string AskHealth(int fd) {
  const std::string request = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
  if (write(fd, request.data(), request.size()) < 0) return "";
  std::string out;
  char byte;
  while (!absl::EndsWith(out, "ok\n") && read(fd, &byte, 1) == 1) out.push_back(byte);
  return out;
}

std::string Get(int port, const std::string& path) {
  return HttpRequest(
      port, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"));
}

class ServerProcessTest : public testing::Test {
 protected:
  void Start(const ServerOptions& options = TestOptions()) {
    auto server = ServerProcess::Start(options, metrics_.get(), {publisher_.service()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::unique_ptr<base::Metrics> metrics_ = base::Metrics::Create(base::Role::kDecode, "m");
  std::atomic<int> state_{worker::v1::WORKER_STATE_LOADING};
  StatusPublisher publisher_{[this](WorkerStatus* status) {
    status->set_role("decode");
    status->set_state(static_cast<WorkerState>(state_.load()));
  }};
  std::unique_ptr<ServerProcess> server_;
};

// Case 16.1: the port is open and says NOT_SERVING until the process is ready.
TEST_F(ServerProcessTest, HealthFollowsReadiness) {
  Start();
  Client client(*server_);
  for (const char* name : {"readiness", "baton.v1.Generation"}) {
    EXPECT_EQ(client.Check(name).first, Health::kNotServing) << name;
  }
  for (const char* name : {"", "liveness"})
    EXPECT_EQ(client.Check(name).first, Health::kServing) << name;
  server_->SetReady(true);
  for (const char* name : {"", "readiness", "baton.v1.Generation", "liveness"}) {
    EXPECT_EQ(client.Check(name).first, Health::kServing) << name;
  }
  EXPECT_EQ(client.Check("no.such.Service").second.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(server_->Drain(nullptr));
  for (const char* name : {"", "readiness", "baton.v1.Generation"}) {
    EXPECT_EQ(client.Check(name).first, Health::kNotServing) << name;
  }
  EXPECT_EQ(client.Check("liveness").first, Health::kServing)
      << "the process is there until it is gone";
}

// Probes know a port number and no credentials: the health port says what the main port says, and
// serves nothing else.
TEST_F(ServerProcessTest, HealthPortSaysTheSameAndServesNothingElse) {
  ServerOptions options = TestOptions();
  options.health_port = 0;
  Start(options);
  ASSERT_GT(server_->health_port(), 0);
  Client client(absl::StrCat("127.0.0.1:", server_->health_port()));
  EXPECT_EQ(client.Check("readiness").first, Health::kNotServing);
  EXPECT_EQ(client.Check("liveness").first, Health::kServing);
  server_->SetReady(true);
  EXPECT_EQ(client.Check("baton.v1.Generation").first, Health::kServing);
  EXPECT_TRUE(server_->Drain(nullptr));
  EXPECT_EQ(client.Check("readiness").first, Health::kNotServing);
  EXPECT_EQ(client.Check("liveness").first, Health::kServing);
  EXPECT_EQ(client.Call("/baton.worker.v1.Cluster/WatchStatus").error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(ServerProcessTest, RefusesATakenHealthPort) {
  Start();
  auto metrics = base::Metrics::Create(base::Role::kDecode, "m");
  ServerOptions options = TestOptions();
  options.health_port = server_->grpc_port();
  EXPECT_EQ(ServerProcess::Start(options, metrics.get(), {}).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(ServerProcessTest, HealthWatchSeesEachChange) {
  Start();
  Client client(*server_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(client.channel());
  auto call = stub.PrepareCall(&context, "/grpc.health.v1.Health/Watch", &queue);
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  call->WriteLast(HealthRequest("baton.v1.Generation"), grpc::WriteOptions(), nullptr);
  ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
  const auto next = [&] {
    grpc::ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    return queue.Next(&tag, &ok) && ok ? ParseHealth(&buffer) : Health::kNoAnswer;
  };
  EXPECT_EQ(next(), Health::kNotServing);
  server_->SetReady(true);
  EXPECT_EQ(next(), Health::kServing);
  server_->RequestTermination();
  EXPECT_TRUE(server_->Drain(nullptr));
  EXPECT_EQ(next(), Health::kNotServing);
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

// Events of the prefix cache: all of them at once, then what changes; the status goes its own way.
TEST_F(ServerProcessTest, KvEventsReachWatchersInOrder) {
  base::Mutex mutex;
  uint64_t last = 1;  // the newest event; guarded by mutex
  publisher_.SetKvEvents([&](uint64_t* cursor, worker::v1::KvEvents* out) {
    base::MutexLock lock(&mutex);
    if (*cursor == last) return false;
    out->Clear();
    out->set_reset(*cursor == 0);
    out->add_stored(last);
    *cursor = last;
    return true;
  });
  Start();
  auto stub = worker::v1::Cluster::NewStub(Client(*server_).channel());
  grpc::ClientContext context;
  auto reader = stub->WatchKvEvents(&context, worker::v1::WatchKvEventsRequest());
  worker::v1::KvEvents events;
  ASSERT_TRUE(reader->Read(&events));
  EXPECT_TRUE(events.reset());
  EXPECT_EQ(events.stored(0), 1u);
  for (uint64_t next = 2; next < 5; ++next) {
    {
      base::MutexLock lock(&mutex);
      last = next;
    }
    ASSERT_TRUE(reader->Read(&events));
    EXPECT_FALSE(events.reset());
    EXPECT_EQ(events.stored(0), next);
  }
  context.TryCancel();
  while (reader->Read(&events)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(ServerProcessTest, HttpPortServesItsPages) {
  Start();
  const int port = server_->http_port();
  EXPECT_TRUE(absl::StartsWith(Get(port, "/health"), "HTTP/1.1 200 "));
  EXPECT_TRUE(absl::StartsWith(Get(port, "/ready"), "HTTP/1.1 503 "));
  server_->SetReady(true);
  EXPECT_TRUE(absl::StartsWith(Get(port, "/ready"), "HTTP/1.1 200 "));
  EXPECT_TRUE(absl::StrContains(Get(port, "/"), "baton decode "));
  EXPECT_TRUE(absl::StrContains(Get(port, "/metrics"),
                                "\nbaton_requests_running{model_name=\"m\",role=\"decode\"} 0\n"));
  EXPECT_TRUE(absl::StartsWith(Get(port, "/../etc/passwd"), "HTTP/1.1 404 "));
  EXPECT_TRUE(absl::StartsWith(
      HttpRequest(port, "POST /metrics HTTP/1.0\r\nContent-Length: 0\r\n\r\n"), "HTTP/1.1 405 "));
}

TEST_F(ServerProcessTest, PagesFollowOneAnotherOverAConnection) {
  Start();
  const int fd = Connect(server_->http_port());
  ASSERT_GE(fd, 0);
  for (int i = 0; i < 3; ++i) {
    const std::string answer = AskHealth(fd);
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200 OK\r\n")) << answer;
    EXPECT_TRUE(absl::StrContains(answer, "\r\nConnection: keep-alive\r\n")) << answer;
    EXPECT_TRUE(absl::StrContains(answer, "\r\nServer-Timing: page;dur=")) << answer;
  }
  const std::string last = Exchange(fd, "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n");
  EXPECT_TRUE(absl::StrContains(last, "\r\nConnection: close\r\n")) << last;
  close(fd);
  // Of a client that may not know, the connection is closed too: these return.
  EXPECT_TRUE(absl::StrContains(HttpRequest(server_->http_port(), "GET /health HTTP/1.0\r\n\r\n"),
                                "\r\nConnection: close\r\n"));
  EXPECT_TRUE(absl::StartsWith(HttpRequest(server_->http_port(), "GET /x HTTP/1.1\r\n\r\n"),
                               "HTTP/1.1 404 "));
}

// A connection that waits for more holds a thread. Those who keep theirs never shut out others.
TEST_F(ServerProcessTest, ManyConnectionsAreNotAllKept) {
  Start();
  std::vector<int> fds;
  int kept = 0;
  for (int i = 0; i < 40; ++i) {
    fds.push_back(Connect(server_->http_port()));
    ASSERT_GE(fds.back(), 0);
    const std::string answer = AskHealth(fds.back());
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200 OK\r\n")) << i;
    kept += absl::StrContains(answer, "\r\nConnection: keep-alive\r\n") ? 1 : 0;
  }
  EXPECT_GE(kept, 8);
  EXPECT_LT(kept, 40);
  for (const int fd : fds) close(fd);
}

TEST_F(ServerProcessTest, PortFileNamesBothPortsAndGoesWithTheProcess) {
  ServerOptions options = TestOptions();
  options.port_file = absl::StrCat(testing::TempDir(), "/ports-", getpid());
  Start(options);
  std::ifstream file(options.port_file);
  std::stringstream text;
  text << file.rdbuf();
  const auto json = base::ParseJson(text.str());
  ASSERT_TRUE(json.ok()) << text.str();
  EXPECT_EQ(json->Find("grpc")->AsInt64().value(), server_->grpc_port());
  EXPECT_EQ(json->Find("http")->AsInt64().value(), server_->http_port());
  server_->Stop();
  EXPECT_NE(access(options.port_file.c_str(), F_OK), 0);
}

TEST_F(ServerProcessTest, RefusesATakenPortAndABadAddress) {
  Start();
  auto metrics = base::Metrics::Create(base::Role::kDecode, "m");
  ServerOptions options = TestOptions();
  options.listen = server_->grpc_address();
  EXPECT_EQ(ServerProcess::Start(options, metrics.get(), {}).status().code(),
            absl::StatusCode::kUnavailable);
  options.listen = "127.0.0.1:0";
  options.http_port = server_->http_port();
  EXPECT_EQ(ServerProcess::Start(options, metrics.get(), {}).status().code(),
            absl::StatusCode::kUnavailable);
  for (const char* bad : {"", "127.0.0.1", ":1", "127.0.0.1:70000", "127.0.0.1:x"}) {
    options.listen = bad;
    EXPECT_EQ(ServerProcess::Start(options, metrics.get(), {}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
}

// Case 16.2, the part of the shell: not ready at once, waits for what is idle last, then reports
// success.
TEST_F(ServerProcessTest, DrainWaitsUntilIdle) {
  Start();
  server_->SetReady(true);
  EXPECT_FALSE(server_->draining());
  server_->RequestTermination();
  server_->WaitForTermination();
  EXPECT_TRUE(server_->draining());
  int asked = 0;
  EXPECT_TRUE(server_->Drain([&] { return ++asked > 3; }));
  EXPECT_EQ(asked, 4);
  server_->SetReady(true);
  EXPECT_FALSE(server_->ready()) << "never ready again";
}

TEST_F(ServerProcessTest, SecondTerminationEndsTheDrain) {
  Start();
  server_->RequestTermination();
  EXPECT_FALSE(server_->Drain([&] {
    server_->RequestTermination();
    return false;
  }));
}

TEST_F(ServerProcessTest, DrainEndsAtItsTimeout) {
  ServerOptions options = TestOptions();
  options.drain_timeout = absl::Milliseconds(30);
  Start(options);
  server_->RequestTermination();
  EXPECT_FALSE(server_->Drain([] { return false; }));
}

TEST_F(ServerProcessTest, WatchStatusSendsAtOnceOnChangeAndDoesNotHoldUpTheEnd) {
  Start();
  Client client(*server_);
  auto stub = worker::v1::Cluster::NewStub(client.channel());
  grpc::ClientContext context;
  worker::v1::WatchStatusRequest request;
  request.set_interval_ms(10'000);
  auto reader = stub->WatchStatus(&context, request);
  WorkerStatus status;
  ASSERT_TRUE(reader->Read(&status));
  EXPECT_EQ(status.state(), worker::v1::WORKER_STATE_LOADING);
  state_ = worker::v1::WORKER_STATE_READY;
  publisher_.NotifyChanged();
  ASSERT_TRUE(reader->Read(&status));
  EXPECT_EQ(status.state(), worker::v1::WORKER_STATE_READY);
  EXPECT_EQ(server_->calls_in_flight(), 0) << "a watch is no work";
  server_->Stop();
  while (reader->Read(&status)) {
  }
  EXPECT_FALSE(reader->Finish().ok());
}

TEST_F(ServerProcessTest, WatchStatusRepeatsAtItsInterval) {
  Start();
  Client client(*server_);
  auto stub = worker::v1::Cluster::NewStub(client.channel());
  grpc::ClientContext context;
  worker::v1::WatchStatusRequest request;
  request.set_interval_ms(10);
  auto reader = stub->WatchStatus(&context, request);
  WorkerStatus status;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(reader->Read(&status));
  context.TryCancel();
  reader->Finish();
}

TEST_F(ServerProcessTest, RpcsAreCountedByCode) {
  Start();
  Client client(*server_);
  client.Check("");
  client.Check("no.such.Service");
  server_->Stop();
  const auto handled = [&](const char* code) {
    return metrics_
        ->counter(base::CounterId::kGrpcServerHandled,
                  {"unary", "grpc.health.v1.Health", "Check", code})
        .value();
  };
  EXPECT_EQ(handled("OK"), 1);
  EXPECT_EQ(handled("NotFound"), 1);
  EXPECT_EQ(metrics_
                ->counter(base::CounterId::kGrpcServerStarted,
                          {"unary", "grpc.health.v1.Health", "Check"})
                .value(),
            2);
}

// A client that is cut off closes nothing: its connection ends because it answers no ping.
TEST_F(ServerProcessTest, AConnectionThatAnswersNoPingIsClosed) {
  ServerOptions options = TestOptions();
  options.keepalive_time = absl::Milliseconds(100);
  options.keepalive_timeout = absl::Milliseconds(100);
  Start(options);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server_->grpc_port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const timeval patience = {.tv_sec = 20, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  // HTTP/2's preface and empty settings, and then nothing more.
  const std::string hello("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
  ASSERT_EQ(send(fd, hello.data(), hello.size(), 0), 33);
  char buffer[256];
  ssize_t got = 0;
  while ((got = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
  }
  EXPECT_TRUE(got == 0 || errno == ECONNRESET) << errno;
  close(fd);
}

}  // namespace
}  // namespace baton::process
