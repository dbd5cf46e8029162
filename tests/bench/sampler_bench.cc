// Logits to a token over Qwen3's 151,936 entries, one thread: what the sampler adds to a decode
// step. Two distributions: a peaked one, as trained models give, and a flat one, in which nearly
// every token stays a candidate.
//   build/tests/sampler_bench

#include <cmath>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include "engine/base/log.h"
#include "engine/runtime/sampler.h"

namespace baton::runtime {
namespace {

constexpr int kVocab = 151936;

std::vector<float> Logits(bool peaked) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> noise(0, peaked ? 2.5f : 0.6f);
  std::vector<float> logits(kVocab);
  for (float& logit : logits) logit = noise(random);
  for (int i = 0; peaked && i < 40; ++i)
    logits[random() % kVocab] = 18.0f - 0.3f * static_cast<float>(i);
  return logits;
}

struct Case {
  float temperature = 0.8f, top_p = 1, min_p = 0, repetition_penalty = 1;
  int32_t top_k = 0, logprobs = -1;
};

void BM_Sample(benchmark::State& state, const Case& c) {
  const std::vector<float> source = Logits(state.range(0) != 0);
  SamplingParams params;
  params.temperature = c.temperature;
  params.top_p = c.top_p;
  params.min_p = c.min_p;
  params.top_k = c.top_k;
  params.logprobs = c.logprobs;
  params.repetition_penalty = c.repetition_penalty;
  params.seed = 7;
  TokenCounts counts;
  for (uint32_t id = 0; c.repetition_penalty != 1 && id < 1000; ++id) counts.AddOutput(id * 17);
  Sampler sampler(kVocab, kVocab);
  std::vector<float> logits(kVocab);
  uint32_t position = 0;
  for (auto _ : state) {
    state.PauseTiming();
    logits = source;  // the sampler changes them
    state.ResumeTiming();
    const auto token = sampler.Sample(params, 0, ++position, 100, counts, absl::MakeSpan(logits));
    BATON_CHECK(token.ok());
    benchmark::DoNotOptimize(token->id);
  }
}

#define BATON_SAMPLE(name, ...)                         \
  BENCHMARK_CAPTURE(BM_Sample, name, Case{__VA_ARGS__}) \
      ->ArgName("peaked")                               \
      ->Arg(1)                                          \
      ->Arg(0)                                          \
      ->Unit(benchmark::kMicrosecond)
BATON_SAMPLE(greedy, .temperature = 0);
BATON_SAMPLE(temperature);
BATON_SAMPLE(top_k, .top_k = 50);
BATON_SAMPLE(top_p, .top_p = 0.95f);
BATON_SAMPLE(min_p, .min_p = 0.05f);
BATON_SAMPLE(qwen3, .temperature = 0.6f, .top_p = 0.95f, .top_k = 20);
BATON_SAMPLE(penalties, .top_p = 0.95f, .repetition_penalty = 1.1f);
BATON_SAMPLE(logprobs, .logprobs = 5);

}  // namespace
}  // namespace baton::runtime

BENCHMARK_MAIN();
