// Speed of the operations of the CPU backend: FLOP/s and percent of the FMA peak, or bytes/s and
// percent of a plain read, both measured in this process at start. Arguments: threads, tokens.
// BATON_CPU_ISA caps the level.

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "benchmark/benchmark.h"
#include "engine/base/buffer.h"
#include "engine/ops/backend.h"
#include "engine/ops/canonical_math.h"
#include "tests/bench/probes.h"

namespace baton::tests {
namespace {

using ops::ActivationKind;
using ops::WeightDtype;

double PeakFlops() {
  static const double peak = FmaPeakFlops();
  return peak;
}

double ReadRate(int num_threads) {
  static double rates[64] = {};
  if (rates[num_threads] == 0) rates[num_threads] = ReadBytesPerSecond(num_threads);
  return rates[num_threads];
}

std::unique_ptr<ops::Backend> Make(WeightDtype dtype, int num_threads) {
  ops::BackendOptions options;
  options.num_threads = num_threads;
  return *ops::CreateBackend("cpu", dtype, options);
}

std::unique_ptr<ops::Matrix> Weights(ops::Backend* backend, int rows, int cols, bool interleave) {
  ops::MatrixSource source;
  source.rows = rows;
  source.cols = cols;
  source.read_row = [cols](int row, float* out) {
    for (int k = 0; k < cols; ++k)
      out[k] = static_cast<float>((row * 131 + k * 37) % 255 - 127) / 512.0f;
  };
  return *backend->Pack(source, interleave);
}

// A normed input of `tokens` rows.
struct Rows {
  Rows(ops::Backend* backend, int tokens, int width) {
    residual = *backend->NewActivation(ActivationKind::kResidual, tokens, width);
    input = *backend->NewActivation(ActivationKind::kLinearInput, tokens, width);
    const auto table = Weights(backend, 64, width, false);
    std::vector<int32_t> ids(tokens);
    for (int t = 0; t < tokens; ++t) ids[t] = t % 64;
    weight.assign(width, 1.0f);
    (void)backend->Embed(*table, ids, residual.get());
    (void)backend->RmsNorm(*residual, tokens, weight, 1e-6f, input.get());
  }
  std::unique_ptr<ops::Activation> residual, input;
  std::vector<float> weight;
};

void Report(benchmark::State& state, double flops, double bytes, int num_threads) {
  using benchmark::Counter;
  state.counters["GFLOP/s"] = Counter(flops * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["peak%"] =
      Counter(100 * flops / (PeakFlops() * num_threads), Counter::kIsIterationInvariantRate);
  state.counters["GB/s"] = Counter(bytes * 1e-9, Counter::kIsIterationInvariantRate);
  state.counters["read%"] =
      Counter(100 * bytes / ReadRate(num_threads), Counter::kIsIterationInvariantRate);
}

// x [T, K] * W^T, several matrices in turn, together larger than the caches.
void BM_Linear(benchmark::State& state, WeightDtype dtype, int rows, int cols) {
  const int num_threads = static_cast<int>(state.range(0)),
            tokens = static_cast<int>(state.range(1));
  const auto backend = Make(dtype, num_threads);
  const Rows x(backend.get(), tokens, cols);
  std::vector<std::unique_ptr<ops::Matrix>> weights;
  size_t total = 0;
  while (total < (size_t{160} << 20) && weights.size() < 64) {
    weights.push_back(Weights(backend.get(), rows, cols, false));
    total += weights.back()->bytes();
    if (tokens > 16 && weights.size() == 4) break;
  }
  const auto out = *backend->NewActivation(ActivationKind::kProjected, tokens, rows);
  size_t next = 0;
  for (auto _ : state) {
    (void)backend->QkvProject(*x.input, tokens, *weights[next++ % weights.size()], {}, out.get());
  }
  Report(state, 2.0 * tokens * rows * cols, static_cast<double>(weights[0]->bytes()), num_threads);
}

// Causal attention of `tokens` queries at the end of `context` tokens: 16 query heads, 8 KV heads
// of 128.
void BM_Attention(benchmark::State& state, kv::KvFormat format) {
  const int num_threads = static_cast<int>(state.range(0)),
            tokens = static_cast<int>(state.range(1));
  const int context = static_cast<int>(state.range(2));
  constexpr int kHeads = 16, kKvHeads = 8, kDim = 128;
  const auto backend = Make(WeightDtype::kBf16, num_threads);
  const int num_blocks = kv::BlocksFor(context);
  const kv::KvLayout layout = {.num_layers = 1,
                               .num_kv_heads = kKvHeads,
                               .head_dim = kDim,
                               .num_blocks = num_blocks,
                               .format = format};
  base::Buffer pool = *base::Buffer::Allocate(layout.pool_bytes());
  for (size_t i = 0; i < pool.size(); ++i) pool.data()[i] = static_cast<uint8_t>(i * 7 % 48);
  const std::vector<float> scales(2 * kKvHeads, 0.25f), weight(kDim, 1.0f);
  const auto qkv =
      *backend->NewActivation(ActivationKind::kProjected, tokens, (kHeads + 2 * kKvHeads) * kDim);
  const auto out = *backend->NewActivation(ActivationKind::kLinearInput, tokens, kHeads * kDim);
  std::vector<kv::BlockId> table(num_blocks);
  for (int i = 0; i < num_blocks; ++i) table[i] = i;
  const std::vector<ops::SequenceView> views = {
      {.query_start = 0, .query_len = tokens, .context_len = context, .block_table = table}};
  const ops::PagedAttentionArgs args = {
      .qkv = qkv.get(),
      .num_tokens = tokens,
      .num_heads = kHeads,
      .num_kv_heads = kKvHeads,
      .head_dim = kDim,
      .softmax_scale = 0.088f,
      .sequences = views,
      .cache = {.layout = &layout, .layer_base = pool.data(), .scales = scales},
      .out = out.get()};
  for (auto _ : state) (void)backend->PagedAttention(args);
  const double seen = tokens * (context - (tokens - 1) / 2.0);
  Report(state, 4.0 * seen * kHeads * kDim, static_cast<double>(layout.pool_bytes()), num_threads);
}

void BM_RmsNorm(benchmark::State& state) {
  const int num_threads = static_cast<int>(state.range(0)),
            tokens = static_cast<int>(state.range(1));
  const auto backend = Make(WeightDtype::kBf16, num_threads);
  const Rows x(backend.get(), tokens, 1024);
  for (auto _ : state) (void)backend->RmsNorm(*x.residual, tokens, x.weight, 1e-6f, x.input.get());
  Report(state, 5.0 * tokens * 1024, 8.0 * tokens * 1024, num_threads);
}

// One fork and join, warm.
void BM_Barrier(benchmark::State& state) {
  const auto backend = Make(WeightDtype::kF32, static_cast<int>(state.range(0)));
  const Rows x(backend.get(), 8, 16);
  for (auto _ : state) (void)backend->RmsNorm(*x.residual, 8, x.weight, 1e-6f, x.input.get());
}

void LinearArgs(benchmark::internal::Benchmark* b) {
  b->ArgNames({"threads", "tokens"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  for (const int num_threads : {1, 2}) {
    for (const int tokens : {1, 2, 8, 64, 512}) b->Args({num_threads, tokens});
  }
}

void AttentionArgs(benchmark::internal::Benchmark* b) {
  b->ArgNames({"threads", "tokens", "context"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  for (const int num_threads : {1, 2})
    b->Args({num_threads, 512, 512})->Args({num_threads, 512, 2048})->Args({num_threads, 1, 2048});
}

BENCHMARK_CAPTURE(BM_Linear, bf16_6144x1024, WeightDtype::kBf16, 6144, 1024)->Apply(LinearArgs);
BENCHMARK_CAPTURE(BM_Linear, bf16_1024x3072, WeightDtype::kBf16, 1024, 3072)->Apply(LinearArgs);
BENCHMARK_CAPTURE(BM_Linear, f32_6144x1024, WeightDtype::kF32, 6144, 1024)->Apply(LinearArgs);
BENCHMARK_CAPTURE(BM_Linear, int8_6144x1024, WeightDtype::kInt8, 6144, 1024)->Apply(LinearArgs);
BENCHMARK_CAPTURE(BM_Linear, q4_6144x1024, WeightDtype::kQ4, 6144, 1024)->Apply(LinearArgs);
BENCHMARK_CAPTURE(BM_Attention, fp8, kv::KvFormat::kFp8)->Apply(AttentionArgs);
BENCHMARK_CAPTURE(BM_Attention, bf16, kv::KvFormat::kBf16)->Apply(AttentionArgs);
BENCHMARK(BM_RmsNorm)
    ->ArgNames({"threads", "tokens"})
    ->Args({1, 512})
    ->Args({2, 512})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(BM_Barrier)->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();

}  // namespace
}  // namespace baton::tests

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  std::printf(
      "probes: FMA %.1f GFLOP/s a thread, AMX bf16 %.1f, read %.1f GB/s (1 thread), %.1f (2)\n",
      baton::tests::FmaPeakFlops() * 1e-9, baton::tests::AmxPeakFlops() * 1e-9,
      baton::tests::ReadBytesPerSecond(1) * 1e-9, baton::tests::ReadBytesPerSecond(2) * 1e-9);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
