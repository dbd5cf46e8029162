// Every CUDA name and wrapper that kernels use, against values worked out here from CUDA's own
// definitions. Links with the emulator here and with cudart on a device: a difference is a bug of
// the emulator.

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/fp8.h"
#include "gtest/gtest.h"
#include "tests/simt/conformance_kernels.h"
#include "tests/simt/device_array.h"
#include "tests/simt/schedules.h"

namespace baton::simt {
namespace {

class Conformance : public ScheduleTest {};
BATON_INSTANTIATE_SCHEDULES(Conformance);

TEST_P(Conformance, Shuffles) {
  DeviceArray<int> out(kShuffleResults * 32);
  ASSERT_EQ(RunShuffles(out.data()), cudaSuccess);
  const std::vector<int> got = out.Get();
  for (int lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(got[lane], 100 + (3 * lane + 1) % 32);
    EXPECT_EQ(got[32 + lane], 100 + (lane >= 3 ? lane - 3 : lane));
    EXPECT_EQ(got[64 + lane], 100 + (lane + 5 < 32 ? lane + 5 : lane));
    EXPECT_EQ(got[96 + lane], 100 + (lane ^ 9));
    EXPECT_EQ(got[128 + lane], 100 + (lane ^ 2));
    EXPECT_EQ(got[160 + lane], 100 + lane / 8 * 8 + (lane + 1) % 8);
  }
}

TEST_P(Conformance, VotesMatchesReductions) {
  DeviceArray<unsigned> out(10 * 32);
  out.Fill();
  ASSERT_EQ(RunVotes(out.data()), cudaSuccess);
  const std::vector<unsigned> got = out.Get();
  unsigned ballot = 0, sum = 0, all_or = 0, all_xor = 0, all_and = ~0u;
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned value = lane * 7 % 5;
    if (lane % 3 == 0) ballot |= 1u << lane;
    sum += value;
    all_or |= value;
    all_xor ^= value;
    all_and &= value | 8;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    EXPECT_EQ(got[lane], ballot);
    EXPECT_EQ(got[32 + lane], 1u);
    EXPECT_EQ(got[64 + lane], 0u);
    unsigned same = 0;
    for (unsigned other = 1; other < 32; other += 2)
      if (other * 7 % 5 == lane * 7 % 5) same |= 1u << other;
    if (lane % 2 == 1) {
      EXPECT_EQ(got[96 + lane], same) << lane;
    }
    EXPECT_EQ(got[128 + lane], sum);
    EXPECT_EQ(got[160 + lane], 0u);
    EXPECT_EQ(got[192 + lane], 4u);
    EXPECT_EQ(got[224 + lane], all_and);
    EXPECT_EQ(got[256 + lane], all_or);
    EXPECT_EQ(got[288 + lane], all_xor);
  }
}

TEST_P(Conformance, Barriers) {
  DeviceArray<int> out(4 * 3);
  ASSERT_EQ(RunBarriers(out.data(), 3), cudaSuccess);
  const std::vector<int> got = out.Get();
  for (int block = 0; block < 3; ++block) {
    EXPECT_EQ(got[4 * block], 40);
    EXPECT_EQ(got[4 * block + 1], 0);
    EXPECT_EQ(got[4 * block + 2] != 0, true);
    EXPECT_EQ(got[4 * block + 3], 32);
  }
}

// Small integers: exact in every type, so the tensor core's order of sums does not matter.
template <typename Encode>
void CheckMma(MmaKind kind, int depth, int element_bytes, Encode encode) {
  std::mt19937 random(7);
  const auto small = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };
  std::vector<float> a(16 * depth), b(8 * depth), c(128);
  for (float& value : a) value = small();
  for (float& value : b) value = small();
  for (float& value : c) value = small() / 4;
  const auto bytes = [&](const std::vector<float>& values) {
    std::vector<uint8_t> out;
    for (const float value : values) {
      const uint32_t bits = encode(value);
      for (int i = 0; i < element_bytes; ++i) out.push_back(static_cast<uint8_t>(bits >> (8 * i)));
    }
    return out;
  };
  DeviceArray<uint8_t> device_a(bytes(a)), device_b(bytes(b));
  DeviceArray<float> device_c(c), device_d(128);
  ASSERT_EQ(RunMma(kind, device_a.data(), device_b.data(), device_c.data(), device_d.data()),
            cudaSuccess);
  const std::vector<float> got = device_d.Get();
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      double want = c[m * 8 + n];
      for (int k = 0; k < depth; ++k) want += double{a[m * depth + k]} * b[n * depth + k];
      EXPECT_EQ(got[m * 8 + n], want) << m << "," << n;
    }
  }
}

TEST_P(Conformance, TensorCore) {
  CheckMma(MmaKind::kBf16, 16, 2, [](float x) { return uint32_t{base::Bf16FromFloat(x)}; });
  CheckMma(MmaKind::kF16, 16, 2, [](float x) {  // integers up to 8
    if (x == 0) return 0u;
    int exponent;
    const float fraction = std::frexp(std::fabs(x), &exponent);
    return (x < 0 ? 0x8000u : 0u) | static_cast<uint32_t>(exponent + 14) << 10 |
           static_cast<uint32_t>((fraction * 2 - 1) * 1024);
  });
  CheckMma(MmaKind::kE4m3, 32, 1, [](float x) { return uint32_t{base::Fp8FromFloat(x)}; });
}

TEST_P(Conformance, LdMatrix) {
  std::vector<uint16_t> in(32 * 8);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint16_t>(i * 257 + 3);
  DeviceArray<uint16_t> device_in(in);
  DeviceArray<uint32_t> out(2 * 32 * 4);
  ASSERT_EQ(RunLdMatrix(device_in.data(), out.data()), cudaSuccess);
  const std::vector<uint32_t> got = out.Get();
  const auto element = [&](int matrix, int row, int column) {
    return uint32_t{in[(8 * matrix + row) * 8 + column]};
  };
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      EXPECT_EQ(got[lane * 4 + m], element(m, row, column) | element(m, row, column + 1) << 16);
      EXPECT_EQ(got[128 + lane * 4 + m], element(m, column, row) | element(m, column + 1, row)
                                                                       << 16);
    }
  }
}

TEST_P(Conformance, AsyncCopies) {
  std::vector<float> in(4 * 32 * 7);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i) + 0.5f;
  DeviceArray<float> device_in(in), out(in.size());
  for (const uint32_t valid : {16u, 8u, 0u}) {
    ASSERT_EQ(RunAsyncCopy(device_in.data(), out.data(), static_cast<int>(in.size()), valid),
              cudaSuccess);
    const std::vector<float> got = out.Get();
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(got[i], i % 4 * 4 < valid ? in[i] : 0.0f);
  }
}

TEST_P(Conformance, Atomics) {
  DeviceArray<int> out(std::vector<int>(7, 0));
  DeviceArray<float> sum(std::vector<float>{0});
  ASSERT_EQ(RunAtomics(out.data(), sum.data(), 3), cudaSuccess);
  const std::vector<int> got = out.Get();
  EXPECT_EQ(got[0], 191 * 192 / 2);
  EXPECT_EQ(got[1], 191);
  EXPECT_EQ(got[2], -191);
  EXPECT_EQ(got[3], 0x7fffffff);
  EXPECT_EQ(got[4], 1);
  EXPECT_EQ(got[5], 1);
  EXPECT_EQ(got[6], 7);
  EXPECT_EQ(sum.Get()[0], 96.0f);
}

TEST_P(Conformance, DynamicShared) {
  DeviceArray<int> out(64);
  const int bytes = 100 * 1024;
  ASSERT_EQ(RunDynamicShared(out.data(), bytes), cudaSuccess);
  const std::vector<int> got = out.Get();
  for (int i = 0; i < 64; ++i) EXPECT_EQ(got[i], bytes / 4 - 1 - i);
}

TEST_P(Conformance, ConversionsAndApproximations) {
  std::vector<float> in = {0,     1,       -1,     0.3f,     447,     448,   464,   1e9f,
                           -1e9f, 0.0009f, 0.001f, 0.00098f, 2.5e-3f, 15.5f, 17.0f, -0.07f};
  std::mt19937 random(3);
  while (in.size() < 256) in.push_back(std::ldexp(random() % 4096 / 4096.0f - 0.5f, random() % 12));
  DeviceArray<float> device_in(in), exp2(256), rsqrt(256), decoded(256);
  DeviceArray<uint8_t> codes(256);
  ASSERT_EQ(RunConversions(device_in.data(), 256, codes.data(), exp2.data(), rsqrt.data(),
                           decoded.data()),
            cudaSuccess);
  const std::vector<uint8_t> got_codes = codes.Get();
  const std::vector<float> got_exp2 = exp2.Get(), got_rsqrt = rsqrt.Get(), values = decoded.Get();
  constexpr float kUlps = 4 * 0x1p-23f;  // of the hardware's ex2 and rsqrt
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(got_codes[i], base::Fp8FromFloat(in[i])) << in[i];
    const float power = std::exp2(in[i]);
    if (std::isfinite(power) && power > 1e-37f) {
      EXPECT_NEAR(got_exp2[i], power, power * kUlps);
    }
    if (in[i] != 0) {
      const float root = 1 / std::sqrt(std::fabs(in[i]));
      EXPECT_NEAR(got_rsqrt[i], root, root * kUlps);
    }
  }
  for (int code = 0; code < 256; ++code) {
    const float want = base::FloatFromFp8(static_cast<uint8_t>(code));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(values[code]));
    } else {
      EXPECT_EQ(values[code], want) << code;
    }
  }
}

}  // namespace
}  // namespace baton::simt
