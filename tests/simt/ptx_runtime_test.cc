// The instructions that ptx_runtime.h computes by itself, against CUDA's headers and C++'s own
// arithmetic; and that kernels of this program run from their PTX.

#include "tests/simt/ptx_runtime.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <random>

#include "gtest/gtest.h"
#include "tests/simt/conformance_kernels.h"
#include "tests/simt/device_array.h"
#include "tests/simt/fake_cudart.h"

namespace baton::simt {
namespace {

using namespace ptx;  // NOLINT: its names are what is tested

__global__ void KernelWithoutPtx() {}

TEST(PtxRuntimeTest, EveryKernelOfTheProgramRunsFromItsPtxOrNotAtAll) {
  ASSERT_TRUE(HasTranslated());
  EXPECT_EQ(Launch(KernelWithoutPtx, dim3(1), dim3(32), 0, nullptr),
            cudaErrorInvalidDeviceFunction);
  ClearDeviceError();
  DeviceArray<int> out(4);
  EXPECT_EQ(RunBarriers(out.data(), 1), cudaSuccess);
}

TEST(PtxRuntimeTest, SymbolsAreFoundWhateverACompilerAddsToAnAnonymousNamespace) {
  EXPECT_EQ(CanonicalSymbol("_ZN5baton12_GLOBAL__N_16KernelEPi"), "_ZN5batonanonymous6KernelEPi");
  EXPECT_EQ(CanonicalSymbol("_ZN5baton22_GLOBAL__N__0a1b_3_x_16KernelEPi"),
            CanonicalSymbol("_ZN5baton12_GLOBAL__N_16KernelEPi"));
  EXPECT_EQ(CanonicalSymbol("_Z6KernelPi"), "_Z6KernelPi");
  EXPECT_EQ(CanonicalSymbol("_ZN99_GLOBAL__N_1"), "_ZNanonymous");
}

TEST(PtxRuntimeTest, ParametersLieAtTheirAlignment) {
  ParameterBytes bytes;
  bytes.Append(uint8_t{1});
  bytes.Append(uint64_t{2});
  bytes.Append(uint16_t{3});
  bytes.Append(uint32_t{4});
  EXPECT_EQ(bytes.data()[0], 1);
  EXPECT_EQ(bytes.data()[8], 2);
  EXPECT_EQ(bytes.data()[16], 3);
  EXPECT_EQ(bytes.data()[20], 4);
}

TEST(PtxRuntimeTest, EveryCodeIsDecoded) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float half = __half2float(__half(__half_raw{static_cast<uint16_t>(code)}));
    if (std::isnan(half)) {
      ASSERT_TRUE(std::isnan(Decode<kF16>(code))) << code;
    } else {
      ASSERT_EQ(Decode<kF16>(code), half) << code;
      ASSERT_EQ((Encode<kF16, kRn>(half)), code);
      ASSERT_EQ((Encode<kF16, kRz>(half)), code);
    }
    const float bf16 = std::bit_cast<float>(code << 16);
    if (std::isnan(bf16)) continue;
    ASSERT_EQ(Decode<kBf16>(code), bf16) << code;
    ASSERT_EQ((Encode<kBf16, kRn>(bf16)), code);
  }
  for (uint32_t code = 0; code < 256; ++code) {
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(static_cast<uint8_t>(code), __NV_E4M3);
    EXPECT_EQ(HalvesOfE4m3x2(code << 8 | code), uint32_t{raw.x} << 16 | raw.x) << code;
  }
}

TEST(PtxRuntimeTest, RoundsToTheNearestCode) {
  std::mt19937 random(7);
  for (int i = 0; i < 200000; ++i) {
    const uint32_t bits = static_cast<uint32_t>(random());
    const float value = i % 2 == 0
                            ? std::bit_cast<float>(bits)
                            : std::ldexp(static_cast<float>(bits), static_cast<int>(i % 64) - 60);
    if (std::isnan(value)) continue;
    ASSERT_EQ((Encode<kF16, kRn>(value)), __half_raw(__float2half_rn(value)).x) << value;
    ASSERT_EQ((Encode<kF16, kRz>(value)), __half_raw(__float2half_rz(value)).x) << value;
    ASSERT_EQ((Encode<kBf16, kRn>(value)), __nv_bfloat16_raw(__float2bfloat16_rn(value)).x)
        << value;
    if (std::isinf(value)) continue;
    ASSERT_EQ((Encode<kE4m3, kRn>(value)), __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3))
        << value;
  }
}

TEST(PtxRuntimeTest, RoundsInEachDirection) {
  const auto third = [](float x, float y) { return x / y; };
  EXPECT_LT(Rounded<kRm>(third, 1.0f, 3.0f), Rounded<kRp>(third, 1.0f, 3.0f));
  EXPECT_EQ(Rounded<kRm>(third, -1.0f, 3.0f), -Rounded<kRp>(third, 1.0f, 3.0f));
  EXPECT_EQ(Rounded<kRz>(third, -1.0f, 3.0f), -Rounded<kRm>(third, 1.0f, 3.0f));
  EXPECT_EQ(1.0f / 3.0f, third(1.0f, 3.0f));  // and to the nearest again
  EXPECT_EQ(Saturate<uint8_t>(RoundToInteger<kRn>(2.5f)), 2);
  EXPECT_EQ(Saturate<int32_t>(RoundToInteger<kRz>(-2.5f)), -2);
  EXPECT_EQ(Saturate<int32_t>(RoundToInteger<kRm>(-2.5f)), -3);
  EXPECT_EQ(Saturate<int32_t>(RoundToInteger<kRp>(2.5f)), 3);
  EXPECT_EQ(Saturate<int32_t>(3e9f), 2147483647);
  EXPECT_EQ(Saturate<uint64_t>(-1.0), 0u);
  EXPECT_EQ(Saturate<int32_t>(kPoisonF32), 0);
}

TEST(PtxRuntimeTest, IntegerInstructions) {
  EXPECT_EQ(PermuteBytes(0x33221100u, 0x77665544u, 0x7610u), 0x77661100u);
  EXPECT_EQ(PermuteBytes(0x00000080u, 0, 0x1188u), 0x0000ffffu);
  EXPECT_EQ(InsertBits(0x5u, 0xffffffffu, 4, 4), 0xffffff5fu);
  EXPECT_EQ(InsertBits(0x3fu, 0u, 26, 6), 0xfc000000u);
  EXPECT_EQ(InsertBits(1u, 7u, 32, 4), 7u);
  EXPECT_EQ(InsertBits(uint64_t{1}, uint64_t{2}, 32, 32), uint64_t{0x100000002});
  EXPECT_EQ(ShiftLeft<uint32_t>(1, 32), 0u);
  EXPECT_EQ(ShiftRight<int32_t>(-8, 1), -4);
  EXPECT_EQ(ShiftRight<int32_t>(-8, 40), -1);
  EXPECT_EQ((Divide<int32_t>(-7, 2)), -3);
  EXPECT_EQ((Divide<int32_t>(std::numeric_limits<int32_t>::min(), -1)),
            std::numeric_limits<int32_t>::min());
  EXPECT_EQ((Remainder<int32_t>(-7, 2)), -1);
  EXPECT_EQ((Divide<uint32_t>(7, 0)), 0xffffffffu);
}

}  // namespace
}  // namespace baton::simt
