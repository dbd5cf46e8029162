#include "router/router_options.h"

#include <algorithm>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

#include "engine/base/status_macros.h"

namespace baton::router {
namespace {

constexpr absl::Duration kConnectionAge = absl::Minutes(30);

// HOST:PORT entries go to `out`, dns:NAME:PORT ones to `names`.
absl::Status ParseAddresses(absl::string_view flag,
                            WorkerRole role,
                            const std::string& list,
                            std::vector<std::string>* out,
                            std::vector<ServiceName>* names) {
  for (absl::string_view address : absl::StrSplit(list, ',', absl::SkipWhitespace())) {
    absl::string_view host = address;
    const bool is_name = absl::ConsumePrefix(&host, "dns:");
    const size_t colon = host.rfind(':');
    int port = 0;
    if (colon == absl::string_view::npos || colon == 0 ||
        !absl::SimpleAtoi(host.substr(colon + 1), &port) || port < 1 || port > 65535) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, ": \"", address,
                       "\"; want HOST:PORT or dns:NAME:PORT, or several with commas between them"));
    }
    if (is_name) {
      names->push_back({role, std::string(host.substr(0, colon)), port});
    } else {
      out->emplace_back(address);
    }
  }
  return absl::OkStatus();
}

bool HasRole(const ResolvedOptions& options, WorkerRole role) {
  const auto& list = role == WorkerRole::kPrefill ? options.prefill : options.decode;
  return !list.empty() ||
         std::any_of(options.names.begin(), options.names.end(),
                     [role](const ServiceName& name) { return name.role == role; });
}

absl::Status CheckNumbers(const RouterOptions& o) {
  const auto at_least = [](const char* flag, int64_t value, int64_t least) {
    return value >= least ? absl::OkStatus()
                          : absl::InvalidArgumentError(absl::StrCat("--", flag, ": ", value,
                                                                    "; want ", least, " or more"));
  };
  BATON_RETURN_IF_ERROR(at_least("max-concurrent", o.max_concurrent, 1));
  BATON_RETURN_IF_ERROR(at_least("max-queue", o.max_queue, 0));
  BATON_RETURN_IF_ERROR(at_least("max-model-len", o.max_model_len, 0));
  BATON_RETURN_IF_ERROR(at_least("client-buffer", o.client_buffer, 1));
  BATON_RETURN_IF_ERROR(at_least("encoder-threads", o.encoder_threads, 1));
  BATON_RETURN_IF_ERROR(at_least("http-port", o.http_port, -1));
  BATON_RETURN_IF_ERROR(at_least("health-port", o.health_port, -1));
  for (const auto& [flag, port] :
       {std::pair("http-port", o.http_port), std::pair("health-port", o.health_port)}) {
    if (port > 65535) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, ": want -1 (none), 0 (any) or a port up to 65535"));
    }
  }
  if (o.page != "full" && o.page != "read-only" && o.page != "off") {
    return absl::InvalidArgumentError(
        absl::StrCat("--page: \"", o.page, "\"; want full, read-only or off"));
  }
  if (o.metrics_compat != "none" && o.metrics_compat != "vllm") {
    return absl::InvalidArgumentError(
        absl::StrCat("--metrics-compat: \"", o.metrics_compat, "\"; want none or vllm"));
  }
  BATON_RETURN_IF_ERROR(at_least("local-prefill-tokens", o.local_prefill_tokens, 0));
  BATON_RETURN_IF_ERROR(at_least("prefill-queue-tokens", o.prefill_queue_tokens, 0));
  BATON_RETURN_IF_ERROR(at_least("long-prompt-tokens", o.long_prompt_tokens, 1));
  if (!(o.long_prompt_share > 0 && o.long_prompt_share <= 1))
    return absl::InvalidArgumentError("--long-prompt-share: want more than 0 and at most 1");
  for (const auto& [flag, value] :
       {std::pair("ttft-max", o.ttft_max), std::pair("slo-ttft", o.slo_ttft),
        std::pair("slo-tpot", o.slo_tpot)}) {
    if (value < absl::ZeroDuration())
      return absl::InvalidArgumentError(absl::StrCat("--", flag, ": want 0s or more"));
  }
  if (o.down_timeout < o.heartbeat_timeout)
    return absl::InvalidArgumentError("--down-timeout: want at least --heartbeat-timeout");
  for (const auto& [flag, value] : {std::pair("request-timeout-max", o.request_timeout_max),
                                    std::pair("heartbeat-timeout", o.heartbeat_timeout),
                                    std::pair("dns-interval", o.dns_interval)}) {
    if (value <= absl::ZeroDuration() || value > absl::Hours(24)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", flag, ": want more than 0s and at most 24h"));
    }
  }
  if (o.drain_timeout < absl::ZeroDuration())
    return absl::InvalidArgumentError("--drain-timeout: want 0s or more");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ResolvedOptions> ResolveOptions(const RouterOptions& options) {
  ResolvedOptions out;
  if (options.topology != "pd" && options.topology != "single") {
    return absl::InvalidArgumentError(
        absl::StrCat("--topology: \"", options.topology, "\"; want pd or single"));
  }
  out.topology = options.topology == "pd" ? Topology::kPd : Topology::kSingle;
  if (options.model.empty()) {
    return absl::InvalidArgumentError("--model: want a Hugging Face directory or a GGUF file");
  }
  BATON_RETURN_IF_ERROR(CheckNumbers(options));
  BATON_RETURN_IF_ERROR(Annotate(MakeRoutePolicy(options.policy, {}).status(), "--policy"));
  BATON_RETURN_IF_ERROR(
      ParseAddresses("prefill", WorkerRole::kPrefill, options.prefill, &out.prefill, &out.names));
  BATON_RETURN_IF_ERROR(
      ParseAddresses("decode", WorkerRole::kDecode, options.decode, &out.decode, &out.names));
  if (!HasRole(out, WorkerRole::kDecode))
    return absl::InvalidArgumentError("--decode: want at least one HOST:PORT");
  if (out.topology == Topology::kPd && !HasRole(out, WorkerRole::kPrefill)) {
    return absl::InvalidArgumentError("--prefill: want at least one HOST:PORT in topology pd");
  }
  if (out.topology == Topology::kSingle && HasRole(out, WorkerRole::kPrefill)) {
    return absl::InvalidArgumentError("--prefill: topology single has no prefill workers");
  }
  std::set<std::string> seen;
  for (const auto* list : {&out.prefill, &out.decode}) {
    for (const std::string& address : *list) {
      if (!seen.insert(address).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("--prefill, --decode: ", address, " is there twice"));
      }
    }
  }
  BATON_RETURN_IF_ERROR(CheckTls(options.tls.server, options.listen));
  BATON_RETURN_IF_ERROR(CheckTls(options.tls.client));
  out.server.listen = options.listen;
  out.server.tls = options.tls.server;
  out.server.http_port = options.http_port;
  out.server.health_port = options.health_port;
  out.server.metrics_compat = options.metrics_compat;
  out.server.port_file = options.port_file;
  out.server.reflection = options.reflection;
  out.server.channelz = options.channelz;
  out.server.drain_timeout = options.drain_timeout;
  out.server.health_services = {"baton.v1.Generation"};
  out.server.max_connection_age = kConnectionAge;
  out.server.max_connection_age_grace = options.request_timeout_max + absl::Minutes(1);
  return out;
}

absl::StatusOr<LogLevel> ParseLogLevel(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "info") return LogLevel::kInfo;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return absl::InvalidArgumentError(
      absl::StrCat("--log-level: \"", name, "\"; want debug, info, warning or error"));
}

}  // namespace baton::router
