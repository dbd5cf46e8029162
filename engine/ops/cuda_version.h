#pragma once

#include <string>

namespace baton::ops {

// Of the CUDA toolkit that this program's CUDA backend was built with, "13.0"; "none" where it has
// no such backend.
std::string CudaVersion();

}  // namespace baton::ops
