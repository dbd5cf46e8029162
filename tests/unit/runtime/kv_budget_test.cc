#include "engine/runtime/kv_budget.h"

#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace baton::runtime {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kGib = uint64_t{1} << 30;

// 100 GiB of device, 30 of them taken, blocks of 1 MiB.
KvBudgetInputs OnADevice() {
  KvBudgetInputs inputs;
  inputs.memory = {.total_bytes = 100 * kGib, .free_bytes = 70 * kGib};
  inputs.workspace_bytes = 2 * kGib;
  inputs.block_bytes = inputs.device_block_bytes = kGib / 1024;
  inputs.max_model_len = 4096;
  return inputs;
}

TEST(KvBudget, TakesWhatTheShareLeavesOnADevice) {
  const auto budget = PlanKvPool(OnADevice());
  ASSERT_TRUE(budget.ok());
  EXPECT_EQ(budget->num_blocks, (90 - 30 - 2) * 1024);
  EXPECT_THAT(budget->warnings, IsEmpty());
}

TEST(KvBudget, WhatIsAskedForGoesBeforeWhatFits) {
  KvBudgetInputs inputs = OnADevice();
  inputs.kv_cache_bytes = static_cast<int64_t>(5 * kGib);
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, 5 * 1024);
  inputs.num_blocks = 77;
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, 77);
}

TEST(KvBudget, IsAGibibyteOnTheHost) {
  KvBudgetInputs inputs = OnADevice();
  inputs.memory = {};
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, 1024);
}

TEST(KvBudget, SaysWhatIsMissingWhenNotOneBlockFits) {
  KvBudgetInputs inputs = OnADevice();
  inputs.utilization = 0.32;  // 30 are taken, 2 are the workspace
  const auto budget = PlanKvPool(inputs);
  EXPECT_EQ(budget.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(budget.status().message()), HasSubstr("gpu_memory_utilization=0.32"));
  inputs.memory.free_bytes = 0;  // less than nothing is left
  EXPECT_EQ(PlanKvPool(inputs).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(KvBudget, RefusesSharesThatAreNone) {
  KvBudgetInputs inputs = OnADevice();
  for (const double share : {0.0, -0.5, 1.01, std::numeric_limits<double>::quiet_NaN()}) {
    inputs.utilization = share;
    EXPECT_EQ(PlanKvPool(inputs).status().code(), absl::StatusCode::kInvalidArgument) << share;
  }
}

TEST(KvBudget, WarnsOfSettingsKnownToHurt) {
  KvBudgetInputs inputs = OnADevice();
  inputs.utilization = 0.96;
  EXPECT_THAT(PlanKvPool(inputs)->warnings, ElementsAre(HasSubstr("is above 0.95")));
  inputs = OnADevice();
  inputs.max_model_len = 262144;
  EXPECT_THAT(PlanKvPool(inputs)->warnings, ElementsAre(HasSubstr("the model's own limit")));
  inputs.max_model_len_chosen = true;
  EXPECT_THAT(PlanKvPool(inputs)->warnings, IsEmpty());
  inputs.num_blocks = 100;
  EXPECT_THAT(PlanKvPool(inputs)->warnings, ElementsAre(HasSubstr("more than the KV cache holds")));
}

TEST(KvBudget, AMirrorOnTheHostLimitsThePool) {
  KvBudgetInputs inputs = OnADevice();
  inputs.host_bytes_max = 8 * kGib;
  const auto budget = PlanKvPool(inputs);
  EXPECT_EQ(budget->num_blocks, 8 * 1024);
  EXPECT_THAT(budget->warnings, ElementsAre(HasSubstr("mirror")));
}

TEST(KvBudget, TwoRanksEachHaveADevice) {
  KvBudgetInputs inputs = OnADevice();
  inputs.device_block_bytes /= 2;
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, 2 * (90 - 30 - 2) * 1024);
  inputs.host_bytes_max = 8 * kGib;
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, 8 * 1024);
  inputs.kv_cache_bytes = static_cast<int64_t>(5 * kGib);
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, 5 * 1024);
}

TEST(KvBudget, BlockIdsTimesTokensFitAnInt) {
  KvBudgetInputs inputs = OnADevice();
  inputs.block_bytes = inputs.device_block_bytes = 64;
  EXPECT_EQ(PlanKvPool(inputs)->num_blocks, std::numeric_limits<int32_t>::max() / 64);
}

}  // namespace
}  // namespace baton::runtime
