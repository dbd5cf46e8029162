#include "tests/bench/probes.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "engine/base/buffer.h"
#include "engine/ops/cpu/isa.h"

namespace baton::tests {
namespace {

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The best of several short runs: others may use the machine too.
template <typename F>
double BestRate(double work, F f) {
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double start = Seconds();
    f();
    best = std::max(best, work / (Seconds() - start));
  }
  return best;
}

constexpr int kLoops = 1 << 19;

__attribute__((target("avx2,fma"))) float FmaLoop256() {
  __m256 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm256_set1_ps(0.5f + i);
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (int n = 0; n < kLoops; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm256_fmadd_ps(sums[i], a, b);
  }
  for (int i = 1; i < 12; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  return _mm256_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f"))) float FmaLoop512() {
  __m512 sums[12];
  for (int i = 0; i < 12; ++i) sums[i] = _mm512_set1_ps(0.5f + i);
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (int n = 0; n < kLoops; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sums[i] = _mm512_fmadd_ps(sums[i], a, b);
  }
  for (int i = 1; i < 12; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  return _mm512_cvtss_f32(sums[0]);
}

// Four accumulators, as a GEMM has. Tile data is zero: the speed does not depend on it.
void AmxLoop() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  __asm__ volatile("ldtilecfg %0" : : "m"(config));
  __asm__ volatile(
      "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
      "tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7" ::
          : "memory");
  for (int n = 0; n < kLoops / 16; ++n) {
    __asm__ volatile(
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::
            : "memory");
  }
  __asm__ volatile("tilerelease" ::: "memory");
}

// With and without prefetch: which is faster depends on the machine.
template <bool kPrefetch>
__attribute__((target("avx2"))) uint64_t SumBytes(const uint8_t* data, size_t size) {
  __m256i sums[4] = {};
  for (size_t i = 0; i < size; i += 128) {
    if constexpr (kPrefetch) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i + 2048), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(data + i + 2112), _MM_HINT_T0);
    }
    for (int k = 0; k < 4; ++k) {
      sums[k] = _mm256_add_epi64(
          sums[k], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32 * k)));
    }
  }
  const __m256i sum =
      _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
  uint64_t lanes[4];
  std::memcpy(lanes, &sum, sizeof(lanes));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

}  // namespace

double FmaPeakFlops() {
  volatile float sink = 0;
  const ops::cpu::CpuFeatures& features = ops::cpu::DetectedFeatures();
  if (features.avx512) return BestRate(kLoops * 12.0 * 32, [&] { sink = FmaLoop512(); });
  if (features.avx2) return BestRate(kLoops * 12.0 * 16, [&] { sink = FmaLoop256(); });
  return 0;
}

double AmxPeakFlops() {
  if (!ops::cpu::DetectedFeatures().amx) return 0;
  return BestRate(kLoops / 16 * 4.0 * 16 * 16 * 32 * 2, [] { AmxLoop(); });
}

double ReadBytesPerSecond(int num_threads) {
  constexpr size_t kBytes = size_t{256} << 20;
  absl::StatusOr<base::Buffer> buffer = base::Buffer::Allocate(kBytes * num_threads);
  if (!buffer.ok() || !ops::cpu::DetectedFeatures().avx2) return 0;
  std::memset(buffer->data(), 1, buffer->size());
  volatile uint64_t sink = 0;
  const auto read = [&](uint64_t (*sum)(const uint8_t*, size_t)) {
    return BestRate(static_cast<double>(buffer->size()), [&] {
      std::vector<std::thread> threads;
      for (int i = 1; i < num_threads; ++i)
        threads.emplace_back([&, i] { sink = sum(buffer->data() + i * kBytes, kBytes); });
      sink = sum(buffer->data(), kBytes);
      for (std::thread& thread : threads) thread.join();
    });
  };
  return std::max(read(&SumBytes<true>), read(&SumBytes<false>));
}

}  // namespace baton::tests
