// Tokenizer: load time, encode throughput on plain and hostile text, decode throughput. Needs
// scripts/get_tokenizer.sh.
//   build/tests/tokenizer_bench

#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "absl/strings/str_cat.h"

#include "engine/base/json.h"
#include "engine/base/log.h"
#include "engine/base/mapped_file.h"
#include "engine/text/tokenizer.h"

namespace baton::text {
namespace {

std::string Path(absl::string_view relative) {
  return absl::StrCat(BATON_SOURCE_DIR, "/", relative);
}

const Tokenizer& Qwen3() {
  static const Tokenizer* const kTokenizer = [] {
    auto tokenizer = Tokenizer::LoadHuggingFace(Path(".cache/tokenizer-qwen3"));
    BATON_CHECK(tokenizer.ok(),
                "run scripts/get_tokenizer.sh first: ", tokenizer.status().ToString());
    return tokenizer->release();
  }();
  return *kTokenizer;
}

// About `size` bytes of the project's own English prose or code.
std::string Repeated(const std::string& unit, size_t size) {
  std::string text;
  while (text.size() < size) text += unit;
  return text;
}

std::string English() {
  auto text = base::ReadSmallFile(Path("tests/data/tokenizer/README.md"), 1 << 20);
  BATON_CHECK(text.ok());
  return Repeated(*text, 200000);
}

std::string Prose() {
  return Repeated(
      "The harbour master walked down to the pier before sunrise, because the tide would not wait "
      "for anybody. Three boats "
      "had come in during the night, and their crews were still asleep; only the cook of the "
      "Aurora stood on deck, drinking "
      "coffee and watching the gulls. \"You're early,\" he said. \"I'm always early,\" she "
      "answered, and counted the crates: "
      "forty-two, as promised.\n\n",
      200000);
}

std::string Code() {
  auto text = base::ReadSmallFile(Path("engine/text/tokenizer.cc"), 1 << 20);
  BATON_CHECK(text.ok());
  return Repeated(*text, 200000);
}

void BM_Load(benchmark::State& state) {
  for (auto _ : state) {
    auto tokenizer = Tokenizer::LoadHuggingFace(Path(".cache/tokenizer-qwen3"));
    BATON_CHECK(tokenizer.ok());
    benchmark::DoNotOptimize(tokenizer);
  }
}
BENCHMARK(BM_Load)->Unit(benchmark::kMillisecond);

void Encode(benchmark::State& state, const std::string& text) {
  const Tokenizer& tokenizer = Qwen3();
  size_t num_ids = 0;
  for (auto _ : state) {
    const auto ids = tokenizer.Encode(text, SpecialPolicy::kParse);
    num_ids = ids.size();
    benchmark::DoNotOptimize(ids.data());
  }
  state.SetBytesProcessed(static_cast<int64_t>(text.size()) * state.iterations());
  state.counters["bytes"] = static_cast<double>(text.size());
  state.counters["ids"] = static_cast<double>(num_ids);
}
#define BATON_ENCODE_BENCH(name, text) \
  BENCHMARK_CAPTURE(Encode, name, text)->Unit(benchmark::kMillisecond)
BATON_ENCODE_BENCH(english_prose, Prose());
BATON_ENCODE_BENCH(english_markdown, English());
BATON_ENCODE_BENCH(code, Code());
BATON_ENCODE_BENCH(chinese,
                   Repeated("\xE6\xB8\xAF\xE5\x8F\xA3\xE7\xAE\xA1\xE7\x90\x86\xE5\x91\x98\xEF\xBC"
                            "\x8C\xE8\xAF\xB7\xE9\x97\xAE"
                            "\xE7\x8E\xB0\xE5\x9C\xA8\xE7\x9A\x84\xE6\xBD\xAE\xE4\xBD\x8D\xE6\x98"
                            "\xAF\xE5\xA4\x9A\xE5\xB0\x91\xE3\x80\x82",
                            200000));
BATON_ENCODE_BENCH(one_word_1e6, std::string(1000000, 'a'));
BATON_ENCODE_BENCH(spaces_1e6, std::string(1000000, ' '));
BATON_ENCODE_BENCH(unordered_marks_1e6, Repeated("\xCC\x81\xCC\xA7", 1000000));
BATON_ENCODE_BENCH(compact_json_1e6, Repeated("{\"k\":[1,2],\"abc\":\"xyz\"},", 1000000));

void BM_Decode(benchmark::State& state) {
  const Tokenizer& tokenizer = Qwen3();
  const auto ids = tokenizer.Encode(Prose(), SpecialPolicy::kParse);
  for (auto _ : state) {
    IncrementalDecoder decoder(tokenizer);
    for (const TokenId id : ids) benchmark::DoNotOptimize(decoder.Push(id));
  }
  state.SetItemsProcessed(static_cast<int64_t>(ids.size()) * state.iterations());
}
BENCHMARK(BM_Decode)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace baton::text

BENCHMARK_MAIN();
