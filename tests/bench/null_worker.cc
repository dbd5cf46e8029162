// A prefill and a decode worker that compute nothing: what a router is measured against. Both
// answer at once; the decode side streams max_tokens tokens, --gap_us apart.
//   null_worker --port_file=F --model=DIR [--gap_us=0]
// The file gets "PREFILL_PORT DECODE_PORT". The model is read for its tokenizer, which router and
// workers compare.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"

#include "baton/worker/v1/cluster.grpc.pb.h"
#include "baton/worker/v1/decode.grpc.pb.h"
#include "baton/worker/v1/prefill.grpc.pb.h"

#include "engine/base/mutex.h"
#include "engine/process/status_publisher.h"
#include "engine/text/tokenizer.h"
#include "decode_worker/merge_tokens.h"
#include "worker/bidi_call.h"

namespace baton {
namespace {

using worker::v1::DecodeRequest;
using worker::v1::DecodeResponse;
using worker::v1::PrefillRequest;
using worker::v1::PrefillResponse;

constexpr uint32_t kTokenId = 5;

worker::v1::Token TokenAt(uint32_t position) {
  worker::v1::Token token;
  token.set_position(position);
  token.set_id(kTokenId);
  return token;
}

// Sends the next token of every open stream once in each round; one thread, as an engine has.
class Ticker {
 public:
  using Sink = worker::CallSink<DecodeResponse>;
  explicit Ticker(std::chrono::microseconds gap) : gap_(gap), thread_([this] { Run(); }) {}

  uint64_t Add(std::shared_ptr<Sink> sink, uint32_t position, uint32_t end) {
    base::MutexLock lock(&mutex_);
    added_.push_back({++last_id_, std::move(sink), position, end});
    wake_.NotifyAll();
    return last_id_;
  }
  void Remove(uint64_t id) {
    base::MutexLock lock(&mutex_);
    removed_.insert(id);
    wake_.NotifyAll();
  }

 private:
  struct Stream {
    uint64_t id;
    std::shared_ptr<Sink> sink;
    uint32_t position;
    uint32_t end;
  };

  // False: the stream has ended.
  bool Step(Stream* stream) {
    DecodeResponse response;
    *response.mutable_tokens()->add_tokens() = TokenAt(stream->position++);
    const bool last = stream->position >= stream->end;
    if (last) {
      auto* finished = response.mutable_tokens()->add_finished();
      finished->set_finish(worker::v1::FINISH_LENGTH);
    }
    if (!stream->sink->Send(std::move(response))) {
      stream->sink->Finish(absl::ResourceExhaustedError("the router reads too slowly"));
      return false;
    }
    if (!last) return true;
    DecodeResponse done;
    done.mutable_done();
    stream->sink->Send(std::move(done));
    stream->sink->Finish(absl::OkStatus());
    return false;
  }

  void Run() {
    std::vector<Stream> streams;
    while (true) {
      std::set<uint64_t> removed;
      {
        base::MutexLock lock(&mutex_);
        while (streams.empty() && added_.empty()) {
          wake_.WaitFor(&mutex_, absl::Seconds(1));
          removed_.clear();
        }
        std::move(added_.begin(), added_.end(), std::back_inserter(streams));
        added_.clear();
        removed.swap(removed_);
      }
      const auto next = std::chrono::steady_clock::now() + gap_;
      for (size_t i = 0; i < streams.size();) {
        const bool gone = removed.contains(streams[i].id);
        if (gone) streams[i].sink->Finish(absl::CancelledError());
        if (!gone && Step(&streams[i])) {
          ++i;
        } else {
          streams[i] = std::move(streams.back());
          streams.pop_back();
        }
      }
      std::this_thread::sleep_until(next);
    }
  }

  const std::chrono::microseconds gap_;
  base::Mutex mutex_;
  base::CondVar wake_;
  std::vector<Stream> added_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> removed_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

class DecodeHandler : public worker::CallHandler<DecodeRequest, DecodeResponse> {
 public:
  explicit DecodeHandler(Ticker* ticker) : ticker_(ticker) {}
  absl::Status OnRequest(DecodeRequest request, std::shared_ptr<Ticker::Sink> sink) override {
    static std::atomic<uint64_t> next_reservation{1};
    const worker::v1::RequestSpec& spec = request.open().spec();
    if (!request.open().prefill_locally()) {
      DecodeResponse response;
      response.mutable_reserved()->mutable_handoff()->set_reservation_id(next_reservation++);
      for (int i = 0; i <= spec.prompt_ids_size() / 64; ++i)
        response.mutable_reserved()->add_block_table(i);
      sink->Send(std::move(response));
    }
    const auto prompt = static_cast<uint32_t>(spec.prompt_ids_size());
    // The first token comes from the prefill side.
    const uint32_t first = prompt + (request.open().prefill_locally() ? 0 : 1);
    id_ = ticker_->Add(std::move(sink), first, prompt + spec.sampling().max_tokens());
    return absl::OkStatus();
  }
  bool OnCancel(absl::Status) override {
    if (id_ == 0) return false;
    ticker_->Remove(id_);
    return true;
  }

 private:
  Ticker* const ticker_;
  uint64_t id_ = 0;  // 0: none yet
};

class PrefillHandler : public worker::CallHandler<PrefillRequest, PrefillResponse> {
 public:
  absl::Status OnRequest(PrefillRequest request,
                         std::shared_ptr<worker::CallSink<PrefillResponse>> sink) override {
    if (request.has_open()) {
      PrefillResponse response;
      auto* first = response.mutable_first_tokens();
      *first->add_tokens() =
          TokenAt(static_cast<uint32_t>(request.open().spec().prompt_ids_size()));
      first->set_compute_s(1e-5);
      sink->Send(std::move(response));
      if (request.open().needs_handoff()) return absl::OkStatus();
    }
    PrefillResponse done;
    done.mutable_done()->set_transport("shm");
    sink->Send(std::move(done));
    sink->Finish(absl::OkStatus());
    return absl::OkStatus();
  }
  bool OnCancel(absl::Status) override { return false; }
};

struct DecodeImpl : worker::v1::DecodeWorker::CallbackService {
  explicit DecodeImpl(Ticker* ticker) : ticker(ticker) {}
  grpc::ServerBidiReactor<DecodeRequest, DecodeResponse>* Generate(
      grpc::CallbackServerContext* context) override {
    return worker::BidiCall<DecodeRequest, DecodeResponse>::Start(
        context, std::make_unique<DecodeHandler>(ticker), &decode::MergeTokens);
  }
  Ticker* const ticker;
};

struct PrefillImpl : worker::v1::PrefillWorker::CallbackService {
  grpc::ServerBidiReactor<PrefillRequest, PrefillResponse>* Prefill(
      grpc::CallbackServerContext* context) override {
    return worker::BidiCall<PrefillRequest, PrefillResponse>::Start(
        context, std::make_unique<PrefillHandler>());
  }
};

void FillStatus(const char* role, const std::string& tokenizer, worker::v1::WorkerStatus* status) {
  status->set_role(role);
  status->set_incarnation("null");
  status->set_state(worker::v1::WORKER_STATE_READY);
  status->set_max_model_len(1 << 20);
  status->mutable_fingerprint()->set_tokenizer(tokenizer);
  status->mutable_fingerprint()->set_block_tokens(64);
  status->mutable_fingerprint()->set_kv_dtype("fp8");
  status->mutable_load()->set_kv_blocks_total(1 << 20);
  status->mutable_load()->set_kv_blocks_free(1 << 20);
}

std::unique_ptr<grpc::Server> Serve(grpc::Service* cluster, grpc::Service* service, int* port) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), port);
  builder.RegisterService(cluster);
  builder.RegisterService(service);
  return builder.BuildAndStart();
}

int Main(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (std::strncmp(argv[i], "--", 2) != 0 || equals == nullptr) return 2;
    flags[std::string(static_cast<const char*>(argv[i]) + 2, equals)] = equals + 1;
  }
  Ticker ticker{std::chrono::microseconds(std::atoi(flags["gap_us"].c_str()))};
  const auto loaded = text::Tokenizer::LoadHuggingFace(flags["model"]);
  if (!loaded.ok()) return 1;
  const std::string tokenizer = (*loaded)->fingerprint();
  process::StatusPublisher prefill_status(
      [&](worker::v1::WorkerStatus* status) { FillStatus("prefill", tokenizer, status); });
  process::StatusPublisher decode_status(
      [&](worker::v1::WorkerStatus* status) { FillStatus("decode", tokenizer, status); });
  PrefillImpl prefill;
  DecodeImpl decode(&ticker);
  int prefill_port = 0, decode_port = 0;
  const auto prefill_server = Serve(prefill_status.service(), &prefill, &prefill_port);
  const auto decode_server = Serve(decode_status.service(), &decode, &decode_port);
  if (prefill_server == nullptr || decode_server == nullptr) return 1;
  std::ofstream(flags["port_file"]) << prefill_port << " " << decode_port << std::endl;
  decode_server->Wait();
  return 0;
}

}  // namespace
}  // namespace baton

int main(int argc, char** argv) { return baton::Main(argc, argv); }
