// `baton status`: workers, load, KV and transports, as the router sees them.

#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "google/protobuf/util/json_util.h"

#include "cli/access_flags.h"
#include "cli/client.h"
#include "cli/commands.h"
#include "cli/common_flags.h"
#include "engine/base/flags.h"

namespace baton::cli {
namespace {

std::string PeerText(const v1::GetStatusResponse::Worker& worker) {
  std::string text;
  for (const auto& peer : worker.peers()) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", peer.transport(),
                    peer.probe_bytes_per_second() > 0
                        ? absl::StrFormat(" %.1f GB/s", peer.probe_bytes_per_second() / 1e9)
                        : "");
  }
  return text.empty() ? "-" : text;
}

void PrintTable(const v1::GetStatusResponse& status) {
  std::printf("baton %s  topology %s  %s  running %u  queued %u\n", status.version().c_str(),
              status.topology().c_str(), status.serving() ? "serving" : "not serving",
              status.requests_in_flight(), status.requests_queued());
  std::printf("%-8s %-22s %-9s %7s %7s %9s  %-29s %-12s %-15s %s\n", "role", "address", "state",
              "running", "waiting", "queue tok", "KV blocks free/cached/total", "kv/weights",
              "transport", "device");
  for (const auto& worker : status.workers()) {
    std::printf("%-8s %-22s %-9s %7u %7u %9lu  %-29s %-12s %-15s %s\n", worker.role().c_str(),
                worker.address().c_str(), worker.state().c_str(), worker.requests_running(),
                worker.requests_waiting(), static_cast<unsigned long>(worker.queue_tokens()),
                absl::StrFormat("%d/%d/%d", worker.kv_blocks_free(), worker.kv_blocks_cached(),
                                worker.kv_blocks_total())
                    .c_str(),
                absl::StrCat(worker.kv_dtype(), "/", worker.weight_dtype()).c_str(),
                PeerText(worker).c_str(), worker.device().c_str());
  }
}

// What the router has learned of each worker, and how it keeps requests away from it.
void PrintRouting(const v1::GetStatusResponse& status) {
  std::printf("\n%-8s %-22s %-9s %5s %8s %9s  %s\n", "role", "address", "breaker", "sent", "wait",
              "prefixes", "T(n) = C + k1*n + k2*n^2, mean error, samples");
  for (const auto& worker : status.workers()) {
    const std::string model =
        worker.ttft_samples() == 0
            ? "-"
            : absl::StrFormat("%.3g s + %.3g s*n + %.3g s*n^2, %.3g s, %d", worker.ttft_base_s(),
                              worker.ttft_per_token_s(), worker.ttft_per_token2_s(),
                              worker.ttft_error_s(), worker.ttft_samples());
    std::printf("%-8s %-22s %-9s %5u %7.3gs %9lu  %s\n", worker.role().c_str(),
                worker.address().c_str(), worker.breaker().c_str(), worker.requests_sent(),
                worker.predicted_wait_s(), static_cast<unsigned long>(worker.prefix_blocks()),
                model.c_str());
  }
}

}  // namespace

int RunStatus(int argc, char** argv) {
  const base::FlagsOutcome flags = base::HandleFlags(
      argc, argv, "baton status --address HOST:PORT: workers, load, KV use and transports.",
      {"cli/common_flags", "cli/json_flag", kAccessFlags, kTlsClientFlags});
  if (!flags.go_on) return flags.exit_code;
  const absl::StatusOr<ClientOptions> access = AccessFromFlags();
  if (!access.ok()) return PrintFailure("status", access.status());
  Client client(AddressFlag(), *access);
  const absl::StatusOr<v1::GetStatusResponse> status = client.GetStatus(absl::Seconds(5));
  if (!status.ok()) return PrintFailure("status", status.status());
  if (!JsonFlag()) {
    PrintTable(*status);
    PrintRouting(*status);
    return 0;
  }
  std::string json;
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  if (!google::protobuf::util::MessageToJsonString(*status, &json, options).ok()) return 1;
  std::printf("%s\n", json.c_str());
  return 0;
}

}  // namespace baton::cli
