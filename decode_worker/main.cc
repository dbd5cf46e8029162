// baton-decode: takes over prompts from prefill workers, or computes them itself, and generates.

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "decode_worker/decode_loop.h"
#include "decode_worker/decode_service.h"
#include "decode_worker/draft_models.h"
#include "decode_worker/peer_service.h"
#include "engine/base/flags.h"
#include "engine/base/status_macros.h"
#include "engine/process/server_process.h"
#include "engine/process/tls.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/transport_terms.h"
#include "worker/worker_process.h"

namespace baton::decode {

struct DecodeOptions {
  DecodeLoopOptions loop;
  bool test_free_drafts = false;
  int64_t swap_bytes = int64_t{256} << 20;
  std::string draft_model;                  // path; empty: none
  std::string draft_weight_dtype = "none";  // of a copy of the model itself: none, q4, int8
  std::string kv_transport = "auto";
  bool listens_on_tcp = true;
  std::string kv_listen = "127.0.0.1:0";
  std::string kv_advertise_host;
  bool allow_plaintext_kv = false;
};

}  // namespace baton::decode

using baton::decode::DecodeOptions;

ABSL_FLAG(int32_t,
          max_batch,
          DecodeOptions{}.loop.scheduler.max_batch,
          "Most sequences that decode in one step.");
ABSL_FLAG(int32_t,
          max_prefill_sequences,
          DecodeOptions{}.loop.scheduler.max_prefill_sequences,
          "Most prompts computed here in one step, beside the sequences that decode.");
ABSL_FLAG(int32_t,
          max_draft_tokens,
          DecodeOptions{}.loop.speculation.max_drafts,
          "Most draft tokens of one sequence in a step, 15 at most; 0: no speculation.");
ABSL_FLAG(int32_t,
          max_step_draft_tokens,
          DecodeOptions{}.loop.speculation.max_step_drafts,
          "Most draft tokens of one step.");
ABSL_FLAG(bool,
          ngram_drafts,
          DecodeOptions{}.loop.speculation.ngram,
          "Draft by look-up: what followed where the end of an answer occurred before.");
ABSL_FLAG(int64_t,
          swap_space,
          DecodeOptions{}.swap_bytes,
          "Bytes of host memory for the KV blocks of sequences that give way when blocks run out; "
          "0: they are computed again.");
ABSL_FLAG(std::string,
          draft_model,
          DecodeOptions{}.draft_model,
          "A small model of the same vocabulary that drafts; empty: none.");
ABSL_FLAG(std::string,
          draft_weight_dtype,
          DecodeOptions{}.draft_weight_dtype,
          "Draft with a copy of the model's own weights in this precision: none, q4 or int8. A "
          "model that computes in it already goes without.");
ABSL_FLAG(bool,
          test_free_drafts,
          DecodeOptions{}.test_free_drafts,
          "For tests only: drafts are taken to cost nothing, so that there are always some.");
ABSL_FLAG(std::string,
          kv_listen,
          DecodeOptions{}.kv_listen,
          "host:port where KV blocks arrive over tcp; port 0: any free one. nccl takes the port "
          "after it.");
ABSL_FLAG(std::string,
          kv_advertise_host,
          DecodeOptions{}.kv_advertise_host,
          "Host that prefill workers connect to for KV blocks; empty: that of --kv-listen.");

ABSL_FLAG(
    bool,
    allow_plaintext_kv,
    DecodeOptions{}.allow_plaintext_kv,
    "Take KV blocks over tcp beyond loopback: they travel without TLS, so that network must be "
    "trusted. --allow-plaintext means this too.");

namespace baton::decode {
namespace {

// What timing steps may take at start.
constexpr absl::Duration kCostBudget = absl::Seconds(2);

DecodeOptions OptionsFromFlags(const worker::WorkerOptions& worker_options) {
  DecodeOptions options;
  options.loop.scheduler.max_batch = absl::GetFlag(FLAGS_max_batch);
  options.loop.scheduler.max_prefill_sequences = absl::GetFlag(FLAGS_max_prefill_sequences);
  options.loop.scheduler.chunk_tokens = worker_options.chunk_tokens;
  options.loop.speculation.max_drafts = absl::GetFlag(FLAGS_max_draft_tokens);
  options.loop.speculation.max_step_drafts = absl::GetFlag(FLAGS_max_step_draft_tokens);
  options.loop.speculation.ngram = absl::GetFlag(FLAGS_ngram_drafts);
  options.swap_bytes = absl::GetFlag(FLAGS_swap_space);
  options.test_free_drafts = absl::GetFlag(FLAGS_test_free_drafts);
  options.draft_model = absl::GetFlag(FLAGS_draft_model);
  options.draft_weight_dtype = absl::GetFlag(FLAGS_draft_weight_dtype);
  options.loop.max_calls = worker_options.max_calls;
  options.loop.block_hash_bits = worker_options.test_block_hash_bits;
  options.loop.test_step_delay = worker_options.test_step_delay;
  options.loop.test_poison_freed = worker_options.test_poison_freed;
  options.kv_transport = worker_options.kv_transport;
  const auto may_listen = [](const std::string& name) {
    return name.empty() || name == "auto" || name == "nccl" || name == "tcp";
  };
  options.listens_on_tcp =
      may_listen(worker_options.kv_transport) && may_listen(worker_options.require_transport);
  options.kv_listen = absl::GetFlag(FLAGS_kv_listen);
  options.kv_advertise_host = absl::GetFlag(FLAGS_kv_advertise_host);
  options.allow_plaintext_kv =
      absl::GetFlag(FLAGS_allow_plaintext_kv) || worker_options.tls.server.allow_plaintext;
  return options;
}

absl::Status ParseListen(const std::string& listen, std::string* host, int* port) {
  const size_t colon = listen.rfind(':');
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(listen.substr(colon + 1), port) || *port < 0 || *port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("--kv-listen=\"", listen, "\": want HOST:PORT"));
  }
  *host = listen.substr(0, colon);
  return absl::OkStatus();
}

absl::Status ValidateOptions(const DecodeOptions& options) {
  if (options.loop.scheduler.max_batch < 1)
    return absl::InvalidArgumentError("--max-batch: must be at least 1");
  if (options.loop.scheduler.max_prefill_sequences < 1) {
    return absl::InvalidArgumentError("--max-prefill-sequences: must be at least 1");
  }
  const SpeculationOptions& speculation = options.loop.speculation;
  if (speculation.max_drafts < 0 || speculation.max_drafts > kMaxDrafts)
    return absl::InvalidArgumentError(
        absl::StrCat("--max-draft-tokens: must be in [0, ", kMaxDrafts, "]"));
  if (options.swap_bytes < 0) return absl::InvalidArgumentError("--swap-space: must be at least 0");
  if (speculation.max_step_drafts < 0)
    return absl::InvalidArgumentError("--max-step-draft-tokens: must be at least 0");
  if (options.draft_weight_dtype != "none" && options.draft_weight_dtype != "q4" &&
      options.draft_weight_dtype != "int8") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--draft-weight-dtype=\"", options.draft_weight_dtype, "\": accepted: none, q4, int8"));
  }
  if (!options.draft_model.empty() && options.draft_weight_dtype != "none")
    return absl::InvalidArgumentError("--draft-model, --draft-weight-dtype: one of them at most");
  std::string host;
  int port;
  BATON_RETURN_IF_ERROR(ParseListen(options.kv_listen, &host, &port));
  if (!options.listens_on_tcp || options.allow_plaintext_kv || process::IsLoopbackHost(host))
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--kv-listen: ", options.kv_listen,
                   " can be reached from other machines, and KV blocks travel without TLS: give "
                   "--allow-plaintext-kv where that network is trusted"));
}

class DecodeRole : public worker::WorkerRole {
 public:
  DecodeRole(DecodeOptions options, worker::WorkerOptions worker_options)
      : options_(std::move(options)), worker_options_(std::move(worker_options)) {}

  base::Role role() const override { return base::Role::kDecode; }
  std::vector<std::string> service_names() const override {
    return {"baton.worker.v1.DecodeWorker", "baton.worker.v1.Peer"};
  }
  std::vector<grpc::Service*> MakeServices(std::function<bool()> draining) override {
    service_ = std::make_unique<DecodeService>(std::move(draining));
    peer_service_ = std::make_unique<PeerService>();
    return {service_->service(), peer_service_->service()};
  }
  int step_tokens() const override {
    return options_.loop.scheduler.chunk_tokens + options_.loop.scheduler.max_batch + StepDrafts();
  }
  int max_logit_rows() const override {
    return options_.loop.scheduler.max_batch + options_.loop.scheduler.max_prefill_sequences +
           StepDrafts();
  }

  absl::Status StartEngine(std::unique_ptr<worker::EngineHost> host,
                           base::Metrics* metrics,
                           worker::StatusSource* status,
                           std::function<void()> changed) override {
    host_ = std::move(host);
    options_.loop.model_fingerprint = host_->ModelKey();
    loop_ = std::make_unique<DecodeLoop>(options_.loop, *host_->runner, *host_->tokenizer,
                                         worker::WorkerMetrics(metrics));
    BATON_ASSIGN_OR_RETURN(SwapSpace swap, SwapSpace::Create(*host_->runner, options_.swap_bytes));
    swap_ = std::make_unique<SwapSpace>(std::move(swap));
    loop_->set_swap_space(swap_.get());
    BATON_RETURN_IF_ERROR(SetUpSpeculation(worker::WorkerMetrics(metrics)));
    BATON_ASSIGN_OR_RETURN(kvtransfer::ReceiverOptions receiver_options,
                           ReceiverOptions(*host_->runner));
    receiver_options.fingerprint = host_->fingerprint;
    BATON_ASSIGN_OR_RETURN(
        receiver_, kvtransfer::Receiver::Create(
                       receiver_options, [loop = loop_.get()](kvtransfer::ReceiverEvent event) {
                         loop->OnReceiverEvent(std::move(event));
                       }));
    loop_->set_receiver(receiver_.get());
    loop_->Start();
    status->SetEngine(
        host_.get(), [this] { return loop_->load(); }, [this] { return Peers(); });
    peer_service_->SetReceiver(receiver_.get());
    service_->SetLoop(loop_.get());
    return absl::OkStatus();
  }
  const worker::KvEventLog& kv_events() const override { return loop_->kv_events(); }
  bool idle() const override { return loop_->num_calls() == 0; }
  void StopEngine() override {
    loop_->Stop();
    service_->FinishSending();
  }

 private:
  int StepDrafts() const {
    const SpeculationOptions& speculation = options_.loop.speculation;
    return speculation.max_drafts == 0 ? 0 : speculation.max_step_drafts;
  }
  // Steps are timed on the empty pool before the first request comes.
  absl::Status SetUpSpeculation(const worker::WorkerMetrics& metrics) {
    if (StepDrafts() == 0) return absl::OkStatus();
    if (!options_.test_free_drafts) {
      BATON_ASSIGN_OR_RETURN(
          StepCost cost,
          MeasureStepCost(*host_->runner, std::min(max_logit_rows(), step_tokens()), kCostBudget));
      loop_->set_step_cost(std::move(cost));
    }
    DraftModelOptions draft;
    draft.max_batch = options_.loop.scheduler.max_batch;
    draft.cost_budget = kCostBudget;
    draft.metrics = metrics;
    std::unique_ptr<ModelDrafter> drafter;
    if (!options_.draft_model.empty()) {
      BATON_ASSIGN_OR_RETURN(drafter,
                             LoadDraftModel(draft, options_.draft_model, worker_options_, *host_));
      BATON_RETURN_IF_ERROR(SetUpDraftIntake(drafter.get()));
    } else if (options_.draft_weight_dtype != "none") {
      BATON_ASSIGN_OR_RETURN(
          drafter, LoadLowBitCopy(draft, options_.draft_weight_dtype, worker_options_, *host_));
    }
    if (drafter != nullptr) loop_->AddDrafter(std::move(drafter));
    return absl::OkStatus();
  }
  // Prefill workers with the same draft model hand its keys and values over.
  absl::Status SetUpDraftIntake(ModelDrafter* drafter) {
    runtime::ModelRunner& runner = drafter->runner();
    BATON_ASSIGN_OR_RETURN(kvtransfer::ReceiverOptions receiver_options, ReceiverOptions(runner));
    receiver_options.fingerprint = worker::FingerprintOf(runner, *host_->tokenizer);
    receiver_options.tcp_listen_port = 0;
    BATON_ASSIGN_OR_RETURN(
        draft_receiver_,
        kvtransfer::Receiver::Create(receiver_options,
                                     [loop = loop_.get()](kvtransfer::ReceiverEvent event) {
                                       loop->OnDraftReceiverEvent(std::move(event));
                                     }));
    draft_intake_ = std::make_unique<DraftIntake>(drafter->memory(), &runner, draft_receiver_.get(),
                                                  options_.loop.clock);
    drafter->set_intake(draft_intake_.get());
    loop_->set_draft_intake(draft_intake_.get());
    peer_service_->SetDraftReceiver(draft_receiver_.get());
    return absl::OkStatus();
  }
  absl::StatusOr<kvtransfer::ReceiverOptions> ReceiverOptions(runtime::ModelRunner& runner) const {
    kvtransfer::ReceiverOptions receiver_options;
    receiver_options.pool = runner.host_pool();
    receiver_options.device_pool = runner.device_pool();
    receiver_options.layout = runner.layout();
    receiver_options.incarnation = host_->incarnation;
    receiver_options.transports = kvtransfer::TransportsOf(
        options_.kv_transport, runner.host_pool() != nullptr, runner.device_pool() != nullptr);
    receiver_options.required_transport = worker_options_.require_transport;
    BATON_RETURN_IF_ERROR(ParseListen(options_.kv_listen, &receiver_options.tcp_listen_host,
                                      &receiver_options.tcp_listen_port));
    receiver_options.tcp_advertise_host = options_.kv_advertise_host;
    return receiver_options;
  }

  std::vector<worker::v1::WorkerStatus::Peer> Peers() const {
    std::vector<worker::v1::WorkerStatus::Peer> peers;
    for (const kvtransfer::Receiver::PeerInfo& info : receiver_->peers()) {
      worker::v1::WorkerStatus::Peer& peer = peers.emplace_back();
      peer.set_address(worker::IncarnationName(info.incarnation));
      peer.set_transport(info.transport);
      peer.set_probe_bytes_per_second(info.probe_bytes_per_second);
    }
    return peers;
  }

  DecodeOptions options_;
  const worker::WorkerOptions worker_options_;
  std::unique_ptr<worker::EngineHost> host_;
  std::unique_ptr<SwapSpace> swap_;
  std::unique_ptr<DraftIntake> draft_intake_;
  std::unique_ptr<DecodeService> service_;
  std::unique_ptr<PeerService> peer_service_;
  std::unique_ptr<DecodeLoop> loop_;
  std::unique_ptr<kvtransfer::Receiver> receiver_;        // its events go to loop_
  std::unique_ptr<kvtransfer::Receiver> draft_receiver_;  // the same
};

}  // namespace
}  // namespace baton::decode

int main(int argc, char** argv) {
  baton::process::BlockTerminationSignals();
  const baton::base::FlagsOutcome flags = baton::base::HandleFlags(
      argc, argv,
      "baton-decode --model PATH [flags]: generates, from KV caches that "
      "prefill workers hand over.",
      {"decode_worker/main.cc", "worker/worker_flags.cc", "engine/process/tls"});
  if (!flags.go_on) return flags.exit_code;
  const baton::worker::WorkerOptions options = baton::worker::WorkerOptionsFromFlags();
  const DecodeOptions decode_options = baton::decode::OptionsFromFlags(options);
  const absl::Status valid = baton::decode::ValidateOptions(decode_options);
  baton::decode::DecodeRole role(decode_options, options);
  return baton::worker::RunWorker(options, valid, &role);
}
