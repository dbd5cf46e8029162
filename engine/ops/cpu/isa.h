#pragma once

// Which kernels this machine can run, and the choice among them.

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA, F16C
  bool avx512 = false;  // AVX-512 F, BW, DQ, VL, VNNI
  bool amx = false;     // AVX-512 and AMX tiles with bf16 and int8, and the kernel lets us use them
};
const CpuFeatures& DetectedFeatures();

// "portable avx2": levels that run here, lowest first.
std::string AvailableLevels();

// `isa`: auto, avx2, avx512, amx: the highest level that may be used, which must be there; auto
// (then the environment variable BATON_CPU_ISA, if set) takes the best. portable, avx512_model and
// amx_model (the AVX-512 and AMX kernels over instructions and tiles in software) exist for tests.
// Errors: INVALID_ARGUMENT for another name; UNAVAILABLE naming what is there.
absl::StatusOr<const Kernels*> ChooseKernels(absl::string_view isa);

}  // namespace baton::ops::cpu
