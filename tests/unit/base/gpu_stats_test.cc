#include "engine/base/gpu_stats.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace baton::base {
namespace {

using testing::HasSubstr;
using testing::Not;

const std::string kGpu = "0000:e0:00.0";

class GpuStatsTest : public testing::Test {
 protected:
  ~GpuStatsTest() override { unsetenv("BATON_FAKE_NVML"); }
  static absl::StatusOr<std::unique_ptr<GpuStats>> Open(const std::string& id = kGpu) {
    return GpuStats::Open({id}, BATON_FAKE_NVML);
  }
  static int Users() {
    void* library = dlopen(BATON_FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<int (*)()>(dlsym(library, "FakeNvmlUsers"))();
  }
};

TEST_F(GpuStatsTest, TellsMemoryLoadAndPower) {
  const auto stats = Open();
  ASSERT_TRUE(stats.ok()) << stats.status();
  ASSERT_EQ((*stats)->num_gpus(), 1);
  EXPECT_EQ((*stats)->name(0), "3") << "the library's number, not CUDA's";
  const GpuSample sample = (*stats)->Sample(0);
  EXPECT_EQ(sample.memory_used_bytes, 800000);
  EXPECT_EQ(sample.utilization_ratio, 0.75);
  EXPECT_EQ(sample.memory_bandwidth_ratio, 0.4);
  EXPECT_EQ(sample.power_watts, 650.5);
}

TEST_F(GpuStatsTest, LeavesOutWhatADeviceDoesNotTell) {
  setenv("BATON_FAKE_NVML", "nopower noload", 1);
  const auto stats = Open();
  ASSERT_TRUE(stats.ok());
  const GpuSample sample = (*stats)->Sample(0);
  EXPECT_EQ(sample.memory_used_bytes, 800000);
  EXPECT_FALSE(sample.utilization_ratio || sample.memory_bandwidth_ratio || sample.power_watts);
}

TEST_F(GpuStatsTest, SaysWhatIsMissing) {
  EXPECT_EQ(GpuStats::Open({kGpu}, "libno-such-library.so.1").status().code(),
            absl::StatusCode::kUnavailable);
  // A library that is another.
  const auto other = GpuStats::Open({kGpu}, "libm.so.6");
  EXPECT_EQ(other.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("nvmlInit_v2"));
  const auto stranger = Open("0000:01:00.0");
  EXPECT_EQ(stranger.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(stranger.status().message()), HasSubstr("0000:01:00.0: Not Found"));
  setenv("BATON_FAKE_NVML", "down", 1);
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("Driver Not Loaded"));
  EXPECT_EQ(Users(), 0) << "what was opened has been closed";
}

TEST(MetricsCollector, RunsBeforeEachFullScrape) {
  const auto metrics = Metrics::Create(Role::kDecode, "m");
  int calls = 0;
  metrics->SetCollector([&] { metrics->gauge(GaugeId::kGpuPower, "0").Set(++calls); });
  EXPECT_THAT(metrics->ScrapeLite(), Not(HasSubstr("baton_gpu_power_watts")));
  EXPECT_THAT(metrics->Scrape(), HasSubstr("baton_gpu_power_watts{"));
  EXPECT_THAT(metrics->Scrape(), HasSubstr("} 2\n"));
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace baton::base
