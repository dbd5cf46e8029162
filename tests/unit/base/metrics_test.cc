#include "engine/base/metrics.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace baton::base {
namespace {

// Without gMock's HasSubstr, whose message would print the whole scrape.
bool Has(const std::string& text, absl::string_view part) { return absl::StrContains(text, part); }

TEST(MetricsTest, SeriesWithClosedLabelsExistBeforeTheFirstEvent) {
  auto metrics = Metrics::Create(Role::kDecode, "m");
  const std::string text = metrics->Scrape();
  for (const char* state : {"free", "cached", "active", "reserved", "quarantined"}) {
    EXPECT_TRUE(Has(text, absl::StrCat("baton_kv_blocks{model_name=\"m\",role=\"decode\",state=\"",
                                       state, "\"} 0\n")));
  }
  EXPECT_TRUE(
      Has(text,
          "baton_kv_transfer_failures_total{model_name=\"m\",role=\"decode\",reason=\"checksum\","
          "transport=\"shm\"} 0"));
}

TEST(MetricsTest, RoleExportsOnlyItsOwnMetrics) {
  EXPECT_FALSE(Has(Metrics::Create(Role::kRouter, "m")->Scrape(), "baton_kv_blocks"));
  EXPECT_FALSE(Has(Metrics::Create(Role::kPrefill, "m")->Scrape(), "baton_router_"));
}

TEST(MetricsTest, HandlesOfOneSeriesShareItsValue) {
  auto metrics = Metrics::Create(Role::kDecode, "m");
  metrics->counter(CounterId::kPromptTokens, "computed").Increment(3);
  EXPECT_EQ(metrics->counter(CounterId::kPromptTokens, "computed").value(), 3);
  EXPECT_EQ(metrics->counter(CounterId::kPromptTokens, "cached").value(), 0);
  Gauge gauge = metrics->gauge(GaugeId::kRequestsRunning);
  gauge.Set(5);
  gauge.Add(-2);
  EXPECT_EQ(gauge.value(), 3);
  Histogram histogram = metrics->histogram(HistogramId::kRequestQueueTime);
  histogram.Observe(0.25);
  EXPECT_EQ(histogram.count(), 1u);
  EXPECT_EQ(histogram.sum(), 0.25);
}

TEST(MetricsTest, RemovedSeriesIsNotScraped) {
  auto metrics = Metrics::Create(Role::kDecode, "m");
  metrics->gauge(GaugeId::kKvTransportSelected, {"shm", "peer-a"}).Set(1);
  EXPECT_TRUE(Has(metrics->Scrape(), "peer-a"));
  metrics->Remove(GaugeId::kKvTransportSelected, {"shm", "peer-a"});
  EXPECT_FALSE(Has(metrics->Scrape(), "peer-a"));
}

TEST(MetricsTest, EmptyHandleCountsNothing) {
  Counter().Increment();
  Gauge().Set(1);
  Histogram().Observe(1);
  EXPECT_EQ(Counter().value(), 0);
}

TEST(MetricsTest, LabelValuesAreEscaped) {
  auto metrics = Metrics::Create(Role::kRouter, "a\"b\\c\nd");
  EXPECT_TRUE(Has(metrics->Scrape(), "model_name=\"a\\\"b\\\\c\\nd\""));
}

TEST(MetricsTest, UnknownLabelValueIsOurBug) {
  auto metrics = Metrics::Create(Role::kDecode, "m");
  EXPECT_DEATH(metrics->gauge(GaugeId::kKvBlocks, "lost"), "state=lost");
  EXPECT_DEATH(metrics->gauge(GaugeId::kRouterQueueDepth, "normal"), "another role");
}

TEST(MetricsTest, ProcessStatsAreThere) {
  const std::string text = Metrics::Create(Role::kRouter, "m")->Scrape();
  for (const char* name :
       {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds",
        "process_max_fds", "process_start_time_seconds", "process_threads"}) {
    EXPECT_TRUE(Has(text, absl::StrCat("\n", name, " ")));
  }
}

TEST(MetricsTest, CountsFromManyThreadsAddUp) {
  auto metrics = Metrics::Create(Role::kDecode, "m");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        metrics->counter(CounterId::kGenerationTokens).Increment();
        metrics->histogram(HistogramId::kInterTokenLatency).Observe(0.001);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(metrics->counter(CounterId::kGenerationTokens).value(), 4000);
  EXPECT_EQ(metrics->histogram(HistogramId::kInterTokenLatency).count(), 4000u);
}

// Writes the scrape of every role to promtool's standard input. Debian's package prometheus has it.
TEST(MetricsTest, PromtoolAcceptsTheScrapeOfEveryRole) {
  if (std::system("command -v promtool >/dev/null 2>&1") != 0)
    GTEST_SKIP() << "no promtool on this machine";
  for (Role role : {Role::kRouter, Role::kPrefill, Role::kDecode}) {
    FILE* pipe = popen("promtool check metrics 2>&1", "w");
    ASSERT_NE(pipe, nullptr);
    const std::string text = Metrics::Create(role, "m")->Scrape();
    ASSERT_EQ(std::fwrite(text.data(), 1, text.size(), pipe), text.size());
    EXPECT_EQ(pclose(pipe), 0) << RoleName(role);
  }
}

}  // namespace
}  // namespace baton::base
