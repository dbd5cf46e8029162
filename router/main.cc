// baton-router: takes the clients' calls, finds workers for them, and puts the answers together.

#include <memory>
#include <string>

#include "absl/flags/flag.h"
#include "engine/base/flags.h"
#include "engine/base/log.h"
#include "engine/process/server_process.h"
#include "engine/process/tls_flags.h"
#include "router/router.h"
#include "router/router_options.h"

using baton::router::RouterOptions;

#define ROUTER_FLAG(type, name, help) ABSL_FLAG(type, name, RouterOptions{}.name, help)
ROUTER_FLAG(std::string,
            model,
            "Model that the workers serve, for its tokenizer and chat template: a Hugging Face "
            "directory or a GGUF file.");
ROUTER_FLAG(std::string,
            served_model_name,
            "Name clients may ask for; empty: the last part of the model's path.");
ROUTER_FLAG(std::string,
            chat_template,
            "Name of a built-in chat template; empty: the model's own.");
ROUTER_FLAG(
    std::string,
    topology,
    "pd: prefill and decode workers. single: decode workers that compute prompts themselves.");
ROUTER_FLAG(std::string,
            prefill,
            "Prefill workers: HOST:PORT, or dns:NAME:PORT for all addresses of a name, with commas "
            "between several.");
ROUTER_FLAG(std::string, decode, "Decode workers, likewise.");
ROUTER_FLAG(std::string, listen, "HOST:PORT of the gRPC server; port 0: any free one.");
ROUTER_FLAG(int32_t, http_port, "Port of /metrics, /health and /ready; 0: any free one, -1: none.");
ROUTER_FLAG(int32_t,
            health_port,
            "Port for grpc.health.v1 alone, as probes want it; 0: any free one, -1: none.");
ROUTER_FLAG(std::string,
            metrics_compat,
            "none, or vllm: /metrics carries the names of vLLM's metrics beside ours.");
ROUTER_FLAG(std::string,
            port_file,
            "File that gets {\"grpc\":PORT,\"http\":PORT,\"health\":PORT} when all are open; "
            "empty: none.");
ROUTER_FLAG(bool, reflection, "Serve gRPC reflection.");
ROUTER_FLAG(bool, channelz, "Serve gRPC channelz.");
ROUTER_FLAG(int32_t, max_concurrent, "Most requests at work at a time; further ones wait.");
ROUTER_FLAG(int32_t, max_queue, "Most requests that wait; further ones are refused.");
ROUTER_FLAG(int32_t,
            max_model_len,
            "Most tokens of prompt and answer together; 0: what the workers take.");
ROUTER_FLAG(int32_t,
            client_buffer,
            "Most tokens of an answer that wait for a slow client; above it the answer ends.");
ROUTER_FLAG(int32_t, encoder_threads, "Threads that turn text into tokens.");
ROUTER_FLAG(absl::Duration,
            request_timeout_max,
            "Longest time a request may take, whatever its client says.");
ROUTER_FLAG(std::string,
            policy,
            "How workers are chosen: prefix (soonest first token, by cached prefix, queue and "
            "measured speed), least_load, power_of_two, round_robin.");
ROUTER_FLAG(int32_t,
            local_prefill_tokens,
            "A prompt of which the decode worker lacks at most this many tokens may be computed "
            "there, if that is sooner; 0: never.");
ROUTER_FLAG(int32_t,
            prefill_queue_tokens,
            "A prefill worker with this many tokens to compute gets no more prompts: they wait in "
            "the router, in order; 0: no limit.");
ROUTER_FLAG(int32_t,
            long_prompt_tokens,
            "Prompts with more tokens to compute than this go through a lane of their own.");
ROUTER_FLAG(double,
            long_prompt_share,
            "Largest share of the prefill workers that compute long prompts at a time.");
ROUTER_FLAG(bool,
            refuse_late,
            "Refuse at once a request whose first token the queue would make too late.");
ROUTER_FLAG(absl::Duration,
            ttft_max,
            "Longest predicted time to first token that is accepted, beside the deadline; 0: any.");
ROUTER_FLAG(absl::Duration, slo_ttft, "Objective for the time to first token, counted; 0: none.");
ROUTER_FLAG(absl::Duration,
            slo_tpot,
            "Objective for the mean time between the tokens of an answer, counted; 0: none.");
ROUTER_FLAG(absl::Duration, heartbeat_timeout, "A worker silent for this long gets no new work.");
ROUTER_FLAG(absl::Duration, down_timeout, "A worker silent for this long is down.");
ROUTER_FLAG(absl::Duration, dns_interval, "How often dns: names are resolved again.");
ROUTER_FLAG(absl::Duration, drain_timeout, "After SIGTERM, how long running requests may go on.");
ROUTER_FLAG(std::string,
            page,
            "The live page on the HTTP port: full, read-only (nothing can be tried) or off.");
ROUTER_FLAG(std::string,
            page_token_file,
            "File with the token that the live page asks its visitors for; empty: none.");
ROUTER_FLAG(std::string,
            token_file,
            "File of the bearer tokens that clients must call with, read again when it changes; "
            "empty: anybody may call.");
ROUTER_FLAG(std::string, log_level, "debug, info, warning or error.");
#undef ROUTER_FLAG

namespace baton::router {
namespace {

RouterOptions OptionsFromFlags() {
  RouterOptions options;
  options.model = absl::GetFlag(FLAGS_model);
  options.served_model_name = absl::GetFlag(FLAGS_served_model_name);
  options.chat_template = absl::GetFlag(FLAGS_chat_template);
  options.topology = absl::GetFlag(FLAGS_topology);
  options.prefill = absl::GetFlag(FLAGS_prefill);
  options.decode = absl::GetFlag(FLAGS_decode);
  options.listen = absl::GetFlag(FLAGS_listen);
  options.tls = process::TlsOptionsFromFlags();
  options.http_port = absl::GetFlag(FLAGS_http_port);
  options.health_port = absl::GetFlag(FLAGS_health_port);
  options.metrics_compat = absl::GetFlag(FLAGS_metrics_compat);
  options.port_file = absl::GetFlag(FLAGS_port_file);
  options.reflection = absl::GetFlag(FLAGS_reflection);
  options.channelz = absl::GetFlag(FLAGS_channelz);
  options.max_concurrent = absl::GetFlag(FLAGS_max_concurrent);
  options.max_queue = absl::GetFlag(FLAGS_max_queue);
  options.max_model_len = absl::GetFlag(FLAGS_max_model_len);
  options.client_buffer = absl::GetFlag(FLAGS_client_buffer);
  options.encoder_threads = absl::GetFlag(FLAGS_encoder_threads);
  options.request_timeout_max = absl::GetFlag(FLAGS_request_timeout_max);
  options.policy = absl::GetFlag(FLAGS_policy);
  options.local_prefill_tokens = absl::GetFlag(FLAGS_local_prefill_tokens);
  options.prefill_queue_tokens = absl::GetFlag(FLAGS_prefill_queue_tokens);
  options.long_prompt_tokens = absl::GetFlag(FLAGS_long_prompt_tokens);
  options.long_prompt_share = absl::GetFlag(FLAGS_long_prompt_share);
  options.refuse_late = absl::GetFlag(FLAGS_refuse_late);
  options.ttft_max = absl::GetFlag(FLAGS_ttft_max);
  options.slo_ttft = absl::GetFlag(FLAGS_slo_ttft);
  options.slo_tpot = absl::GetFlag(FLAGS_slo_tpot);
  options.heartbeat_timeout = absl::GetFlag(FLAGS_heartbeat_timeout);
  options.down_timeout = absl::GetFlag(FLAGS_down_timeout);
  options.dns_interval = absl::GetFlag(FLAGS_dns_interval);
  options.drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  options.page = absl::GetFlag(FLAGS_page);
  options.page_token_file = absl::GetFlag(FLAGS_page_token_file);
  options.token_file = absl::GetFlag(FLAGS_token_file);
  options.log_level = absl::GetFlag(FLAGS_log_level);
  return options;
}

}  // namespace
}  // namespace baton::router

int main(int argc, char** argv) {
  baton::process::BlockTerminationSignals();
  const baton::base::FlagsOutcome flags =
      baton::base::HandleFlags(argc, argv,
                               "baton-router --model PATH --prefill HOST:PORT,... --decode "
                               "HOST:PORT,...: the clients' entry.",
                               {"router/main", "engine/process/tls"});
  if (!flags.go_on) return flags.exit_code;
  const RouterOptions options = baton::router::OptionsFromFlags();
  const absl::StatusOr<baton::LogLevel> log_level = baton::router::ParseLogLevel(options.log_level);
  baton::InitLogging("router", log_level.ok() ? *log_level : baton::LogLevel::kInfo);
  absl::Status status = log_level.status();
  if (status.ok()) {
    const absl::StatusOr<std::unique_ptr<baton::router::Router>> router =
        baton::router::Router::Start(options);
    status = router.status();
    if (status.ok()) (*router)->RunUntilTerminated();
  }
  if (status.ok()) return 0;
  BATON_LOG(Error, "cannot serve: ", status.message());
  return 1;
}
