#include "engine/text/model_text_config.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace baton::text {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kConfig[] =
    R"({"architectures":["Qwen3ForCausalLM"],"vocab_size":151936,"eos_token_id":151645})";

// Case 2.3: the end ids of all files together.
TEST(ModelTextConfigTest, EndIdsAreTheUnionOfBothFiles) {
  const auto config = ParseModelTextConfig(kConfig, R"({"eos_token_id":[151645,151643]})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->eos_ids, ElementsAre(151643, 151645));
  EXPECT_EQ(config->architecture, "Qwen3ForCausalLM");
  EXPECT_EQ(config->vocab_size, 151936u);
}

TEST(ModelTextConfigTest, SamplingIsWhatTheAuthorRecommends) {
  const auto config = ParseModelTextConfig(
      kConfig, R"({"temperature":0.6,"top_k":20,"top_p":0.95,"do_sample":true})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->temperature, 0.6f);
  EXPECT_EQ(config->top_k, 20);
  EXPECT_EQ(config->top_p, 0.95f);
  EXPECT_EQ(config->min_p, std::nullopt);
  const auto greedy = ParseModelTextConfig(kConfig, R"({"temperature":0.6,"do_sample":false})");
  EXPECT_EQ(greedy->temperature, 0.0f);
}

TEST(ModelTextConfigTest, AbsentFileLeavesEverythingUnset) {
  const auto config = ParseModelTextConfig(R"({"vocab_size":10})", "");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_TRUE(config->eos_ids.empty());
  EXPECT_EQ(config->temperature, std::nullopt);
}

TEST(ModelTextConfigTest, WrongFieldsAreNamed) {
  EXPECT_THAT(std::string(ParseModelTextConfig("{}", "").status().message()),
              HasSubstr("vocab_size"));
  EXPECT_THAT(std::string(ParseModelTextConfig(R"({"vocab_size":-1})", "").status().message()),
              HasSubstr("vocab_size"));
  EXPECT_THAT(std::string(ParseModelTextConfig(kConfig, R"({"top_p":"x"})").status().message()),
              HasSubstr("top_p"));
  EXPECT_THAT(
      std::string(ParseModelTextConfig(kConfig, R"({"eos_token_id":[-1]})").status().message()),
      HasSubstr("eos_token_id"));
  EXPECT_FALSE(ParseModelTextConfig("[", "").ok());
}

TEST(ModelTextConfigTest, NameIsTheLastPartOfThePath) {
  EXPECT_EQ(ModelNameFromPath("/models/Qwen3-8B/"), "Qwen3-8B");
  EXPECT_EQ(ModelNameFromPath("/models/SmolLM2.gguf"), "SmolLM2");
  EXPECT_EQ(ModelNameFromPath("plain"), "plain");
}

}  // namespace
}  // namespace baton::text
