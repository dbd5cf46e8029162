#include "engine/ops/cpu/isa.h"

#include <asm/prctl.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace baton::ops::cpu {
namespace {

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Leaf Cpuid(uint32_t leaf, uint32_t sub) {
  Leaf r;
  if (__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d) == 0) return Leaf();
  return r;
}

bool Bit(uint32_t value, int bit) { return (value >> bit) & 1u; }

// What the operating system saves on a context switch.
uint64_t EnabledState() {
  if (!Bit(Cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Tile registers need a permission of the kernel, once per process, before threads are made.
bool AskForTiles() {
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

CpuFeatures Detect() {
  CpuFeatures found;
  const uint64_t state = EnabledState();
  const Leaf one = Cpuid(1, 0), seven = Cpuid(7, 0);
  const bool ymm = (state & 0x6) == 0x6, zmm = (state & 0xe6) == 0xe6,
             tiles = (state & 0x60000) == 0x60000;
  found.avx2 = ymm && Bit(one.c, 12) && Bit(one.c, 29) && Bit(seven.b, 5);  // FMA, F16C, AVX2
  found.avx512 = found.avx2 && zmm && Bit(seven.b, 16) && Bit(seven.b, 17) && Bit(seven.b, 30) &&
                 Bit(seven.b, 31) && Bit(seven.c, 11);
  const bool has_amx = Bit(seven.d, 24) && Bit(seven.d, 22) && Bit(seven.d, 25);
  found.amx = found.avx512 && tiles && has_amx && AskForTiles();
  return found;
}

struct Level {
  absl::string_view name;
  const Kernels* (*kernels)();
  bool (*available)();
  bool for_tests;
};

constexpr Level kLevels[] = {
    // lowest first
    {"portable", &PortableKernels, [] { return true; }, true},
    {"avx2", &Avx2Kernels, [] { return DetectedFeatures().avx2; }, false},
    {"avx512_model", &Avx512ModelKernels, [] { return DetectedFeatures().avx2; }, true},
    {"amx_model", &AmxModelKernels, [] { return DetectedFeatures().avx2; }, true},
    {"avx512", &Avx512Kernels, [] { return DetectedFeatures().avx512; }, false},
    {"amx", &AmxKernels, [] { return DetectedFeatures().amx; }, false},
};

bool Usable(const Level& level) { return level.available() && level.kernels() != nullptr; }

}  // namespace

const CpuFeatures& DetectedFeatures() {
  static const CpuFeatures features = Detect();
  return features;
}

std::string AvailableLevels() {
  std::string names;
  for (const Level& level : kLevels) {
    if (Usable(level)) absl::StrAppend(&names, names.empty() ? "" : " ", level.name);
  }
  return names;
}

absl::StatusOr<const Kernels*> ChooseKernels(absl::string_view isa) {
  if (isa == "auto" || isa.empty()) {
    const char* cap = std::getenv("BATON_CPU_ISA");
    if (cap != nullptr && *cap != '\0' && absl::string_view(cap) != "auto")
      return ChooseKernels(cap);
    const Level* best = &kLevels[0];
    for (const Level& level : kLevels) {
      if (Usable(level) && !level.for_tests) best = &level;
    }
    return best->kernels();
  }
  for (const Level& level : kLevels) {
    if (level.name != isa) continue;
    if (Usable(level)) return level.kernels();
    return absl::UnavailableError(
        absl::StrCat("cpu isa \"", isa, "\": this machine runs: ", AvailableLevels()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("cpu isa \"", isa,
                   "\": accepted: auto, avx2, avx512, amx (and for tests portable, "
                   "avx512_model, amx_model)"));
}

}  // namespace baton::ops::cpu
