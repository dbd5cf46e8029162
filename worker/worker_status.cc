#include "worker/worker_status.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::worker {

using base::GaugeId;

StatusSource::StatusSource(base::Metrics* metrics, std::string model_name)
    : metrics_(*metrics), model_name_(std::move(model_name)) {
  fixed_.set_role(std::string(base::RoleName(metrics_.role())));
  fixed_.set_model_name(model_name_);
  SetState(v1::WORKER_STATE_LOADING);
}

void StatusSource::SetState(v1::WorkerState state) {
  metrics_.gauge(GaugeId::kWorkerState, "loading").Set(state == v1::WORKER_STATE_LOADING);
  metrics_.gauge(GaugeId::kWorkerState, "ready").Set(state == v1::WORKER_STATE_READY);
  metrics_.gauge(GaugeId::kWorkerState, "draining").Set(state == v1::WORKER_STATE_DRAINING);
  base::MutexLock lock(&mutex_);
  fixed_.set_state(state);
}

void StatusSource::SetHttpAddress(std::string address) {
  base::MutexLock lock(&mutex_);
  fixed_.set_http_address(std::move(address));
}

void StatusSource::SetLoadTime(absl::Duration took) {
  metrics_.gauge(GaugeId::kModelLoadSeconds).Set(absl::ToDoubleSeconds(took));
}

void StatusSource::SetEngine(const EngineHost* host,
                             std::function<v1::WorkerLoad()> load,
                             std::function<std::vector<v1::WorkerStatus::Peer>()> peers) {
  const kv::KvLayout& layout = host->runner->layout();
  const std::string block_tokens = absl::StrCat(kv::kBlockTokens);
  const std::string num_blocks = absl::StrCat(layout.num_blocks);
  const std::string block_bytes = absl::StrCat(layout.block_bytes() * layout.num_layers);
  const absl::string_view labels[] = {block_tokens, num_blocks, kv::KvFormatName(layout.format),
                                      block_bytes};
  metrics_.gauge(GaugeId::kKvCacheInfo, labels).Set(1);
  // A sequence that does not fit in the pool cannot be served, however long the model's context is.
  const int pool_tokens = layout.num_blocks * kv::kBlockTokens;
  base::MutexLock lock(&mutex_);
  fixed_.set_incarnation(host->incarnation);
  *fixed_.mutable_fingerprint() = host->fingerprint;
  const bool decodes = metrics_.role() == base::Role::kDecode;
  const int max_model_len = host->runner->max_model_len();
  fixed_.set_max_model_len(
      static_cast<uint32_t>(decodes ? std::min(max_model_len, pool_tokens) : max_model_len));
  fixed_.set_max_prompt_tokens(static_cast<uint32_t>(std::min(max_model_len, pool_tokens)));
  fixed_.set_device(host->runner->device());
  load_ = std::move(load);
  peers_ = std::move(peers);
}

void StatusSource::Fill(v1::WorkerStatus* status) {
  base::MutexLock lock(&mutex_);
  *status = fixed_;
  if (load_) *status->mutable_load() = load_();
  if (!peers_) return;
  const std::vector<v1::WorkerStatus::Peer> peers = peers_();
  for (const v1::WorkerStatus::Peer& peer : peers) *status->add_peers() = peer;
  SetPeerGauges(peers);
}

void StatusSource::SetPeerGauges(const std::vector<v1::WorkerStatus::Peer>& peers) {
  std::map<std::pair<std::string, std::string>, double> now;
  for (const v1::WorkerStatus::Peer& peer : peers) {
    if (!peer.transport().empty()) {
      now[{peer.transport(), peer.address()}] = peer.probe_bytes_per_second();
    }
  }
  for (const auto& [key, speed] : peer_series_) {
    if (now.contains(key)) continue;
    const absl::string_view labels[] = {key.first, key.second};
    metrics_.Remove(GaugeId::kKvTransportSelected, labels);
    metrics_.Remove(GaugeId::kKvTransportProbe, labels);
  }
  for (const auto& [key, speed] : now) {
    const absl::string_view labels[] = {key.first, key.second};
    metrics_.gauge(GaugeId::kKvTransportSelected, labels).Set(1);
    metrics_.gauge(GaugeId::kKvTransportProbe, labels).Set(speed);
  }
  peer_series_ = std::move(now);
}

}  // namespace baton::worker
