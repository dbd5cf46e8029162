// What int8 activations in groups of 32 cost: the trained models with weights that are 4-bit codes
// exactly, so that q4 and f32 differ by the activations alone.

#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/base/bf16.h"
#include "engine/base/safetensors.h"
#include "engine/model/model_config.h"
#include "engine/ops/quantize.h"
#include "engine/runtime/model_runner.h"
#include "engine/text/tokenizer.h"
#include "gtest/gtest.h"
#include "tests/support/engine_steps.h"
#include "tests/support/logit_quality.h"
#include "tests/support/model_files.h"

namespace baton::testing_support {
namespace {

constexpr size_t kWindow = 256;

// The values that a row's 4-bit codes stand for.
void RoundToQ4(float* row, int cols) {
  std::vector<uint8_t> codes(cols);
  std::vector<float> scales(cols / ops::kQ4Group), minimums(cols / ops::kQ4Group);
  ops::QuantizeRowQ4(row, cols, codes.data(), scales.data(), minimums.data());
  for (int k = 0; k < cols; ++k)
    row[k] = ops::Q4Value(codes[k], scales[k / ops::kQ4Group], minimums[k / ops::kQ4Group]);
}

// A tensor as f32, matrices rounded to 4 bits.
std::string Rounded(const base::SafetensorsTensor& tensor) {
  std::vector<float> values(tensor.data.size() / 2);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = base::FloatFromBf16(
        static_cast<uint16_t>(tensor.data[2 * i] | tensor.data[2 * i + 1] << 8));
  if (tensor.shape.size() == 2) {
    const int cols = static_cast<int>(tensor.shape[1]);
    for (int64_t row = 0; row < tensor.shape[0]; ++row) RoundToQ4(values.data() + row * cols, cols);
  }
  return RawFloats(values);
}

class WeightQualityTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string source = SourcePath("tests/data/models/" + GetParam());
    for (const auto& entry : std::filesystem::directory_iterator(source)) {
      if (entry.path().extension() == ".json")
        directory_.Write(entry.path().filename().string(), ReadWhole(entry.path().string()));
    }
    const std::string bytes = ReadWhole(source + "/model.safetensors");
    const auto tensors = base::ParseSafetensors(
        source, absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
    ASSERT_TRUE(tensors.ok()) << tensors.status();
    SafetensorsBytes file;
    for (const base::SafetensorsTensor& tensor : *tensors) {
      ASSERT_EQ(tensor.dtype, "BF16") << tensor.name;
      file.Add(tensor.name, "F32", tensor.shape, Rounded(tensor));
    }
    directory_.Write("model.safetensors", file.Build());
    const auto tokenizer = text::Tokenizer::Load(source);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    const auto ids = (*tokenizer)
                         ->Encode(ReadWhole(SourcePath("tests/data/text/heldout.txt")),
                                  text::SpecialPolicy::kLiteral);
    ids_.assign(ids.begin(), ids.end());
    num_layers_ = model::LoadHfConfig(source)->num_layers;
  }

  Logits AllLogits(const std::string& weight_dtype) const {
    runtime::ModelRunnerOptions options = SmallOptions(directory_.path());
    options.weight_dtype = weight_dtype;
    options.kv_dtype = "f32";
    options.num_blocks = 8;
    options.max_model_len = 512;
    auto runner = runtime::ModelRunner::Create(options);
    EXPECT_TRUE(runner.ok()) << runner.status();
    StepDriver driver(**runner);
    Logits logits;
    for (size_t first = 0; first + kWindow <= ids_.size(); first += kWindow) {
      TestSequence sequence;
      for (std::vector<float>& row :
           driver.Feed(&sequence, absl::MakeConstSpan(ids_).subspan(first, kWindow), kWindow))
        logits.push_back(std::move(row));
      driver.Release(&sequence);
    }
    return logits;
  }

  TempDir directory_;
  std::vector<uint32_t> ids_;
  int num_layers_ = 0;
};

// The bound, as in kv_quality_test.cc:
//   A code is off by at most half a step of (largest of 32) / 127, evenly spread: in the root of
//   the mean square by largest / (127 sqrt(12)). The largest is at most sqrt(32) times the group's
//   own root mean square, so a dot of many products is off by u = sqrt(32) / (127 sqrt(12)) of its
//   size at most. A layer rounds its activations four times (gate and up, which are multiplied,
//   count as two) and the head once more, independently: logits move by at most
//   s = u * sqrt(5 L + 1) of their spread.
TEST_P(WeightQualityTest, ActivationsInInt8MoveLogitsByTheRoundingErrorOnly) {
  const Logits exact = AllLogits("f32");
  const double exact_nll = CompareLogits(exact, exact, ids_, kWindow).mean_nll();
  const double u = std::sqrt(32.0) / (127 * std::sqrt(12.0));
  // bf16 of the same weights is what q4 was in version 1 of the order of sums.
  for (const char* weight_dtype : {"bf16", "q4"}) {
    SCOPED_TRACE(weight_dtype);
    const Quality quality = CompareLogits(AllLogits(weight_dtype), exact, ids_, kWindow);
    const double s = u * std::sqrt(5.0 * num_layers_ + 1) * quality.logit_rms();
    ExpectMovedWithin(absl::StrCat(GetParam(), " 4-bit weights as ", weight_dtype), quality,
                      exact_nll, s);
  }
}

INSTANTIATE_TEST_SUITE_P(TrainedModels,
                         WeightQualityTest,
                         ::testing::Values("tiny-qwen3", "tiny-qwen3-draft"),
                         [](const auto& info) {
                           return info.param == "tiny-qwen3" ? "target" : "draft";
                         });

}  // namespace
}  // namespace baton::testing_support
