// `baton`, the operator's tool: one file a command.

#include <cstdio>
#include <cstring>

#include "absl/strings/string_view.h"

#include "cli/commands.h"
#include "engine/base/version.h"

namespace baton::cli {
namespace {

struct Command {
  const char* name;
  int (*run)(int argc, char** argv);
  const char* help;
};

constexpr Command kCommands[] = {
    {"serve", RunServe, "start a router, prefill and decode workers on this machine"},
    {"generate", RunGenerate, "one raw prompt, answer streamed"},
    {"chat", RunChat, "a conversation, answers streamed"},
    {"status", RunStatus, "workers, load, KV use and transports"},
    {"bench", RunBench, "load on a running router, and what its users would have seen"},
    {"kv-size", RunKvSize, "memory that a model's KV cache takes"},
    {"check-config", RunCheckConfig, "what cannot hold in a configuration"},
    {"sim", RunSim, "what a deployment would do with a trace, in virtual time"},
    {"tokenize", RunTokenize, "JSON Lines {\"text\":..} -> {\"ids\":[..]}"},
    {"render", RunRender, "JSON Lines of chat records -> {\"prompt\":..,\"ids\":..}"},
};

int PrintHelp(FILE* out) {
  std::fprintf(out,
               "baton %s: serves Qwen3-family models with separate prefill and decode "
               "workers.\n\nCommands:\n",
               base::kVersion);
  for (const Command& command : kCommands)
    std::fprintf(out, "  %-12s %s\n", command.name, command.help);
  std::fprintf(out, "\nbaton COMMAND --help lists its flags.\n");
  return out == stdout ? 0 : 2;
}

int Main(int argc, char** argv) {
  if (argc < 2) return PrintHelp(stderr);
  const absl::string_view word = argv[1];
  if (word == "--help" || word == "help") return PrintHelp(stdout);
  if (word == "--version" || word == "version") return std::printf("baton %s\n", base::kVersion), 0;
  for (const Command& command : kCommands) {
    if (word == command.name) return command.run(argc - 1, argv + 1);
  }
  std::fprintf(stderr, "unknown command \"%s\"\n", argv[1]);
  return PrintHelp(stderr);
}

}  // namespace
}  // namespace baton::cli

int main(int argc, char** argv) { return baton::cli::Main(argc, argv); }
