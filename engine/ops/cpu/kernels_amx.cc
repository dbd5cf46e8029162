#include "engine/ops/cpu/kernel_args.h"

namespace baton::ops::cpu {

const Kernels* AmxKernels() { return nullptr; }

}  // namespace baton::ops::cpu
