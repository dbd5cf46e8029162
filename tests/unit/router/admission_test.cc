#include "router/admission.h"

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/base/metrics.h"
#include "engine/process/grpc_status.h"
#include "gtest/gtest.h"
#include "tests/unit/router/router_fakes.h"

namespace baton::router {
namespace {

// One prefill worker, one decode worker of 100 blocks.
class AdmissionTest : public testing::Test {
 protected:
  AdmissionTest() {
    clock_.Advance(absl::Seconds(100));
    table_.set_on_capacity([this] { admission_.Pump(); });
    Report();
  }
  void Report(uint32_t free_blocks = 100, int running = 0) {
    table_.OnStatus("p", ReadyStatus("prefill"));
    auto decode = ReadyStatus("decode");
    decode.mutable_load()->set_kv_blocks_free(free_blocks);
    decode.mutable_load()->set_requests_running(running);
    table_.OnStatus("d", decode);
  }

  struct Options {
    std::string tenant;
    Priority priority = Priority::kNormal;
    uint32_t tokens = 10;
    absl::Duration timeout = absl::Seconds(100);
    bool resumes = false;
  };
  absl::StatusOr<Admission::Id> Enter(const std::string& name, Options options) {
    AdmissionRequest request;
    request.tenant = options.tenant;
    request.priority = options.priority;
    request.route.prompt_tokens = options.tokens;
    request.deadline = clock_.Now() + options.timeout;
    request.resumes = options.resumes;
    return admission_.Enter(request, [this, name](absl::StatusOr<Placement> placement) {
      const absl::Status& status = placement.status();
      events_ += name + (status.ok() ? "+" : absl::IsDeadlineExceeded(status) ? "!" : "?");
      if (status.ok()) placed_[name] = *std::move(placement);
    });
  }
  absl::StatusOr<Admission::Id> Enter(const std::string& name) { return Enter(name, Options()); }
  // The request ends in good order.
  void Finish(const std::string& name, double compute_s = 0.001) {
    const Placement placement = placed_.at(name);
    table_.OnComputed(placement.prefill, 0, 1000, compute_s);
    table_.Release(placement.decode, Verdict::kGood);
    admission_.Leave();
  }
  // The model is fitted: `seconds` a thousand tokens.
  void Measure(double seconds) {
    for (int i = 0; i < 10; ++i) {
      Enter("m", {.tokens = 1000}).value();
      Finish("m", seconds);
    }
    events_.clear();
  }

  base::FakeClock clock_;
  ManualTimers timers_{&clock_};
  std::unique_ptr<base::Metrics> metrics_ = base::Metrics::Create(base::Role::kRouter, "m");
  base::Gauge Depth(const char* priority) {
    return metrics_->gauge(base::GaugeId::kRouterQueueDepth, priority);
  }
  WorkerTable table_{{.prefill = {"p"}, .decode = {"d"}, .clock = &clock_}};
  std::unique_ptr<RoutePolicy> policy_ = *MakeRoutePolicy("prefix", {.local_prefill_tokens = 0});
  Admission admission_{{.max_running = 1,
                        .max_queue = 3,
                        .long_prompt_tokens = 2000,
                        .queue_depth = {Depth("high"), Depth("normal"), Depth("low")}},
                       policy_.get(),
                       &table_,
                       &timers_,
                       &clock_};
  std::map<std::string, Placement> placed_;
  std::string events_;
};

TEST_F(AdmissionTest, PlacesGoInOrderOfArrival) {
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Enter(name).ok());
  EXPECT_EQ(events_, "a+");
  EXPECT_EQ(Depth("normal").value(), 2);
  Finish("a");
  Finish("b");
  EXPECT_EQ(events_, "a+b+c+");
  EXPECT_EQ(admission_.num_running(), 1);
  Finish("c");
  EXPECT_EQ(admission_.num_running(), 0);
  EXPECT_EQ(Depth("normal").value(), 0);
  EXPECT_EQ(timers_.num_waiting(), 0u);
}

TEST_F(AdmissionTest, HigherClassesAndSmallerTenantsGoFirst) {
  ASSERT_TRUE(Enter("a", {.tenant = "t1"}).ok());
  ASSERT_TRUE(Enter("b", {.tenant = "t1"}).ok());
  ASSERT_TRUE(Enter("c", {.tenant = "t2"}).ok());
  ASSERT_TRUE(Enter("h", {.priority = Priority::kHigh}).ok());
  EXPECT_EQ(Depth("high").value(), 1);
  for (const char* name : {"a", "h", "c"}) Finish(name);
  EXPECT_EQ(events_, "a+h+c+b+") << "t1 was served before";
}

TEST_F(AdmissionTest, FullQueueRefusesUntilItIsServed) {
  Measure(0.5);
  for (const char* name : {"a", "b", "c", "d"}) ASSERT_TRUE(Enter(name, {.tokens = 1000}).ok());
  const absl::Status refused = Enter("e").status();
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  ASSERT_TRUE(process::RetryDelay(refused).has_value());
  EXPECT_NEAR(absl::ToDoubleSeconds(*process::RetryDelay(refused)), 1.5, 0.01)
      << "three wait, of half a second each";
  EXPECT_EQ(events_, "a+");
}

// Case 3.2
TEST_F(AdmissionTest, DeadlinePassesInTheQueue) {
  ASSERT_TRUE(Enter("a").ok());
  ASSERT_TRUE(Enter("b", {.timeout = absl::Seconds(1)}).ok());
  ASSERT_TRUE(Enter("c", {.timeout = absl::Seconds(2)}).ok());
  timers_.Advance(absl::Seconds(1));
  EXPECT_EQ(events_, "a+b!");
  Finish("a");
  EXPECT_EQ(events_, "a+b!c+");
}

// Case 3.2: room that comes with no time left is for those behind.
TEST_F(AdmissionTest, NobodyIsPlacedInTheMomentInWhichHisDeadlinePasses) {
  ASSERT_TRUE(Enter("a").ok());
  ASSERT_TRUE(Enter("b", {.timeout = absl::Seconds(1)}).ok());
  ASSERT_TRUE(Enter("c", {.timeout = absl::Seconds(2)}).ok());
  timers_.Advance(absl::Milliseconds(999) + absl::Microseconds(500));
  EXPECT_EQ(events_, "a+");
  Finish("a");
  EXPECT_EQ(events_, "a+b!c+");
}

TEST_F(AdmissionTest, CancelledRequestIsNeverCalled) {
  ASSERT_TRUE(Enter("a").ok());
  const auto b = Enter("b");
  EXPECT_TRUE(admission_.Cancel(*b));
  EXPECT_FALSE(admission_.Cancel(*b));
  Finish("a");
  EXPECT_EQ(events_, "a+");
  EXPECT_EQ(admission_.num_running(), 0);
}

TEST_F(AdmissionTest, ResumedRequestNeedsNoPlaceAndGoesBeforeAll) {
  ASSERT_TRUE(Enter("a").ok());
  ASSERT_TRUE(Enter("b", {.priority = Priority::kHigh}).ok());
  ASSERT_TRUE(Enter("r", {.priority = Priority::kLow, .resumes = true}).ok());
  EXPECT_EQ(events_, "a+r+");
  EXPECT_EQ(admission_.num_running(), 1);
}

// Waits for a report that has room: no polling.
TEST_F(AdmissionTest, WaitsForBlocksUntilAReportHasThem) {
  Report(/*free_blocks=*/2, /*running=*/1);
  ASSERT_TRUE(Enter("a", {.tokens = 100}).ok());
  EXPECT_EQ(events_, "");
  EXPECT_EQ(timers_.num_waiting(), 1u) << "its deadline and nothing else";
  Report(2, 1);
  EXPECT_EQ(events_, "");
  Report(4, 1);
  EXPECT_EQ(events_, "a+");
}

TEST_F(AdmissionTest, LongPromptsWaitInALaneOfTheirOwn) {
  WorkerTable table{{.prefill = {"p", "q"}, .decode = {"d"}, .clock = &clock_}};
  for (const char* p : {"p", "q"}) table.OnStatus(p, ReadyStatus("prefill"));
  auto decode = ReadyStatus("decode");
  decode.mutable_load()->set_kv_blocks_free(10000);
  table.OnStatus("d", decode);
  Admission admission({.max_running = 10, .long_prompt_tokens = 2000}, policy_.get(), &table,
                      &timers_, &clock_);
  std::string events;
  const auto enter = [&](const std::string& name, uint32_t tokens) {
    AdmissionRequest request;
    request.route.prompt_tokens = tokens;
    request.deadline = clock_.Now() + absl::Seconds(100);
    admission
        .Enter(request,
               [&, name](const absl::StatusOr<Placement>& placed) {
                 events += name + placed->route.prefill;
               })
        .value();
  };
  enter("L", 9000);
  enter("M", 9000);  // the other worker is kept for short ones
  EXPECT_EQ(events, "Lp");
  enter("s", 10);
  enter("t", 10);
  EXPECT_EQ(events, "Lpsqtq");
}

TEST_F(AdmissionTest, LongWaitForBlocksIsNotOvertakenForEver) {
  Admission admission({.max_running = 10, .long_prompt_tokens = 2000}, policy_.get(), &table_,
                      &timers_, &clock_);
  Report(/*free_blocks=*/40, /*running=*/1);
  std::string events;
  const auto enter = [&](const std::string& name, uint32_t tokens) {
    AdmissionRequest request;
    request.route.prompt_tokens = tokens;
    request.deadline = clock_.Now() + absl::Seconds(100);
    admission.Enter(request, [&, name](const absl::StatusOr<Placement>&) { events += name; })
        .value();
  };
  enter("L", 3000);
  enter("s", 100);
  EXPECT_EQ(events, "s");
  clock_.Advance(absl::Seconds(6));
  enter("t", 100);
  EXPECT_EQ(events, "s") << "the long one has waited long enough";
  Report(90, 1);
  admission.Pump();
  EXPECT_EQ(events, "sLt");
}

TEST_F(AdmissionTest, RequestThatTheQueueWouldMakeLateIsRefusedAtOnce) {
  Measure(1.0);
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Enter(name, {.tokens = 1000}).ok());
  // 1 s for a, which runs, 1 s for each of b and c, 1 s for itself.
  const absl::Status late =
      Enter("d", {.tokens = 1000, .timeout = absl::Milliseconds(3500)}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(late));
  EXPECT_EQ(process::GetErrorInfo(late)->reason, kPredictedLate);
  ASSERT_TRUE(process::RetryDelay(late).has_value());
  EXPECT_NEAR(absl::ToDoubleSeconds(*process::RetryDelay(late)), 0.5, 0.05);
  EXPECT_TRUE(Enter("e", {.tokens = 1000, .timeout = absl::Milliseconds(4500)}).ok());
  EXPECT_EQ(admission_.num_waiting(), 3);
}

// A wrong prediction could never be put right if it refused everything.
TEST_F(AdmissionTest, IdleWorkersAreAlwaysTried) {
  Measure(10.0);
  EXPECT_TRUE(Enter("a", {.tokens = 1000, .timeout = absl::Seconds(1)}).ok());
  EXPECT_EQ(events_, "a+");
}

TEST_F(AdmissionTest, NothingIsPredictedBeforeAnythingIsMeasured) {
  for (const char* name : {"a", "b", "c"})
    ASSERT_TRUE(Enter(name, {.tokens = 1000, .timeout = absl::Milliseconds(1)}).ok());
}

TEST_F(AdmissionTest, WorkersThatGoFailThoseWhoWait) {
  ASSERT_TRUE(Enter("a").ok());
  ASSERT_TRUE(Enter("b").ok());
  table_.OnDown("d", absl::UnavailableError("gone"));
  Finish("a");
  EXPECT_EQ(events_, "a+b?");
  EXPECT_EQ(admission_.num_running(), 0);
}

// Property: whatever comes and goes, each request is called exactly once unless it was cancelled,
// and never more run than there are places.
TEST_F(AdmissionTest, EveryRequestIsAnsweredOnce) {
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    Admission admission({.max_running = 3, .max_queue = 5, .long_prompt_tokens = 500},
                        policy_.get(), &table_, &timers_, &clock_);
    table_.set_on_capacity([&] { admission.Pump(); });
    std::map<int, int> called;
    std::map<int, std::optional<Admission::Id>> entered;
    std::vector<Placement> running;
    for (int step = 0; step < 300; ++step) {
      switch (random() % 5) {
        case 0:
          Report(random() % 60, random() % 2);
          break;
        case 1:
          timers_.Advance(absl::Milliseconds(random() % 300));
          Report();
          break;
        case 2:
          if (running.empty()) break;
          table_.OnComputed(running.back().prefill, 0, 100, 0.01 * (random() % 10));
          table_.Release(running.back().prefill, Verdict::kNone);
          table_.Release(running.back().decode,
                         random() % 3 == 0 ? Verdict::kFull : Verdict::kGood);
          running.pop_back();
          admission.Leave();
          break;
        case 3:
          if (const auto id = entered[random() % (step + 1)]; id.has_value()) {
            if (admission.Cancel(*id)) {
              for (auto& [name, other] : entered) {
                if (other == id) ++called[name];
              }
            }
          }
          break;
        default: {
          AdmissionRequest request;
          request.tenant = std::to_string(random() % 3);
          request.priority = static_cast<Priority>(random() % 3);
          request.route.prompt_tokens = 1 + random() % 1000;
          request.deadline = clock_.Now() + absl::Milliseconds(random() % 2000);
          const auto id = admission.Enter(request, [&, step](absl::StatusOr<Placement> placed) {
            ++called[step];
            if (placed.ok()) running.push_back(*placed);
          });
          if (id.ok()) entered[step] = *id;
        }
      }
      ASSERT_LE(admission.num_running(), 3);
      ASSERT_EQ(admission.num_running(), static_cast<int>(running.size()));
    }
    timers_.Advance(absl::Seconds(10));
    Report();
    for (const auto& [name, id] : entered) {
      if (!id.has_value()) continue;
      ASSERT_EQ(called[name], 1) << "seed " << seed << " request " << name;
    }
    while (!running.empty()) {
      table_.Release(running.back().prefill, Verdict::kNone);
      table_.Release(running.back().decode, Verdict::kNone);
      running.pop_back();
      admission.Leave();
    }
    ASSERT_EQ(timers_.num_waiting(), 0u);
  }
  table_.set_on_capacity(nullptr);
}

}  // namespace
}  // namespace baton::router
