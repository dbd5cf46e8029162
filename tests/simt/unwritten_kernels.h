#pragma once

// Kernels that act on what nobody has written, for the test of the memory sanitizer's build
// (faults_test.cc): poison in the output shows none of these but the last.

#include <cuda_runtime.h>

namespace baton::simt {

enum class Unwritten {
  kNothing,          // a kernel without fault
  kSharedBranch,     // a branch on a word of shared memory
  kDeviceBranch,     // ... of device memory
  kDeviceIndex,      // an address from there
  kShuffledBranch,   // a branch on a word of device memory that another lane has read
  kAsyncCopyBranch,  // a branch on what an asynchronous copy that was not waited for will bring
  kOutput,           // a word that the host reads back
};

// One warp. fresh [32]: nobody has written it. out [32].
cudaError_t RunUnwritten(Unwritten fault, const int* fresh, int* out);

}  // namespace baton::simt
