// Any bytes as a safetensors file: accepted tensors lie within the bytes, everything else is a
// Status.

#include <cstdint>
#include <cstdlib>

#include "engine/base/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto tensors = baton::base::ParseSafetensors("fuzz", {data, size});
  if (!tensors.ok()) return 0;
  for (const auto& tensor : *tensors) {
    const uint8_t* end = tensor.data.data() + tensor.data.size();
    if (tensor.data.data() < data || end > data + size) abort();
  }
  return 0;
}
