// Models whose prefill is FlashInfer's: on a device that has its kernel, or on the emulated one by
// what takes its place.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/ops/backend.h"
#include "engine/runtime/model_runner.h"
#include "gtest/gtest.h"
#include "tests/simt/model_case.h"

namespace baton::simt {
namespace {

using Logits = std::vector<std::vector<float>>;

struct ModelRun {
  Logits logits;
  std::string device;
  uint32_t sum_order_version = 0;
};

ModelRun RunWith(const ModelSetting& setting, const std::string& prefill) {
  runtime::ModelRunnerOptions options = OptionsOf(setting, "cuda");
  options.backend_options.prefill_attention = prefill;
  const auto runner = runtime::ModelRunner::Create(options);
  EXPECT_TRUE(runner.ok()) << runner.status();
  if (!runner.ok()) return {};
  return {RunModel(runner->get()), (*runner)->device(), (*runner)->sum_order_version()};
}

bool Says(const ModelRun& run, const std::string& kernel) {
  return run.device.find("prefill=" + kernel) != std::string::npos;
}

// What the cache rounds, keys and values, is rounded to e4m3 in either case. FlashInfer's kernel
// rounds what they are multiplied with in the same way: as many errors again, each as large. So the
// root of their squares grows by the root of two; and by chance. What it computed has a version of
// its own, so that it is never mixed with what others compute.
TEST(FlashBackend, RoundsAsMuchAgainAsTheCache) {
  constexpr double kChance = 1.5, kRootOfTwo = 1.4143;
  for (const ModelSetting& setting : {ModelSetting{"random-qwen3-gqa5-shards", "bf16", "fp8"},
                                      ModelSetting{"random-qwen3-gqa1-hd128", "bf16", "fp8"},
                                      ModelSetting{"random-qwen3-gqa1-hd128", "fp8", "fp8"},
                                      ModelSetting{"random-qwen3-gqa4-yarn", "bf16", "fp8"}}) {
    SCOPED_TRACE(testing::Message() << setting.model << " " << setting.weights);
    const ModelRun own = RunWith(setting, "own"), flash = RunWith(setting, "auto");
    const Logits exact = LogitsOf({setting.model, "f32", "f32"}, "cpu");
    EXPECT_TRUE(Says(own, "own") && Says(flash, "flashinfer")) << flash.device;
    EXPECT_EQ(own.sum_order_version, ops::kDeviceSumOrderVersion);
    EXPECT_EQ(flash.sum_order_version, ops::kFlashSumOrderVersion);
    EXPECT_NE(own.logits, flash.logits) << "the other kernel did not run";
    const double error = RelativeError(flash.logits, exact),
                 own_error = RelativeError(own.logits, exact);
    EXPECT_LE(error, kChance * kRootOfTwo * own_error);
    RecordProperty(absl::StrCat(setting.model, "_", setting.weights),
                   absl::StrCat(error, " own=", own_error));
  }
}

}  // namespace
}  // namespace baton::simt
