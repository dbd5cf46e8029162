#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

const Kernels* Avx512Kernels() { return nullptr; }

}  // namespace baton::ops::cpu
