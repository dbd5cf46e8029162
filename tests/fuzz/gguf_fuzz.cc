// Any bytes as a GGUF file: whatever is accepted can be read whole, metadata and tensors, and makes
// a config or a Status.

#include <cstdint>
#include <vector>

#include "engine/base/gguf.h"
#include "engine/model/model_config.h"

namespace {

using baton::base::GgufFile;

constexpr int64_t kRowMax = 1 << 16;

void ReadMetadata(const GgufFile& file) {
  for (const char* key :
       {"general.architecture", "general.alignment", "general.name", "test.u8", "test.u64",
        "test.f64", "test.strings", "test.ints", "test.floats", "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges", "tokenizer.ggml.token_type"}) {
    (void)file.FindString(key);
    (void)file.FindInt(key);
    (void)file.FindFloat(key);
    (void)file.FindBool(key);
    (void)file.FindStringArray(key);
    (void)file.FindIntArray(key);
    (void)file.FindFloatArray(key);
  }
}

// The last row of each tensor, so that an end past the bytes shows.
void ReadTensors(const GgufFile& file) {
  for (const auto& tensor : file.tensors()) {
    const int64_t cols = tensor.shape[0];
    if (cols > kRowMax) continue;
    std::vector<float> row(cols);
    const size_t row_bytes = baton::base::RowBytes(tensor.format, cols);
    baton::base::DequantizeRow(tensor.format, tensor.data.data() + tensor.data.size() - row_bytes,
                               cols, row.data());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = GgufFile::Parse("fuzz", {data, size});
  if (!file.ok()) return 0;
  ReadMetadata(**file);
  ReadTensors(**file);
  const auto config = baton::model::GgufConfig(**file);
  if (config.ok()) (void)baton::model::RopeInvFreq(*config);
  return 0;
}
