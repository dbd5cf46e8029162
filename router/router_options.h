#pragma once

// What a router is told at its start. Defaults are written here and nowhere else.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "engine/base/log.h"
#include "engine/process/server_process.h"
#include "engine/process/tls.h"
#include "router/discovery.h"
#include "router/route_policy.h"

namespace baton::router {

struct RouterOptions {
  std::string model;
  std::string served_model_name;
  std::string chat_template;
  std::string topology = "pd";
  std::string prefill;
  std::string decode;
  std::string listen = "127.0.0.1:50051";
  process::TlsOptions tls;  // of `listen`, and of the calls to workers
  int32_t http_port = 8000;
  int32_t health_port = -1;
  std::string metrics_compat = "none";
  std::string port_file;
  bool reflection = true;
  bool channelz = false;
  int32_t max_concurrent = 512;
  int32_t max_queue = 1024;
  int32_t max_model_len = 0;
  int32_t client_buffer = 8192;
  int32_t encoder_threads = 2;
  absl::Duration request_timeout_max = absl::Minutes(10);
  std::string policy = "prefix";
  int32_t local_prefill_tokens = RoutePolicyOptions{}.local_prefill_tokens;
  int32_t prefill_queue_tokens = 8192;
  int32_t long_prompt_tokens = 8192;
  double long_prompt_share = RoutePolicyOptions{}.long_prompt_share;
  bool refuse_late = true;
  absl::Duration ttft_max;  // 0: none
  absl::Duration slo_ttft;  // 0: none
  absl::Duration slo_tpot;  // 0: none
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  absl::Duration down_timeout = absl::Seconds(30);
  absl::Duration dns_interval = absl::Seconds(5);
  absl::Duration drain_timeout = absl::Seconds(60);
  std::string page = "full";    // the live page on the HTTP port: full, read-only, off
  std::string page_token_file;  // what the page's data is asked for with; empty: nothing
  std::string token_file;       // of bearer tokens that clients call with; empty: anybody may
  std::string log_level = "info";
};

// RouterOptions, checked and taken apart.
struct ResolvedOptions {
  Topology topology = Topology::kPd;
  std::vector<std::string> prefill;
  std::vector<std::string> decode;
  std::vector<ServiceName> names;  // of workers found by DNS
  process::ServerOptions server;
};

// Errors: INVALID_ARGUMENT naming the flag and what it takes.
absl::StatusOr<ResolvedOptions> ResolveOptions(const RouterOptions& options);

// Errors: INVALID_ARGUMENT with the accepted names.
absl::StatusOr<LogLevel> ParseLogLevel(const std::string& name);

}  // namespace baton::router
