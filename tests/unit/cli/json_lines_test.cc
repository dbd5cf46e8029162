#include "cli/json_lines.h"

#include <cstdio>
#include <string>

#include <gtest/gtest.h>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"

#include "cli/commands.h"

namespace baton::cli {
namespace {

// What ProcessJsonLines writes for `input`.
std::string Process(const std::string& input, const RecordHandler& handler) {
  FILE* in = std::tmpfile();
  FILE* out = std::tmpfile();
  std::fwrite(input.data(), 1, input.size(), in);
  std::rewind(in);
  EXPECT_TRUE(ProcessJsonLines(in, out, handler).ok());
  std::string text(static_cast<size_t>(std::ftell(out)), ' ');
  std::rewind(out);
  EXPECT_EQ(std::fread(text.data(), 1, text.size(), out), text.size());
  std::fclose(in);
  std::fclose(out);
  return text;
}

TEST(JsonLinesTest, WritesOneLineForEachLineAndGoesOnAfterErrors) {
  const auto handler = [](const base::JsonValue& record) -> absl::StatusOr<std::string> {
    if (record.Find("bad")) return absl::InvalidArgumentError("no \"good\"\xFF");
    return std::string("\"ok\":1");
  };
  EXPECT_EQ(Process("{}\n{\"bad\":1}\n\nnonsense\n[]\n{}", handler),
            "{\"ok\":1}\n"
            "{\"error\":\"no \\\"good\\\"\xEF\xBF\xBD\"}\n"
            "{\"error\":\"json: the text ends where a value is needed at byte 0\"}\n"
            "{\"error\":\"json: unknown word at byte 0\"}\n"
            "{\"error\":\"a line is not a JSON object\"}\n"
            "{\"ok\":1}\n");
  EXPECT_EQ(Process("", handler), "");
}

TEST(JsonLinesTest, PrintsIds) {
  EXPECT_EQ(IdsMember({}), "\"ids\":[]");
  EXPECT_EQ(IdsMember({1, 151644}), "\"ids\":[1,151644]");
}

// Runs a command on `input` as its standard input; returns its standard output.
std::string RunCommand(int (*command)(int, char**),
                       std::vector<std::string> arguments,
                       const std::string& input,
                       int* exit_code) {
  const absl::FlagSaver saver;
  FILE* in = std::tmpfile();
  std::fwrite(input.data(), 1, input.size(), in);
  std::rewind(in);
  FILE* const old_stdin = stdin;
  stdin = in;
  arguments.insert(arguments.begin(), "command");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  testing::internal::CaptureStdout();
  *exit_code = command(static_cast<int>(argv.size()), argv.data());
  stdin = old_stdin;
  std::fclose(in);
  return testing::internal::GetCapturedStdout();
}

std::string TinyTokenizer() {
  return absl::StrCat(BATON_SOURCE_DIR, "/tests/data/tokenizer/tiny_qwen2.json");
}

TEST(TokenizeTest, ParsesControlTokensUnlessTheTextIsLiteral) {
  int exit_code = -1;
  const std::string input = "{\"text\":\"a<|im_end|>\"}\n{\"texts\":1}\n";
  const std::string parsed =
      RunCommand(RunTokenize, {"--tokenizer", TinyTokenizer()}, input, &exit_code);
  EXPECT_EQ(exit_code, 0);
  EXPECT_EQ(parsed.substr(0, parsed.find(',')), "{\"ids\":[64");
  EXPECT_EQ(std::count(parsed.begin(), parsed.end(), ','), 1);
  EXPECT_NE(parsed.find("\n{\"error\":\"the record has no \\\"text\\\"\"}\n"), std::string::npos);
  const std::string literal =
      RunCommand(RunTokenize, {"--tokenizer", TinyTokenizer(), "--literal"}, input, &exit_code);
  EXPECT_GT(std::count(literal.begin(), literal.end(), ','), 5);
}

TEST(RenderTest, RendersTheTemplateThatTheRecordNames) {
  int exit_code = -1;
  const std::string output = RunCommand(
      RunRender, {"--tokenizer", TinyTokenizer()},
      "{\"template\":\"chatml\",\"messages\":[{\"role\":\"user\",\"content\":\"\xC3\xA9\"}]}\n"
      "{\"template\":\"nope\",\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}\n{\"messages\":"
      "[]}\n",
      &exit_code);
  EXPECT_EQ(exit_code, 0);
  EXPECT_EQ(output.rfind("{\"prompt\":\"<|im_start|>user\\n\xC3\xA9<|im_end|>\\n\",\"ids\":[", 0),
            0u)
      << output;
  EXPECT_NE(
      output.find("{\"error\":\"chat template \\\"nope\\\" is not known; accepted are qwen3, "),
      std::string::npos);
  EXPECT_NE(output.find("name one with --chat-template"), std::string::npos);
}

TEST(TokenizeTest, ABadTokenizerStopsTheStart) {
  int exit_code = 0;
  EXPECT_EQ(RunCommand(RunTokenize, {}, "{}\n", &exit_code), "");
  EXPECT_EQ(exit_code, 2);
  RunCommand(RunRender, {"--tokenizer", "/nowhere"}, "{}\n", &exit_code);
  EXPECT_EQ(exit_code, 2);
}

}  // namespace
}  // namespace baton::cli
