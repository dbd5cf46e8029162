// baton-prefill: computes prompts and hands their KV cache to decode workers.

#include <memory>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/time/time.h"
#include "engine/base/flags.h"
#include "engine/base/status_macros.h"
#include "engine/process/server_process.h"
#include "kvtransfer/transport_terms.h"
#include "prefill_worker/peer_client.h"
#include "prefill_worker/prefill_loop.h"
#include "prefill_worker/prefill_service.h"
#include "worker/worker_process.h"

ABSL_FLAG(int32_t,
          max_sequences,
          baton::prefill::PrefillLoopOptions{}.max_sequences,
          "Most prompts in one step.");
ABSL_FLAG(absl::Duration,
          ticket_timeout,
          baton::prefill::PrefillLoopOptions{}.ticket_timeout,
          "How long a computed prompt waits for the decode worker's reservation.");

ABSL_FLAG(bool,
          kv_checksums,
          baton::kvtransfer::SenderOptions{}.checksums,
          "Send a checksum with every unit of KV, which the decode worker verifies.");
ABSL_FLAG(
    std::string,
    draft_model,
    "",
    "The decode workers' draft model, whose KV of a prompt is computed here too; empty: none.");

namespace baton::prefill {
namespace {

PrefillLoopOptions LoopOptions(const worker::WorkerOptions& worker_options) {
  PrefillLoopOptions options;
  options.chunk_tokens = worker_options.chunk_tokens;
  options.max_calls = worker_options.max_calls;
  options.block_hash_bits = worker_options.test_block_hash_bits;
  options.test_step_delay = worker_options.test_step_delay;
  options.test_poison_freed = worker_options.test_poison_freed;
  options.max_sequences = absl::GetFlag(FLAGS_max_sequences);
  options.ticket_timeout = absl::GetFlag(FLAGS_ticket_timeout);
  return options;
}

base::Counter FallbackCounter(base::Metrics* metrics,
                              const kvtransfer::TransportFallback& fallback) {
  return metrics->counter(base::CounterId::kKvTransportFallback,
                          {fallback.from, fallback.to, fallback.reason});
}

class PrefillRole : public worker::WorkerRole {
 public:
  PrefillRole(PrefillLoopOptions options,
              std::string draft_model,
              worker::WorkerOptions worker_options)
      : options_(std::move(options)),
        draft_model_(std::move(draft_model)),
        worker_options_(std::move(worker_options)) {}

  base::Role role() const override { return base::Role::kPrefill; }
  std::vector<std::string> service_names() const override {
    return {"baton.worker.v1.PrefillWorker"};
  }
  std::vector<grpc::Service*> MakeServices(std::function<bool()> draining) override {
    service_ = std::make_unique<PrefillService>(std::move(draining));
    return {service_->service()};
  }
  int step_tokens() const override { return options_.chunk_tokens; }
  int max_logit_rows() const override { return options_.max_sequences; }

  absl::Status StartEngine(std::unique_ptr<worker::EngineHost> host,
                           base::Metrics* metrics,
                           worker::StatusSource* status,
                           std::function<void()> changed) override {
    host_ = std::move(host);
    security_ = process::MakeChannelSecurity(worker_options_.tls.client);
    metrics_ = metrics;
    peers_ = std::make_unique<PeerClient>(
        ClientOptions(*host_->runner, "prefill", host_->fingerprint, changed));
    options_.model_fingerprint = host_->ModelKey();
    loop_ = std::make_unique<PrefillLoop>(options_, *host_->runner, *host_->tokenizer, *peers_,
                                          worker::WorkerMetrics(metrics));
    if (!draft_model_.empty()) BATON_RETURN_IF_ERROR(SetUpDraftModel());
    loop_->Start();
    status->SetEngine(
        host_.get(), [this] { return loop_->load(); }, [this] { return Peers(); });
    service_->SetLoop(loop_.get());
    return absl::OkStatus();
  }
  const worker::KvEventLog& kv_events() const override { return loop_->kv_events(); }
  bool idle() const override { return loop_->num_calls() == 0; }
  void StopEngine() override {
    loop_->Stop();
    peers_->Shutdown();
    if (draft_peers_ != nullptr) draft_peers_->Shutdown();
  }

 private:
  PeerClientOptions ClientOptions(runtime::ModelRunner& runner,
                                  const std::string& role,
                                  const worker::v1::LayoutFingerprint& fingerprint,
                                  std::function<void()> changed) const {
    PeerClientOptions options;
    options.sender.pool = runner.host_pool();
    options.sender.device_pool = runner.device_pool();
    options.sender.layout = runner.layout();
    options.sender.transport = worker_options_.kv_transport;
    options.sender.required_transport = worker_options_.require_transport;
    for (const std::string& name :
         kvtransfer::TransportsOf(worker_options_.kv_transport, runner.host_pool() != nullptr,
                                  runner.device_pool() != nullptr))
      options.sender.hello.add_transports()->set_name(name);
    // Its series exist from the start: a worker may meet others before the first scrape.
    for (const kvtransfer::TransportFallback& fallback :
         kvtransfer::PossibleFallbacks(kvtransfer::OffersOf(options.sender.hello)))
      FallbackCounter(metrics_, fallback);
    options.sender.on_fallback = [metrics =
                                      metrics_](const kvtransfer::TransportFallback& fallback) {
      FallbackCounter(metrics, fallback).Increment();
    };
    options.sender.checksums = absl::GetFlag(FLAGS_kv_checksums);
    options.sender.hello.set_incarnation(host_->incarnation);
    options.sender.hello.set_role(role);
    *options.sender.hello.mutable_fingerprint() = fingerprint;
    options.security = security_;
    options.on_change = std::move(changed);
    return options;
  }
  absl::Status SetUpDraftModel() {
    worker::DraftRunnerOptions draft;
    draft.step_tokens = options_.chunk_tokens;
    draft.num_blocks = host_->runner->layout().num_blocks;
    BATON_ASSIGN_OR_RETURN(draft_runner_,
                           worker::LoadDraftRunner(draft, draft_model_, worker_options_, *host_));
    // Sessions of their own, since blocks go from and to other pools.
    draft_peers_ = std::make_unique<PeerClient>(
        ClientOptions(*draft_runner_, "prefill-draft",
                      worker::FingerprintOf(*draft_runner_, *host_->tokenizer), nullptr));
    loop_->SetDraftModel(*draft_runner_, *draft_peers_);
    return absl::OkStatus();
  }
  std::vector<worker::v1::WorkerStatus::Peer> Peers() const {
    std::vector<worker::v1::WorkerStatus::Peer> peers;
    for (const PeerClient::Info& info : peers_->peers()) {
      worker::v1::WorkerStatus::Peer& peer = peers.emplace_back();
      peer.set_address(info.address);
      peer.set_transport(info.transport);
      peer.set_probe_bytes_per_second(info.probe_bytes_per_second);
    }
    return peers;
  }

  PrefillLoopOptions options_;
  const std::string draft_model_;
  const worker::WorkerOptions worker_options_;
  process::ChannelSecurity security_;  // of all sessions
  base::Metrics* metrics_ = nullptr;
  std::unique_ptr<worker::EngineHost> host_;
  std::unique_ptr<runtime::ModelRunner> draft_runner_;  // null without a draft model
  std::unique_ptr<PrefillService> service_;
  std::unique_ptr<PeerClient> peers_;
  std::unique_ptr<PeerClient> draft_peers_;
  std::unique_ptr<PrefillLoop> loop_;  // refers to peers_
};

absl::Status ValidateOptions(const PrefillLoopOptions& options) {
  if (options.max_sequences < 1)
    return absl::InvalidArgumentError("--max-sequences: must be at least 1");
  if (options.ticket_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--ticket-timeout: must be above 0");
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace baton::prefill

int main(int argc, char** argv) {
  baton::process::BlockTerminationSignals();
  const baton::base::FlagsOutcome flags = baton::base::HandleFlags(
      argc, argv, "baton-prefill --model PATH [flags]: computes prompts for decode workers.",
      {"prefill_worker/main.cc", "worker/worker_flags.cc", "engine/process/tls"});
  if (!flags.go_on) return flags.exit_code;
  const baton::worker::WorkerOptions options = baton::worker::WorkerOptionsFromFlags();
  const baton::prefill::PrefillLoopOptions loop_options = baton::prefill::LoopOptions(options);
  const absl::Status valid = baton::prefill::ValidateOptions(loop_options);
  baton::prefill::PrefillRole role(loop_options, absl::GetFlag(FLAGS_draft_model), options);
  return baton::worker::RunWorker(options, valid, &role);
}
