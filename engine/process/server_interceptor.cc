#include "engine/process/server_interceptor.h"

#include <map>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "grpcpp/support/server_interceptor.h"

#include "engine/base/mutex.h"

namespace baton::process {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

const char* TypeName(ServerRpcInfo::Type type) {
  switch (type) {
    case ServerRpcInfo::Type::UNARY:
      return "unary";
    case ServerRpcInfo::Type::CLIENT_STREAMING:
      return "client_stream";
    case ServerRpcInfo::Type::SERVER_STREAMING:
      return "server_stream";
    case ServerRpcInfo::Type::BIDI_STREAMING:
      return "bidi_stream";
  }
  return "unknown";
}

// The spelling of go-grpc-prometheus.
const char* CodeName(int code) {
  static constexpr const char* kNames[] = {
      "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
      "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
      "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
      "DataLoss", "Unauthenticated"};
  return code >= 0 && code <= 16 ? kNames[code] : "Unknown";
}

// The series of one method. Its methods are those registered with the server, so the labels are
// bounded.
struct MethodSeries {
  std::string type, service, method;
  bool background = false;
  base::Counter started, received, sent;
  base::Histogram handling;
};

class SeriesTable {
 public:
  explicit SeriesTable(base::Metrics* metrics) : metrics_(metrics) {}

  // Series live as long as the table.
  const MethodSeries* Find(const char* full_method, ServerRpcInfo::Type type) {
    base::MutexLock lock(&mutex_);
    std::unique_ptr<MethodSeries>& series = series_[full_method];
    if (series == nullptr) series = Make(full_method, TypeName(type));
    return series.get();
  }

  base::Counter Handled(const MethodSeries& series, int code) {
    return metrics_->counter(base::CounterId::kGrpcServerHandled,
                             {series.type, series.service, series.method, CodeName(code)});
  }

 private:
  std::unique_ptr<MethodSeries> Make(const std::string& full_method, const char* type) {
    auto series = std::make_unique<MethodSeries>();
    const size_t slash = full_method.rfind('/');
    series->type = type;
    series->service = std::string(absl::StripPrefix(full_method.substr(0, slash), "/"));
    series->method = full_method.substr(slash + 1);
    series->background = IsBackgroundMethod(full_method);
    const absl::string_view labels[] = {series->type, series->service, series->method};
    series->started = metrics_->counter(base::CounterId::kGrpcServerStarted, labels);
    series->received = metrics_->counter(base::CounterId::kGrpcServerMsgReceived, labels);
    series->sent = metrics_->counter(base::CounterId::kGrpcServerMsgSent, labels);
    series->handling = metrics_->histogram(base::HistogramId::kGrpcServerHandling, labels);
    return series;
  }

  base::Metrics* const metrics_;
  base::Mutex mutex_;
  std::map<std::string, std::unique_ptr<MethodSeries>> series_ ABSL_GUARDED_BY(mutex_);
};

// Lives as long as its call.
class CallWatch : public grpc::experimental::Interceptor {
 public:
  CallWatch(SeriesTable* table, std::atomic<int>* in_flight, ServerRpcInfo* info)
      : table_(table),
        in_flight_(in_flight),
        series_(table->Find(info->method(), info->type())),
        start_(absl::Now()) {
    series_->started.Increment();
    if (!series_->background) in_flight_->fetch_add(1);
  }

  ~CallWatch() override {
    // A call that ended without a status of ours was cancelled under its handler.
    table_->Handled(*series_, code_ < 0 ? grpc::StatusCode::CANCELLED : code_).Increment();
    series_->handling.Observe(absl::ToDoubleSeconds(absl::Now() - start_));
    if (!series_->background) in_flight_->fetch_sub(1);
  }

  void Intercept(InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE) &&
        methods->GetRecvMessage() != nullptr) {
      series_->received.Increment();
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE))
      series_->sent.Increment();
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      code_ = methods->GetSendStatus().error_code();
    }
    methods->Proceed();
  }

 private:
  SeriesTable* const table_;
  std::atomic<int>* const in_flight_;
  const MethodSeries* const series_;
  const absl::Time start_;
  int code_ = -1;
};

class Factory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  Factory(base::Metrics* metrics, std::atomic<int>* in_flight)
      : table_(metrics), in_flight_(in_flight) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    return new CallWatch(&table_, in_flight_, info);  // gRPC deletes it with the call
  }

 private:
  SeriesTable table_;
  std::atomic<int>* const in_flight_;
};

}  // namespace

bool IsBackgroundMethod(const std::string& method) {
  return absl::StartsWith(method, "/grpc.health.") ||
         absl::StartsWith(method, "/grpc.reflection.") ||
         absl::StartsWith(method, "/grpc.channelz.") ||
         method == "/baton.worker.v1.Cluster/WatchStatus" ||
         method == "/baton.worker.v1.Cluster/WatchKvEvents" ||
         method == "/baton.worker.v1.Peer/Session";
}

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeServerInterceptorFactory(
    base::Metrics* metrics, std::atomic<int>* calls_in_flight) {
  return std::make_unique<Factory>(metrics, calls_in_flight);
}

}  // namespace baton::process
