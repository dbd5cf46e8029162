#pragma once

// Kernels that run from their PTX instead of their source. A program that links C++ made of PTX
// (ptx_to_cpp.py) runs every kernel so: it is found by its symbol, and a launch of a kernel without
// PTX fails. Launchers, tests and references stay as they are.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace baton::simt {

using TranslatedKernel = void (*)(const unsigned char* parameters);

// Called before main(). A second kernel of the same name ends the program. Returns true.
bool RegisterTranslated(const char* symbol, TranslatedKernel kernel);
bool HasTranslated();

// A kernel's parameters as PTX lays them out: each at the next multiple of its alignment.
class ParameterBytes {
 public:
  template <typename T>
  void Append(const T& value) {
    Append(&value, sizeof(T), alignof(T));
  }
  const unsigned char* data() const { return bytes_.data(); }

 private:
  void Append(const void* value, size_t size, size_t alignment);

  std::vector<unsigned char> bytes_;
};

// Runs the PTX of `kernel`, the address of a kernel's host function. Errors:
// cudaErrorInvalidDeviceFunction when there is none, and those of RunGrid.
cudaError_t RunTranslated(const void* kernel,
                          dim3 grid,
                          dim3 block,
                          size_t shared_bytes,
                          const ParameterBytes& parameters);

// A mangled name without what compilers put into it for an anonymous namespace.
std::string CanonicalSymbol(const std::string& symbol);

}  // namespace baton::simt
