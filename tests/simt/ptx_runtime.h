#pragma once

// What C++ made of PTX (ptx_to_cpp.py) is written in: registers as variables of their type, and the
// instructions that are more than an operator. Numbers are converted here by arithmetic of its own,
// not by CUDA's headers, which the same kernels use when they run from their source.

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "tests/simt/cuda_names.h"
#include "tests/simt/simt.h"
#include "tests/simt/translated.h"

namespace baton::simt::ptx {

// What a register holds before it is written.
inline constexpr float kPoisonF32 = std::numeric_limits<float>::quiet_NaN();
inline constexpr double kPoisonF64 = std::numeric_limits<double>::quiet_NaN();

// A register's bits as another type: the same size, or an integer made shorter or longer.
template <typename To, typename From>
inline To As(From value) {
  if constexpr (sizeof(To) == sizeof(From)) {
    return std::bit_cast<To>(value);
  } else {
    static_assert(std::is_integral_v<To> && std::is_integral_v<From>);
    return static_cast<To>(value);
  }
}

// ---- Memory -------------------------------------------------------------------------------------
// A generic address is the host's. Shared memory is addressed by offsets into the block's window.

inline unsigned char* Pointer(uint64_t address) {
  return reinterpret_cast<unsigned char*>(address);
}
inline unsigned char* Shared(uint32_t offset) {
  return reinterpret_cast<unsigned char*>(shared_window) + offset;
}
inline uint64_t Generic(uint64_t offset) { return reinterpret_cast<uint64_t>(Shared(offset)); }
inline uint64_t SharedOffset(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(shared_window);
}
inline uint32_t SharedOffset(const void* address) {
  return static_cast<uint32_t>(SharedOffset(reinterpret_cast<uint64_t>(address)));
}
inline uint32_t StaticShared(SharedDeclaration* declaration, size_t bytes, size_t alignment) {
  return SharedOffset(SharedMemory(declaration, bytes, alignment));
}

inline void CheckAligned(const void* address, size_t bytes, const Site& site) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
    Fail(site, "an access of %zu bytes is misaligned", bytes);
}
template <typename T, int kCount>
inline std::array<T, kCount> Load(const unsigned char* address, Site site = Site::current()) {
  CheckAligned(address, sizeof(T) * kCount, site);
  std::array<T, kCount> values;
  for (int i = 0; i < kCount; ++i) values[i] = reinterpret_cast<const T*>(address)[i];
  return values;
}
template <typename T, int kCount>
inline void Store(unsigned char* address,
                  std::array<T, kCount> values,
                  Site site = Site::current()) {
  CheckAligned(address, sizeof(T) * kCount, site);
  for (int i = 0; i < kCount; ++i) reinterpret_cast<T*>(address)[i] = values[i];
}
// Words that another device reads and writes.
template <typename T>
inline T LoadAcquire(const unsigned char* address, Site site = Site::current()) {
  CheckAligned(address, sizeof(T), site);
  const T value = __atomic_load_n(reinterpret_cast<const T*>(address), __ATOMIC_ACQUIRE);
  LookedAtPeer();
  return value;
}
template <typename T>
inline void StoreRelease(unsigned char* address, T value, Site site = Site::current()) {
  CheckAligned(address, sizeof(T), site);
  __atomic_store_n(reinterpret_cast<T*>(address), value, __ATOMIC_RELEASE);
}
template <typename T, typename F>
inline T Atomic(unsigned char* address, F update, Site site = Site::current()) {
  CheckAligned(address, sizeof(T), site);
  return AtomicUpdate(reinterpret_cast<T*>(address), update);
}

// ---- Integers -----------------------------------------------------------------------------------

template <typename T>
inline T Divide(T a, T b) {  // by 0: any value, on the device too
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(0 - uint64_t(a));
  return static_cast<T>(a / b);
}
template <typename T>
inline T Remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}
template <typename T>
inline T ShiftLeft(T value, uint32_t count) {
  return count >= 8 * sizeof(T) ? T{0} : static_cast<T>(static_cast<uint64_t>(value) << count);
}
template <typename T>
inline T ShiftRight(T value, uint32_t count) {
  if (count >= 8 * sizeof(T)) return value < T{0} ? static_cast<T>(-1) : T{0};
  return static_cast<T>(value >> count);
}
// The low `length` bits of `a` at bit `position` of `b`.
template <typename T>
inline T InsertBits(T a, T b, uint32_t position, uint32_t length) {
  const uint32_t size = 8 * sizeof(T);
  position &= 0xff;
  length = std::min(length & 0xff, position >= size ? 0 : size - position);
  if (length == 0) return b;
  const T mask = static_cast<T>((length == size ? ~T{0} : (T{1} << length) - 1) << position);
  return static_cast<T>((b & ~mask) | (static_cast<T>(a << position) & mask));
}
// Four bytes of the eight of a (low) and b; bit 3 of a selector: its sign, eight times.
inline uint32_t PermuteBytes(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t both = uint64_t{b} << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i);
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (selector & 7))) & 0xff;
    if ((selector & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}

// ---- Rounding and formats -----------------------------------------------------------------------

enum Mode { kRn, kRz, kRm, kRp };

constexpr int FenvMode(Mode mode) {
  return mode == kRz   ? FE_TOWARDZERO
         : mode == kRm ? FE_DOWNWARD
         : mode == kRp ? FE_UPWARD
                       : FE_TONEAREST;
}
// operation(values...) in a direction; the values come from memory and the result goes there, so
// that no compiler moves the operation out.
template <Mode kMode, typename F, typename T, typename... Rest>
[[gnu::noinline]] T Rounded(F operation, T first, Rest... rest) {
  volatile T held = first;
  std::fesetround(FenvMode(kMode));
  volatile T result = operation(held, rest...);
  std::fesetround(FE_TONEAREST);
  return result;
}
template <Mode kMode, typename T>
inline T RoundToInteger(T value) {
  if constexpr (kMode == kRn) return std::nearbyint(value);
  if constexpr (kMode == kRz) return std::trunc(value);
  if constexpr (kMode == kRm) return std::floor(value);
  return std::ceil(value);
}
// A whole number as an integer of the nearest value; NaN is 0.
template <typename To, typename From>
inline To Saturate(From value) {
  using Limits = std::numeric_limits<To>;
  if (std::isnan(value)) return 0;
  if (value <= static_cast<From>(Limits::min())) return Limits::min();
  if (value >= static_cast<From>(Limits::max())) return Limits::max();
  return static_cast<To>(value);
}
inline float Clamp01(float value) { return value > 0 ? std::min(value, 1.0f) : 0.0f; }

inline float Exp2(float x, bool flush) {
  const float y = std::exp2(flush && std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x);
  return flush && std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y;
}

// Sign, exponent and mantissa bits; the code of the largest finite value; whether too large a value
// becomes infinity (the next code) or that value; the code of NaN.
struct Format {
  int exponent_bits, mantissa_bits;
  uint32_t largest;
  bool has_infinity;
  uint32_t nan;
};
inline constexpr Format kF16 = {5, 10, 0x7bff, true, 0x7fff};
inline constexpr Format kBf16 = {8, 7, 0x7f7f, true, 0x7fff};
inline constexpr Format kE4m3 = {4, 3, 0x7e, false, 0x7f};

template <Format kFormat, Mode kMode>
inline uint16_t Encode(float value) {
  static_assert(kMode == kRn || kMode == kRz);
  constexpr int kBias = (1 << (kFormat.exponent_bits - 1)) - 1;
  constexpr int kSignBit = kFormat.exponent_bits + kFormat.mantissa_bits;
  if (std::isnan(value)) return kFormat.nan;
  const uint32_t sign = std::signbit(value) ? 1u << kSignBit : 0;
  constexpr uint32_t kOverflow = kFormat.largest + (kFormat.has_infinity && kMode == kRn ? 1 : 0);
  if (std::isinf(value)) return sign | (kFormat.largest + (kFormat.has_infinity ? 1 : 0));
  const double magnitude = std::abs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);  // the smallest: subnormals
  const double steps =
      RoundToInteger<kMode>(std::ldexp(magnitude, kFormat.mantissa_bits - exponent));
  // A carry into the exponent is one of the sum.
  const int code = (exponent + kBias - 1) * (1 << kFormat.mantissa_bits) + static_cast<int>(steps);
  return sign |
         (code > static_cast<int>(kFormat.largest) ? kOverflow : static_cast<uint32_t>(code));
}

template <Format kFormat>
inline float Decode(uint32_t bits) {
  constexpr int kBias = (1 << (kFormat.exponent_bits - 1)) - 1;
  constexpr int kSignBit = kFormat.exponent_bits + kFormat.mantissa_bits;
  const uint32_t magnitude = bits & ((1u << kSignBit) - 1);
  const float sign = (bits >> kSignBit & 1) != 0 ? -1.0f : 1.0f;
  if (magnitude > kFormat.largest) {
    const bool infinite = kFormat.has_infinity && magnitude == kFormat.largest + 1;
    return std::copysign(infinite ? std::numeric_limits<float>::infinity() : kPoisonF32, sign);
  }
  const int exponent = static_cast<int>(magnitude >> kFormat.mantissa_bits);
  const int mantissa = static_cast<int>(magnitude & ((1u << kFormat.mantissa_bits) - 1));
  const int steps = exponent == 0 ? mantissa : mantissa + (1 << kFormat.mantissa_bits);
  return sign * std::ldexp(static_cast<float>(steps),
                           std::max(exponent, 1) - kBias - kFormat.mantissa_bits);
}

inline uint32_t HalvesOfE4m3x2(uint32_t codes) {
  return uint32_t{Encode<kF16, kRn>(Decode<kE4m3>(codes >> 8))} << 16 |
         Encode<kF16, kRn>(Decode<kE4m3>(codes & 0xff));
}

// ---- Warps --------------------------------------------------------------------------------------

enum ShuffleKind { kIdx, kUp, kDown, kBfly };
struct ShuffleResult {
  uint32_t value;
  bool in_range;  // else the value is the lane's own
};
// `limits`: the bits of a lane's number that name its segment (8..12), and the clamp (0..4).
template <ShuffleKind kKind>
inline ShuffleResult ShuffleLanes(
    uint32_t value, uint32_t operand, uint32_t limits, uint32_t mask, Site site = Site::current()) {
  const int lane = static_cast<int>(current_thread->lane);
  const int by = static_cast<int>(operand & 31), clamp = static_cast<int>(limits & 31);
  const int segment = static_cast<int>(limits >> 8 & 31);
  const int first = lane & segment, last = first | (clamp & ~segment);
  const int source = kKind == kUp     ? lane - by
                     : kKind == kDown ? lane + by
                     : kKind == kBfly ? lane ^ by
                                      : first | (by & ~segment);
  const bool in_range = kKind == kUp ? source >= last : source <= last;
  Shuffle(mask, &value, sizeof(value), in_range ? source : lane, site);
  return {value, in_range};
}

template <MmaType kType>
inline std::array<float, 4> MultiplyAdd(std::array<uint32_t, 4> a,
                                        std::array<uint32_t, 2> b,
                                        std::array<float, 4> c,
                                        Site site = Site::current()) {
  uint32_t left[4], right[2];
  float sum[4], out[4];
  std::copy(a.begin(), a.end(), left);
  std::copy(b.begin(), b.end(), right);
  std::copy(c.begin(), c.end(), sum);
  Mma(kType, out, left, right, sum, site);
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace baton::simt::ptx
