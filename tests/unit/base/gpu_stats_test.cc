#include "engine/base/gpu_stats.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace baton::base {
namespace {

using testing::HasSubstr;

const std::string kGpu = "0000:e0:00.0";

class GpuStatsTest : public testing::Test {
 protected:
  ~GpuStatsTest() override { unsetenv("BATON_FAKE_NVML"); }
  static absl::StatusOr<std::unique_ptr<GpuStats>> Open(const std::string& id = kGpu) {
    return GpuStats::Open({id}, BATON_FAKE_NVML);
  }
  static int Ask(const char* function) {
    void* library = dlopen(BATON_FAKE_NVML, RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<int (*)()>(dlsym(library, function))();
  }
  static int Users() { return Ask("FakeNvmlUsers"); }
  static int PowerReads() { return Ask("FakeNvmlPowerReads"); }
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

// A scrape shows what was read last and asks the driver nothing.
TEST_F(GpuStatsTest, ScrapesDoNotWaitForTheDriver) {
  const auto metrics = Metrics::Create(Role::kDecode, "m");
  const int before = PowerReads();
  const auto exporter = GpuExporter::Start({kGpu}, metrics.get(), absl::Hours(1), BATON_FAKE_NVML);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  for (int i = 0; i < 5; ++i)
    EXPECT_THAT(
        metrics->Scrape(),
        HasSubstr("baton_gpu_power_watts{model_name=\"m\",role=\"decode\",gpu=\"3\"} 650.5\n"));
  EXPECT_EQ(PowerReads(), before + 1);
}

TEST_F(GpuStatsTest, ExporterReadsAgainAndAgainAndEnds) {
  const auto metrics = Metrics::Create(Role::kDecode, "m");
  const int before = PowerReads();
  auto exporter = GpuExporter::Start({kGpu}, metrics.get(), absl::Milliseconds(1), BATON_FAKE_NVML);
  ASSERT_TRUE(exporter.ok()) << exporter.status();
  while (PowerReads() < before + 5) std::this_thread::yield();
  exporter->reset();
  EXPECT_EQ(Users(), 0);
  EXPECT_EQ(GpuExporter::Start({kGpu}, metrics.get(), absl::Seconds(1), "libno-such.so.1")
                .status()
                .code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace baton::base
