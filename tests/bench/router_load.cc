// Load for a router: streams at a fixed rate, or many at once, and what came of it as JSON.
//   router_load --address=HOST:PORT --rate=1000 --seconds=10 --prompt=128 --tokens=4
//   router_load --address=HOST:PORT --streams=200 --tokens=2000
//   ... --stop_reading=1   each stream reads one message and then nothing more

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/support/channel_arguments.h"

#include "baton/v1/generation.grpc.pb.h"

#include "engine/base/mutex.h"

namespace baton {
namespace {

using Clock = std::chrono::steady_clock;

struct Totals {
  std::atomic<uint64_t> started{0}, ended{0}, ok{0}, tokens{0}, messages{0};
  base::Mutex mutex;
  std::vector<int64_t> first_token_us ABSL_GUARDED_BY(mutex);
  std::map<int, int> codes ABSL_GUARDED_BY(mutex);
};

// One stream; deletes itself at its end.
class Stream : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Stream(v1::Generation::Stub* stub,
         const v1::GenerateRequest* request,
         Totals* totals,
         bool stop_reading)
      : totals_(totals), stop_reading_(stop_reading), begin_(Clock::now()) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
    stub->async()->Generate(&context_, request, this);
    totals_->started.fetch_add(1);
    if (stop_reading_) AddHold();
    StartRead(&response_);
    StartCall();
  }
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (totals_->messages.fetch_add(1); first_) {
      const auto took =
          std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin_);
      first_ = false;
      base::MutexLock lock(&totals_->mutex);
      totals_->first_token_us.push_back(took.count());
    }
    totals_->tokens.fetch_add(static_cast<uint64_t>(response_.token_ids_size()));
    if (!stop_reading_) StartRead(&response_);
  }
  // The rest of one that has stopped.
  void Resume() {
    StartRead(&response_);
    stop_reading_ = false;
    RemoveHold();
  }
  void OnDone(const grpc::Status& status) override {
    Totals* const totals = totals_;
    delete this;  // first: see process::MakeChannel
    if (status.ok()) totals->ok.fetch_add(1);
    {
      base::MutexLock lock(&totals->mutex);
      ++totals->codes[status.error_code()];
    }
    totals->ended.fetch_add(1);
  }

 private:
  Totals* const totals_;
  std::atomic<bool> stop_reading_;
  const Clock::time_point begin_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
  bool first_ = true;
};

int Main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (std::strncmp(argv[i], "--", 2) != 0 || equals == nullptr) return 2;
    flags[std::string(static_cast<const char*>(argv[i]) + 2, equals)] = equals + 1;
  }
  const auto number = [&](const char* name, int otherwise) {
    return flags.contains(name) ? std::atoi(flags[name].c_str()) : otherwise;
  };
  const int rate = number("rate", 0), streams = number("streams", 0);
  const int seconds = number("seconds", 10);
  const bool stop_reading = number("stop_reading", 0) != 0;
  std::vector<std::unique_ptr<v1::Generation::Stub>> stubs;
  for (int i = 0; i < number("channels", 4); ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    // Else gRPC itself takes in some megabytes of a stream that nobody reads.
    if (stop_reading) arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    stubs.push_back(v1::Generation::NewStub(grpc::CreateCustomChannel(
        flags["address"], grpc::InsecureChannelCredentials(), arguments)));
  }
  v1::GenerateRequest request;
  for (int i = 0; i < number("prompt", 128); ++i)
    request.mutable_token_ids()->add_ids(static_cast<uint32_t>(3 + i % 100));
  request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(number("tokens", 4)));
  request.mutable_sampling()->set_ignore_eos(true);

  Totals totals;
  std::vector<Stream*> stopped;
  const auto begin = Clock::now();
  const int count = rate > 0 ? rate * seconds : streams;
  for (int i = 0; i < count; ++i) {
    if (rate > 0)
      std::this_thread::sleep_until(begin + std::chrono::microseconds(1'000'000LL * i / rate));
    auto* stream = new Stream(stubs[i % stubs.size()].get(), &request, &totals, stop_reading);
    if (stop_reading) stopped.push_back(stream);
  }
  if (stop_reading) {
    std::this_thread::sleep_for(std::chrono::seconds(seconds));
    std::printf("{\"stopped\": %zu, \"messages\": %lu}\n", stopped.size(),
                static_cast<unsigned long>(totals.messages.load()));
    std::fflush(stdout);
    std::getchar();  // whoever measures says when
    for (Stream* stream : stopped) stream->Resume();
  }
  while (totals.ended.load() < static_cast<uint64_t>(count))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const double took = std::chrono::duration<double>(Clock::now() - begin).count();
  std::string codes;
  int64_t sum = 0, p50 = 0, p99 = 0;
  {
    base::MutexLock lock(&totals.mutex);
    std::vector<int64_t>& first = totals.first_token_us;
    std::sort(first.begin(), first.end());
    sum = std::accumulate(first.begin(), first.end(), int64_t{0});
    if (!first.empty()) {
      p50 = first[(first.size() - 1) / 2];
      p99 = first[(first.size() - 1) * 99 / 100];
    }
    for (const auto& [code, times] : totals.codes) {
      codes +=
          (codes.empty() ? "\"" : ", \"") + std::to_string(code) + "\": " + std::to_string(times);
    }
  }
  std::printf(
      "{\"seconds\": %.3f, \"requests\": %d, \"ok\": %lu, \"codes\": {%s}, \"tokens\": %lu, "
      "\"messages\": %lu, \"tokens_per_s\": %.0f, \"mean_ttft_us\": %.1f, "
      "\"p50_ttft_us\": %ld, \"p99_ttft_us\": %ld}\n",
      took, count, static_cast<unsigned long>(totals.ok.load()), codes.c_str(),
      static_cast<unsigned long>(totals.tokens.load()),
      static_cast<unsigned long>(totals.messages.load()),
      static_cast<double>(totals.tokens.load()) / took, static_cast<double>(sum) / count,
      static_cast<long>(p50), static_cast<long>(p99));
  return 0;
}

}  // namespace
}  // namespace baton

int main(int argc, char** argv) { return baton::Main(argc, argv); }
