// `baton serve`: router, prefill and decode workers on this machine, from one command.

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/types/optional.h"

#include "cli/access_flags.h"
#include "cli/child_process.h"
#include "cli/client.h"
#include "cli/commands.h"
#include "cli/model_flags.h"
#include "engine/base/flags.h"
#include "engine/base/json.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/process/tls_flags.h"

ABSL_FLAG(int32_t, prefill, 1, "Number of prefill workers (none in topology single).");
ABSL_FLAG(int32_t, decode, 1, "Number of decode workers.");
ABSL_FLAG(std::string,
          topology,
          "pd",
          "pd: prefill and decode workers. single: decode workers that prefill locally.");
ABSL_FLAG(int32_t, grpc_port, 50051, "Port of the router's gRPC API; 0 picks a free one.");
ABSL_FLAG(int32_t,
          http_port,
          8000,
          "Port of the router's HTTP pages (/metrics, /health, /ready); 0 picks a free one.");
ABSL_FLAG(
    std::string,
    host,
    "127.0.0.1",
    "Address the router listens on; beyond loopback it wants --tls-cert or --allow-plaintext. "
    "Workers listen on 127.0.0.1 only.");
ABSL_FLAG(std::string, port_file, "", "File that gets the router's ports as JSON once it serves.");
ABSL_FLAG(absl::Duration,
          ready_timeout,
          absl::Minutes(10),
          "Longest start: after it everything is stopped again.");
ABSL_FLAG(absl::Duration,
          stop_grace,
          absl::Seconds(30),
          "How long running answers may take to finish after Ctrl-C.");

// Passed on as they are, and only when given: their defaults are written in the workers and the
// router.
#define BATON_PASSED_ON(name, help) \
  ABSL_FLAG(absl::optional<std::string>, name, absl::nullopt, help)
BATON_PASSED_ON(device, "auto, cpu, cuda or ref: where workers compute.");
BATON_PASSED_ON(verify_weights, "true: workers compare every byte of the weights.");
BATON_PASSED_ON(chunk_tokens, "Most prompt tokens in one step.");
BATON_PASSED_ON(max_batch, "Most sequences decoded in one step.");
BATON_PASSED_ON(threads, "Compute threads of each worker.");
BATON_PASSED_ON(cpu_isa, "auto, avx2, avx512 or amx: highest instruction set used.");
BATON_PASSED_ON(served_model_name, "Name clients may ask for.");
BATON_PASSED_ON(log_level, "debug, info, warning or error.");
BATON_PASSED_ON(chat_template, "Name of a built-in chat template, instead of the model's own.");
BATON_PASSED_ON(drain_timeout, "How long a worker or router finishes running answers on SIGTERM.");
#undef BATON_PASSED_ON

namespace baton::cli {
namespace {

using OptionalFlag = std::pair<const char*, const absl::Flag<absl::optional<std::string>>*>;

const std::vector<OptionalFlag>& WorkerFlags() {
  static const auto* const flags =
      new std::vector<OptionalFlag>{{"device", &FLAGS_device},
                                    {"gpu-memory-utilization", &FLAGS_gpu_memory_utilization},
                                    {"verify-weights", &FLAGS_verify_weights},
                                    {"weight-dtype", &FLAGS_weight_dtype},
                                    {"tp", &FLAGS_tp},
                                    {"kv-dtype", &FLAGS_kv_dtype},
                                    {"kv-cache-bytes", &FLAGS_kv_cache_bytes},
                                    {"num-blocks", &FLAGS_num_blocks},
                                    {"max-model-len", &FLAGS_max_model_len},
                                    {"chunk-tokens", &FLAGS_chunk_tokens},
                                    {"threads", &FLAGS_threads},
                                    {"cpu-isa", &FLAGS_cpu_isa},
                                    {"kv-transport", &FLAGS_kv_transport},
                                    {"require-transport", &FLAGS_require_transport},
                                    {"served-model-name", &FLAGS_served_model_name},
                                    {"log-level", &FLAGS_log_level},
                                    {"drain-timeout", &FLAGS_drain_timeout}};
  return *flags;
}

const std::vector<OptionalFlag>& RouterFlags() {
  static const auto* const flags =
      new std::vector<OptionalFlag>{{"served-model-name", &FLAGS_served_model_name},
                                    {"chat-template", &FLAGS_chat_template},
                                    {"max-model-len", &FLAGS_max_model_len},
                                    {"log-level", &FLAGS_log_level},
                                    {"drain-timeout", &FLAGS_drain_timeout}};
  return *flags;
}

void AppendGiven(const std::vector<OptionalFlag>& flags, std::vector<std::string>* argv) {
  for (const auto& [name, flag] : flags) {
    const absl::optional<std::string> value = absl::GetFlag(*flag);
    if (value) argv->push_back(absl::StrCat("--", name, "=", *value));
  }
}

std::atomic<bool> g_stop{false};
void RequestStop(int) { g_stop = true; }

struct Ports {
  int grpc = 0;
  int http = 0;
  int health = 0;
};

// The port file of a child, once it has been written.
std::optional<Ports> ReadPorts(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::stringstream text;
  text << file.rdbuf();
  const absl::StatusOr<base::JsonValue> json = base::ParseJson(text.str(), {.max_depth = 2});
  if (!json.ok()) return std::nullopt;
  const auto port = [&](const char* name) {
    const base::JsonValue* const value = json->Find(name);
    return value == nullptr ? 0 : static_cast<int>(value->AsInt64().value_or(0));  // null: none
  };
  return Ports{port("grpc"), port("http"), port("health")};
}

// The router's, as they were given here.
void AppendTls(const process::TlsServerOptions& tls, std::vector<std::string>* argv) {
  for (const auto& [name, value] : {std::pair("tls-cert", tls.cert), std::pair("tls-key", tls.key),
                                    std::pair("tls-client-ca", tls.client_ca)}) {
    if (!value.empty()) argv->push_back(absl::StrCat("--", name, "=", value));
  }
  argv->push_back("--tls-reload-interval=" + absl::FormatDuration(tls.reload_interval));
  if (tls.allow_plaintext) argv->push_back("--allow-plaintext");
}

// Everything that runs for one `serve`. The destructor stops what is left, newest first: the router
// before its workers.
class Deployment {
 public:
  static absl::StatusOr<std::unique_ptr<Deployment>> Create() {
    std::string dir = (std::filesystem::temp_directory_path() / "baton-serve-XXXXXX").string();
    if (mkdtemp(dir.data()) == nullptr)
      return absl::InternalError("cannot make a directory for port files");
    return std::unique_ptr<Deployment>(new Deployment(dir));
  }

  ~Deployment() {
    for (auto child = children_.rbegin(); child != children_.rend(); ++child)
      child->Stop(absl::GetFlag(FLAGS_stop_grace));
    RemoveFiles();
  }

  absl::Status StartWorkers() {
    const bool single = absl::GetFlag(FLAGS_topology) == "single";
    for (int i = 0; !single && i < absl::GetFlag(FLAGS_prefill); ++i)
      BATON_RETURN_IF_ERROR(StartWorker("prefill", i));
    for (int i = 0; i < absl::GetFlag(FLAGS_decode); ++i)
      BATON_RETURN_IF_ERROR(StartWorker("decode", i));
    return absl::OkStatus();
  }

  absl::Status StartRouter() {
    std::vector<std::string> argv = {
        BinaryDir() + "/baton-router",
        "--model=" + absl::GetFlag(FLAGS_model),
        "--topology=" + absl::GetFlag(FLAGS_topology),
        absl::StrCat("--listen=", absl::GetFlag(FLAGS_host), ":", absl::GetFlag(FLAGS_grpc_port)),
        absl::StrCat("--http-port=", absl::GetFlag(FLAGS_http_port)),
        "--health-port=0",
        "--port-file=" + dir_ + "/router.json",
        "--decode=" + absl::StrJoin(decode_addresses_, ",")};
    if (!prefill_addresses_.empty())
      argv.push_back("--prefill=" + absl::StrJoin(prefill_addresses_, ","));
    AppendGiven(RouterFlags(), &argv);
    AppendTls(process::TlsOptionsFromFlags().server, &argv);
    if (!TokenFileFlag().empty()) argv.push_back("--token-file=" + TokenFileFlag());
    return Start("router", argv, &router_);
  }

  // Names of children that have ended, or "".
  std::string FindDead() {
    for (ChildProcess& child : children_) {
      if (!child.Running()) return absl::StrCat(child.name(), " ended with ", child.exit_text());
    }
    return "";
  }

  absl::Status WaitUntilServing() {
    // The health port needs neither TLS nor a token.
    std::string dead;
    const bool serving =
        cli::WaitUntilServing(absl::StrCat(LocalHost(), ":", router_.health), "baton.v1.Generation",
                              absl::GetFlag(FLAGS_ready_timeout), [&] {
                                dead = FindDead();
                                return !g_stop && dead.empty();
                              });
    if (serving) return absl::OkStatus();
    if (!dead.empty()) return absl::UnavailableError(dead);
    return g_stop ? absl::CancelledError("stopped")
                  : absl::DeadlineExceededError("not serving within --ready-timeout");
  }

  // The children's port files have been read: nothing is left of them if this process is killed.
  void RemoveFiles() {
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }

  const Ports& router() const { return router_; }

 private:
  // Where the router is reached from here.
  static std::string LocalHost() {
    const std::string host = absl::GetFlag(FLAGS_host);
    return host == "0.0.0.0" || host == "[::]" ? "127.0.0.1" : host;
  }

  explicit Deployment(std::string dir) : dir_(std::move(dir)) {}

  absl::Status StartWorker(const std::string& role, int index) {
    const std::string name = absl::StrCat(role, "-", index);
    std::vector<std::string> argv = {absl::StrCat(BinaryDir(), "/baton-", role),
                                     "--model=" + absl::GetFlag(FLAGS_model),
                                     "--listen=127.0.0.1:0", "--http-port=0",
                                     absl::StrCat("--port-file=", dir_, "/", name, ".json")};
    AppendGiven(WorkerFlags(), &argv);
    const absl::optional<std::string> max_batch = absl::GetFlag(FLAGS_max_batch);
    if (role == "decode" && max_batch) argv.push_back("--max-batch=" + *max_batch);
    Ports ports;
    BATON_RETURN_IF_ERROR(Start(name, argv, &ports));
    (role == "prefill" ? prefill_addresses_ : decode_addresses_)
        .push_back(absl::StrCat("127.0.0.1:", ports.grpc));
    return absl::OkStatus();
  }

  // Starts a child and waits until it has written its ports: it listens from then on, though it may
  // still be loading.
  absl::Status Start(const std::string& name, const std::vector<std::string>& argv, Ports* ports) {
    BATON_ASSIGN_OR_RETURN(ChildProcess child, ChildProcess::Start(name, argv));
    children_.push_back(std::move(child));
    const std::string path = absl::StrCat(dir_, "/", name, ".json");
    const absl::Time deadline = absl::Now() + absl::GetFlag(FLAGS_ready_timeout);
    while (absl::Now() < deadline) {
      if (const std::optional<Ports> found = ReadPorts(path)) {
        *ports = *found;
        return absl::OkStatus();
      }
      if (!children_.back().Running())
        return absl::UnavailableError(
            absl::StrCat(name, " ended with ", children_.back().exit_text()));
      if (g_stop) return absl::CancelledError("stopped");
      absl::SleepFor(absl::Milliseconds(10));
    }
    return absl::DeadlineExceededError(
        absl::StrCat(name, " has not opened its port within --ready-timeout"));
  }

  const std::string dir_;
  std::vector<ChildProcess> children_;
  std::vector<std::string> prefill_addresses_;
  std::vector<std::string> decode_addresses_;
  Ports router_;
};

absl::Status Validate() {
  BATON_RETURN_IF_ERROR(
      process::CheckTls(process::TlsOptionsFromFlags().server, absl::GetFlag(FLAGS_host) + ":0"));
  if (absl::GetFlag(FLAGS_model).empty())
    return absl::InvalidArgumentError("--model: needs a Hugging Face directory or a GGUF file");
  const std::string topology = absl::GetFlag(FLAGS_topology);
  if (topology != "pd" && topology != "single") {
    return absl::InvalidArgumentError(
        absl::StrCat("--topology=\"", topology, "\": accepted are pd, single"));
  }
  if (absl::GetFlag(FLAGS_decode) < 1) return absl::InvalidArgumentError("--decode: at least 1");
  if (topology == "pd" && absl::GetFlag(FLAGS_prefill) < 1)
    return absl::InvalidArgumentError("--prefill: at least 1 in topology pd");
  return absl::OkStatus();
}

absl::Status WritePortFile(const Ports& ports) {
  const std::string path = absl::GetFlag(FLAGS_port_file);
  if (path.empty()) return absl::OkStatus();
  const std::string temporary = path + ".tmp";
  std::ofstream(temporary) << absl::StrCat("{\"grpc\": ", ports.grpc, ", \"http\": ", ports.http,
                                           "}\n");
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  return error ? absl::InternalError(absl::StrCat("--port-file=", path, ": ", error.message()))
               : absl::OkStatus();
}

absl::Status Serve() {
  BATON_RETURN_IF_ERROR(Validate());
  BATON_ASSIGN_OR_RETURN(const std::unique_ptr<Deployment> deployment, Deployment::Create());
  BATON_RETURN_IF_ERROR(deployment->StartWorkers());
  BATON_RETURN_IF_ERROR(deployment->StartRouter());
  BATON_RETURN_IF_ERROR(deployment->WaitUntilServing());
  deployment->RemoveFiles();
  BATON_RETURN_IF_ERROR(WritePortFile(deployment->router()));
  std::printf("serving: grpc %s:%d  http %s:%d  (Ctrl-C stops)\n",
              absl::GetFlag(FLAGS_host).c_str(), deployment->router().grpc,
              absl::GetFlag(FLAGS_host).c_str(), deployment->router().http);
  std::fflush(stdout);
  while (!g_stop) {
    if (const std::string dead = deployment->FindDead(); !dead.empty())
      return absl::UnavailableError(dead);
    absl::SleepFor(absl::Milliseconds(50));
  }
  return absl::OkStatus();
}

}  // namespace

int RunServe(int argc, char** argv) {
  const base::FlagsOutcome flags = base::HandleFlags(
      argc, argv, "baton serve --model PATH: starts a router, prefill and decode workers here.",
      {"cli/serve", "cli/model_flags", kAccessFlags, "engine/process/tls_flags"});
  if (!flags.go_on) return flags.exit_code;
  std::signal(SIGINT, RequestStop);
  std::signal(SIGTERM, RequestStop);
  const absl::Status status = Serve();
  if (status.ok() || absl::IsCancelled(status)) return 0;
  return PrintFailure("serve", status);
}

}  // namespace baton::cli
