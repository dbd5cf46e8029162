#include "cli/kv_plan.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace baton::cli {
namespace {

model::ModelConfig Qwen3_8B() {
  model::ModelConfig config;
  config.num_layers = 36;
  config.hidden = 4096;
  config.num_heads = 32;
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.ffn = 12288;
  config.vocab = 151936;
  config.qk_norm = true;
  config.max_position = 40960;
  return config;
}

constexpr int64_t kPlenty = int64_t{1} << 50;

std::string Texts(const std::vector<Finding>& findings, Finding::Level level) {
  std::string out;
  for (const Finding& finding : findings) {
    if (finding.level == level) out += finding.text + "\n";
  }
  return out;
}
std::string Errors(const std::vector<Finding>& f) { return Texts(f, Finding::Level::kError); }
std::string Warnings(const std::vector<Finding>& f) { return Texts(f, Finding::Level::kWarning); }

// The figures that everybody knows of this model: 72 KiB a token in fp8, 144 in bf16.
TEST(KvPlanTest, BytesOfATokenOfQwen3_8B) {
  EXPECT_EQ(PlanWorker(Qwen3_8B(), "bf16", {})->bytes_per_token, 72 << 10);
  EXPECT_EQ(PlanWorker(Qwen3_8B(), "bf16", {{"kv_dtype", "bf16"}})->bytes_per_token, 144 << 10);
  EXPECT_EQ(PlanWorker(Qwen3_8B(), "bf16", {{"kv_dtype", "f32"}})->bytes_per_token, 288 << 10);
  EXPECT_EQ(PlanWorker(Qwen3_8B(), "bf16", {{"kv_dtype", "fp8_dynamic"}})->bytes_per_token,
            (72 << 10) + 36 * 2 * 8 * 4);
}

TEST(KvPlanTest, WeightsOfQwen3_8BAreAboutSixteenGigabytesInBf16) {
  EXPECT_NEAR(static_cast<double>(PlanWorker(Qwen3_8B(), "bf16", {})->weight_bytes), 16.38e9,
              0.1e9);
  EXPECT_NEAR(static_cast<double>(PlanWorker(Qwen3_8B(), "q4", {})->weight_bytes), 5.1e9, 0.1e9);
}

TEST(KvPlanTest, PoolHoldsWholeBlocks) {
  const int64_t block = int64_t{64} * (72 << 10);
  const auto plan =
      PlanWorker(Qwen3_8B(), "bf16", {{"kv_cache_bytes", std::to_string(10 * block + 1)}});
  EXPECT_EQ(plan->num_blocks, 10);
  EXPECT_EQ(plan->pool_bytes, 10 * block);
  EXPECT_EQ(plan->pool_tokens, 640);
  EXPECT_EQ(PlanWorker(Qwen3_8B(), "bf16", {{"num_blocks", "7"}})->num_blocks, 7);
}

TEST(KvPlanTest, RanksShareTheCacheAndDoNotChangeItsSize) {
  const auto one = PlanWorker(Qwen3_8B(), "bf16", {{"num_blocks", "7"}});
  const auto two = PlanWorker(Qwen3_8B(), "bf16", {{"num_blocks", "7"}, {"tp", "2"}});
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(one->tp, 1);
  EXPECT_EQ(two->tp, 2);
  EXPECT_EQ(two->pool_bytes, one->pool_bytes);
}

// What a worker would refuse at its start.
TEST(CheckConfigTest, RanksThatCannotShareTheHeadsAreAnError) {
  model::ModelConfig config = Qwen3_8B();
  const auto errors = [&](const char* tp) {
    return Errors(
        CheckWorker("prefill", config, "bf16", {{"num_blocks", "640"}, {"tp", tp}}, kPlenty));
  };
  EXPECT_EQ(errors("1"), "");
  EXPECT_EQ(errors("2"), "");
  EXPECT_TRUE(absl::StrContains(errors("3"), "tp=3: want 1 or 2")) << errors("3");
  EXPECT_TRUE(absl::StrContains(errors("0"), "--tp")) << errors("0");
  config.num_kv_heads = 1;
  EXPECT_TRUE(absl::StrContains(errors("2"), "num_kv_heads=1 is not divisible")) << errors("2");
}

TEST(CheckConfigTest, WhatHoldsGivesNothing) {
  EXPECT_TRUE(CheckWorker("decode", Qwen3_8B(), "bf16", {{"num_blocks", "640"}}, kPlenty).empty());
}

// Case 18.1
TEST(CheckConfigTest, ContextBeyondTheModelIsAnError) {
  const auto at = [](const char* length) {
    return Errors(CheckWorker("decode", Qwen3_8B(), "bf16",
                              {{"max_model_len", length}, {"num_blocks", "9999"}}, kPlenty));
  };
  EXPECT_EQ(at("40960"), "");
  EXPECT_TRUE(absl::StrContains(at("40961"), "40960")) << at("40961");
  EXPECT_TRUE(absl::StrContains(at("99999999999"), "max-model-len"));
}

// Case 18.2
TEST(CheckConfigTest, UnknownNamesAndNumbersAreErrorsThatSayWhatIsAccepted) {
  const std::pair<WorkerSettings, const char*> cases[] = {
      {{{"kv_dtype", "int3"}}, "fp8_dynamic"},
      {{{"kv_transport", "pigeon"}}, "tcp"},
      {{{"device", "tpu"}}, "cuda"},
      {{{"cpu_isa", "sse"}}, "avx2"},
      {{{"chunk_tokens", "32"}}, "64"},
      {{{"kv_cache_bytes", "8GB"}}, "whole number"},
      {{{"num_blocks", "-1"}}, "num-blocks"},
      {{{"kv_cache_bytes", "1000"}}, "not one block"},
      {{{"metrics_compat", "tgi"}}, "vllm"},
      {{{"num_blocks", "99999999999"}}, "too many"},
      {{{"require_transport", "pigeon"}}, "tcp"}};
  for (const auto& [settings, words] : cases) {
    const std::string errors = Errors(CheckWorker("decode", Qwen3_8B(), "bf16", settings, kPlenty));
    EXPECT_TRUE(absl::StrContains(errors, words)) << words << ": " << errors;
  }
}

TEST(CheckConfigTest, MemoryAboveItsLimitIsAnErrorAndNearItAWarning) {
  const WorkerSettings settings = {{"num_blocks", "640"}};
  const auto plan = PlanWorker(Qwen3_8B(), "bf16", settings);
  const int64_t needed = plan->pool_bytes + plan->weight_bytes;
  const auto at = [&](double share) {
    return CheckWorker("decode", Qwen3_8B(), "bf16", settings,
                       static_cast<int64_t>(static_cast<double>(needed) / share));
  };
  EXPECT_TRUE(at(0.94).empty());
  EXPECT_EQ(Errors(at(0.96)), "");
  EXPECT_TRUE(absl::StrContains(Warnings(at(0.96)), "memory"));
  EXPECT_TRUE(absl::StrContains(Errors(at(1.01)), "more than there is"));
}

TEST(CheckConfigTest, CacheSmallerThanAContextIsAWarning) {
  const auto findings = CheckWorker("decode", Qwen3_8B(), "bf16", {{"num_blocks", "10"}}, kPlenty);
  EXPECT_TRUE(absl::StrContains(Warnings(findings), "640 tokens, less than one context of 40960"));
  EXPECT_EQ(Errors(findings), "");
}

// Case 11.4, before anything starts.
TEST(CheckConfigTest, PairsThatWouldRefuseEachOtherAreErrors) {
  const PairMember base = {Qwen3_8B(), "fingerprint-one", "bf16", {}};
  EXPECT_TRUE(CheckPair(base, base).empty());
  const auto with = [&](auto change) {
    PairMember decode = base;
    change(&decode);
    return CheckPair(base, decode);
  };
  EXPECT_TRUE(absl::StrContains(Errors(with([](PairMember* d) { d->model = "other"; })), "model"));
  EXPECT_TRUE(absl::StrContains(Errors(with([](PairMember* d) { d->weight_dtype = "int8"; })),
                                "prefill bf16, decode int8"));
  EXPECT_TRUE(
      absl::StrContains(Errors(with([](PairMember* d) { d->settings["kv_dtype"] = "bf16"; })),
                        "prefill fp8, decode bf16"));
  PairMember shm = base, tcp = base;
  shm.settings["kv_transport"] = "shm";
  tcp.settings["kv_transport"] = "tcp";
  EXPECT_TRUE(absl::StrContains(Errors(CheckPair(shm, tcp)), "transport"));
  EXPECT_TRUE(CheckPair(shm, base).empty()) << "auto goes along";
  PairMember insists = base;
  insists.settings["require_transport"] = "shm";
  EXPECT_TRUE(absl::StrContains(Errors(CheckPair(insists, tcp)), "transport"));
  EXPECT_TRUE(CheckPair(insists, base).empty()) << "what is offered may be insisted on";
  PairMember brief = base;
  brief.settings["max_model_len"] = "1024";
  EXPECT_TRUE(absl::StrContains(Warnings(CheckPair(brief, base)), "the shorter one holds"));
}

}  // namespace
}  // namespace baton::cli
