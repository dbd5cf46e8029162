// What FlashInfer's kernel does not fit is computed by our own, to the bit: on the emulated device,
// where products do not choose their algorithms by the clock.

#include "gtest/gtest.h"
#include "tests/simt/model_case.h"

namespace baton::simt {
namespace {

TEST(FlashChoice, LeavesToOwnWhatItDoesNotFit) {
  const char* model = "random-qwen3-gqa5-shards";
  for (const ModelSetting& setting :
       {ModelSetting{model, "bf16", "fp8_dynamic"}, ModelSetting{model, "f32", "fp8"},
        ModelSetting{"random-qwen2-gqa2-tied", "bf16", "fp8"}}) {  // without QK-norm
    SCOPED_TRACE(testing::Message()
                 << setting.model << " " << setting.weights << " " << setting.kv);
    EXPECT_EQ(LogitsOf(setting, "cuda", "flashinfer"), LogitsOf(setting, "cuda", "own"));
  }
}

}  // namespace
}  // namespace baton::simt
