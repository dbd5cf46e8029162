#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

const Kernels* AmxModelKernels() { return nullptr; }

}  // namespace baton::ops::cpu
