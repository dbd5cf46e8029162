#include "router/worker_table.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/router/router_fakes.h"

namespace baton::router {
namespace {

class WorkerTableTest : public testing::Test {
 protected:
  WorkerTable Make(Topology topology = Topology::kPd) {
    WorkerTableOptions options;
    options.topology = topology;
    if (topology == Topology::kPd) options.prefill = {"p2", "p1"};
    options.decode = {"d1"};
    options.tokenizer_fingerprint = "t";
    options.clock = &clock_;
    options.metrics = metrics_.get();
    return WorkerTable(options);
  }
  static worker::v1::WorkerStatus Status(const std::string& role,
                                         const std::string& incarnation = "1") {
    auto status = ReadyStatus(role, incarnation);
    status.mutable_fingerprint()->set_tokenizer("t");
    return status;
  }
  absl::StatusOr<Placement> Place(WorkerTable* table,
                                  uint32_t prompt_tokens = 10,
                                  absl::Span<const BlockKey> keys = {}) {
    RouteRequest request{.prompt_tokens = prompt_tokens};
    request.needs_prefill = table->Rows().size() > 1;
    return table->Place(*policy_, request, keys);
  }
  static inline const std::vector<BlockKey> kKeys = {11, 12, 13};
  double Count(const char* role, const char* state) {
    return metrics_->gauge(base::GaugeId::kRouterWorkers, {role, state}).value();
  }
  std::unique_ptr<RoutePolicy> policy_ = *MakeRoutePolicy("prefix", {});
  base::FakeClock clock_;
  std::unique_ptr<base::Metrics> metrics_ = base::Metrics::Create(base::Role::kRouter, "m");
};

// Case 16.1: usable only with one of each.
TEST_F(WorkerTableTest, UsableNeedsOneOfEach) {
  WorkerTable table = Make();
  EXPECT_TRUE(absl::IsUnavailable(table.Usable()));
  table.OnStatus("d1", Status("decode"));
  EXPECT_TRUE(absl::IsUnavailable(table.Usable()));
  auto loading = Status("prefill");
  loading.set_state(worker::v1::WORKER_STATE_LOADING);
  table.OnStatus("p1", loading);
  EXPECT_TRUE(absl::IsUnavailable(table.Usable()));
  EXPECT_EQ(Count("prefill", "loading"), 1);
  table.OnStatus("p1", Status("prefill"));
  EXPECT_TRUE(table.Usable().ok());
  EXPECT_EQ(Count("prefill", "ready"), 1);
  EXPECT_EQ(Count("prefill", "down"), 1);
  auto draining = Status("decode");
  draining.set_state(worker::v1::WORKER_STATE_DRAINING);
  table.OnStatus("d1", draining);
  EXPECT_TRUE(absl::IsUnavailable(table.Usable()));
}

TEST_F(WorkerTableTest, SingleNeedsDecodeOnly) {
  WorkerTable table = Make(Topology::kSingle);
  table.OnStatus("d1", Status("decode"));
  EXPECT_TRUE(table.Usable().ok());
}

// A busy machine is no dead one: silent with a live connection is suspect first.
TEST_F(WorkerTableTest, SilentWorkerIsSuspectBeforeItIsDown) {
  WorkerTable table = Make(Topology::kSingle);
  int changes = 0;
  table.set_on_change([&] { ++changes; });
  table.OnStatus("d1", Status("decode"));
  clock_.Advance(absl::Milliseconds(2999));
  table.Sweep();
  EXPECT_EQ(table.Snapshot()[0].health, WorkerHealth::kReady);
  clock_.Advance(absl::Milliseconds(1));
  table.Sweep();
  EXPECT_EQ(table.Snapshot()[0].health, WorkerHealth::kSuspect);
  EXPECT_EQ(Count("decode", "suspect"), 1);
  EXPECT_TRUE(table.Usable().ok()) << "the service does not flap";
  EXPECT_TRUE(absl::IsResourceExhausted(Place(&table).status())) << "but gives it nothing new";
  table.OnStatus("d1", Status("decode"));
  EXPECT_EQ(table.Snapshot()[0].health, WorkerHealth::kReady);
  EXPECT_EQ(changes, 3);
  table.OnStatus("d1", Status("decode"));
  EXPECT_EQ(changes, 3) << "nothing new";
  clock_.Advance(absl::Seconds(30));
  table.Sweep();
  EXPECT_EQ(table.Snapshot()[0].health, WorkerHealth::kDown);
  EXPECT_FALSE(table.Usable().ok());
}

TEST_F(WorkerTableTest, LostConnectionIsDownAtOnce) {
  WorkerTable table = Make(Topology::kSingle);
  table.OnStatus("d1", Status("decode"));
  table.OnDown("d1", absl::UnavailableError("reset"));
  EXPECT_TRUE(absl::IsUnavailable(table.Usable()));
  EXPECT_TRUE(absl::IsUnavailable(Place(&table).status()));
}

// Case 11.6: a restarted worker starts from nothing.
TEST_F(WorkerTableTest, NewIncarnationForgetsTheOldOnesWork) {
  WorkerTable table = Make(Topology::kSingle);
  int changes = 0;
  table.OnStatus("d1", Status("decode", "1"));
  table.OnKvEvents("d1", true, kKeys, {});
  const auto placed = Place(&table, 500);
  ASSERT_TRUE(placed.ok());
  EXPECT_EQ(table.Snapshot()[0].load_tokens, 576u);
  table.set_on_change([&] { ++changes; });
  table.OnStatus("d1", Status("decode", "2"));
  EXPECT_EQ(table.Snapshot()[0].load_tokens, 0u);
  EXPECT_EQ(table.Rows()[0].blocks_known, 0u);
  EXPECT_EQ(changes, 1);
  table.Release(placed->decode, Verdict::kGood);
  EXPECT_EQ(table.Snapshot()[0].load_tokens, 0u) << "never below nothing";
}

TEST_F(WorkerTableTest, LoadIsWhatWasSentAndWhatOthersHaveThere) {
  WorkerTable table = Make();
  auto prefill = Status("prefill");
  prefill.mutable_load()->set_queue_tokens(300);
  table.OnStatus("p1", prefill);
  auto decode = Status("decode");
  decode.mutable_load()->set_kv_blocks_active(2);
  decode.mutable_load()->set_kv_blocks_reserved(1);
  decode.mutable_load()->set_kv_blocks_free(10);
  decode.mutable_load()->set_kv_blocks_cached(5);
  table.OnStatus("d1", decode);
  const auto placed = Place(&table, 400);
  ASSERT_TRUE(placed.ok()) << placed.status();
  const auto views = table.Snapshot();
  ASSERT_EQ(views.size(), 3u);
  EXPECT_EQ(views[0].address, "p2") << "the operator's order";
  EXPECT_EQ(views[1].load_tokens, 300u + 400u);
  EXPECT_EQ(views[2].load_tokens, 192u + 512u) << "in whole blocks, one for the answer";
  EXPECT_EQ(views[2].available_blocks, 15u - 8u) << "7 for the prompt, 1 for the answer";
  table.OnReserved(placed->decode);
  table.OnStatus("d1", decode);
  EXPECT_EQ(table.Snapshot()[2].available_blocks, 15u) << "the report has them";
  EXPECT_EQ(table.Snapshot()[2].load_tokens, 512u) << "what is reported is ours";
  table.OnComputed(placed->prefill, 0, 400, 0.1);
  EXPECT_EQ(table.Snapshot()[1].load_tokens, 300u);
  decode.mutable_load()->set_kv_blocks_active(9);
  table.OnStatus("d1", decode);
  EXPECT_EQ(table.Snapshot()[2].load_tokens, 640u) << "answers grow";
  table.Release(placed->decode, Verdict::kGood);
  EXPECT_EQ(table.Snapshot()[2].load_tokens, 128u)
      << "what has ended counts no more, though reported";
}

TEST_F(WorkerTableTest, FullWorkerIsAskedAgainWhenItsReportHasChanged) {
  WorkerTable table = Make(Topology::kSingle);
  table.OnStatus("d1", Status("decode"));
  int capacity = 0;
  table.set_on_capacity([&] { ++capacity; });
  table.Release(Place(&table)->decode, Verdict::kFull);
  table.OnStatus("d1", Status("decode"));
  EXPECT_TRUE(absl::IsResourceExhausted(Place(&table).status()));
  auto changed = Status("decode");
  changed.mutable_load()->set_kv_blocks_free(99);
  table.OnStatus("d1", changed);
  EXPECT_EQ(capacity, 3);
  const auto placed = Place(&table);
  ASSERT_TRUE(placed.ok());
  table.Release(placed->decode, Verdict::kFull);
  clock_.Advance(absl::Seconds(1));
  table.OnStatus("d1", changed);
  EXPECT_TRUE(Place(&table).ok()) << "or after a while";
}

TEST_F(WorkerTableTest, BreakerKeepsWorkAwayFromAWorkerThatFails) {
  WorkerTable table = Make(Topology::kSingle);
  table.OnStatus("d1", Status("decode"));
  const auto breaker = [&] {
    const absl::string_view labels[] = {"d1"};
    return metrics_->gauge(base::GaugeId::kRouterWorkerBreakerState, labels).value();
  };
  for (int i = 0; i < 3; ++i) table.Release(Place(&table)->decode, Verdict::kFailed);
  EXPECT_EQ(breaker(), 2);
  EXPECT_TRUE(absl::IsResourceExhausted(Place(&table).status()));
  EXPECT_TRUE(table.Usable().ok());
  clock_.Advance(absl::Seconds(1));
  const auto trial = Place(&table);
  ASSERT_TRUE(trial.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(Place(&table).status())) << "one at a time";
  table.Release(trial->decode, Verdict::kGood);
  EXPECT_TRUE(Place(&table).ok());
  table.Sweep();
  EXPECT_EQ(breaker(), 0);
}

// A breaker that has been open for long is no reason to let requests wait when nobody else is
// there.
TEST_F(WorkerTableTest, ALastWorkerIsTriedEveryTwoSeconds) {
  WorkerTable table = Make(Topology::kSingle);
  table.OnStatus("d1", Status("decode"));
  for (int i = 0; i < 3; ++i) table.Release(Place(&table)->decode, Verdict::kFailed);
  // Pauses of 1, 2, 4, 8 s it would have, if there were others.
  clock_.Advance(absl::Seconds(1));
  for (int i = 0; i < 5; ++i) {
    const auto trial = Place(&table);
    ASSERT_TRUE(trial.ok()) << i;
    table.Release(trial->decode, Verdict::kFailed);
    clock_.Advance(absl::Milliseconds(1999));
    EXPECT_TRUE(absl::IsResourceExhausted(Place(&table).status())) << i;
    clock_.Advance(absl::Milliseconds(1));
  }
}

TEST_F(WorkerTableTest, WhereThereAreOthersASickWorkerIsLeftAlone) {
  WorkerTable table = Make();
  for (const char* p : {"p1", "p2"}) table.OnStatus(p, Status("prefill"));
  table.OnStatus("d1", Status("decode"));
  const auto places = [&](int count) {
    int on_p1 = 0;
    for (int i = 0; i < count; ++i) {
      const auto placed = Place(&table);
      if (!placed.ok()) return -1;
      const bool sick = placed->route.prefill == "p1";
      on_p1 += sick ? 1 : 0;
      table.Release(placed->prefill, sick ? Verdict::kFailed : Verdict::kGood);
      table.Release(placed->decode, Verdict::kGood);
    }
    return on_p1;
  };
  for (int i = 0; i < 5; ++i) {
    places(20);
    clock_.Advance(absl::Seconds(20));
  }
  places(20);  // it has had its trial; the next one is 16 s away or more
  clock_.Advance(absl::Seconds(10));
  EXPECT_EQ(places(20), 0);
  // Without the other one it is worth a try.
  auto loading = Status("prefill");
  loading.set_state(worker::v1::WORKER_STATE_LOADING);
  table.OnStatus("p2", loading);
  EXPECT_TRUE(Place(&table).ok());
}

TEST_F(WorkerTableTest, PromptsGoWhereTheirBlocksAre) {
  WorkerTable table = Make();
  for (const char* p : {"p1", "p2"}) table.OnStatus(p, Status("prefill"));
  table.OnStatus("d1", Status("decode"));
  table.OnKvEvents("p1", true, kKeys, {});
  const auto placed = Place(&table, 200, kKeys);
  ASSERT_TRUE(placed.ok());
  EXPECT_EQ(placed->route.prefill, "p1");
  EXPECT_EQ(placed->route.cached_tokens, 192u);
  EXPECT_EQ(metrics_->gauge(base::GaugeId::kRouterPrefixHitRatio).value(), 1);
  table.OnKvEvents("p1", false, {}, kKeys);
  EXPECT_EQ(table.Rows()[1].blocks_known, 0u);
}

// A burst with one prefix stays together before the first event comes.
TEST_F(WorkerTableTest, WhatWasSentIsExpectedToBeThereSoon) {
  WorkerTable table = Make();
  for (const char* p : {"p1", "p2"}) table.OnStatus(p, Status("prefill"));
  table.OnStatus("d1", Status("decode"));
  policy_ = *MakeRoutePolicy("prefix", {.local_prefill_tokens = 0});
  const auto first = Place(&table, 200, kKeys);
  table.OnComputed(first->prefill, 0, 200, -1);
  const auto second = Place(&table, 200, kKeys);
  EXPECT_EQ(first->route.cached_tokens, 0u);
  EXPECT_EQ(second->route.cached_tokens, 192u);
  EXPECT_EQ(second->route.prefill, first->route.prefill);
  for (const auto* placed : {&first, &second}) {
    table.Release((*placed)->prefill, Verdict::kGood);
    table.Release((*placed)->decode, Verdict::kGood);
  }
  clock_.Advance(absl::Seconds(31));
  for (const char* p : {"p1", "p2"}) table.OnStatus(p, Status("prefill"));
  table.OnStatus("d1", Status("decode"));
  EXPECT_EQ(Place(&table, 200, kKeys)->route.cached_tokens, 0u);
}

TEST_F(WorkerTableTest, WorkersComeAndGo) {
  WorkerTable table = Make();
  table.Add(WorkerRole::kDecode, "d2");
  table.Add(WorkerRole::kDecode, "d2");
  table.OnStatus("d2", Status("decode"));
  table.OnStatus("p1", Status("prefill"));
  EXPECT_EQ(Count("decode", "ready"), 1);
  const auto placed = Place(&table);
  EXPECT_EQ(placed->route.decode, "d2");
  table.OnKvEvents("d2", true, kKeys, {});
  table.Remove("d2");
  EXPECT_EQ(Count("decode", "ready"), 0);
  EXPECT_EQ(table.Rows().size(), 3u);
  EXPECT_FALSE(table.Usable().ok());
  table.Add(WorkerRole::kPrefill, "p3");  // takes the slot
  table.Release(placed->decode, Verdict::kGood);
  table.OnStatus("p3", Status("prefill"));
  EXPECT_EQ(table.Rows().size(), 4u);
  EXPECT_EQ(table.Rows()[3].blocks_known, 0u);
  table.Remove("x");
}

TEST_F(WorkerTableTest, PredictionNeedsMeasurementsAndCountsTheQueue) {
  WorkerTable table = Make();
  table.OnStatus("p1", Status("prefill"));
  table.OnStatus("d1", Status("decode"));
  EXPECT_FALSE(table.Predict({.prompt_tokens = 1000}, {}).fitted);
  for (int i = 0; i < 10; ++i) {
    const auto placed = Place(&table, 1000);
    table.OnComputed(placed->prefill, 0, 1000, 0.5);
    table.Release(placed->decode, Verdict::kGood);
  }
  auto prediction = table.Predict({.prompt_tokens = 1000}, {});
  EXPECT_TRUE(prediction.fitted);
  EXPECT_EQ(prediction.num_workers, 1);
  EXPECT_NEAR(prediction.ttft_s, 0.5, 1e-3);
  const auto running = Place(&table, 2000);
  EXPECT_TRUE(running->predicted);
  prediction = table.Predict({.prompt_tokens = 1000}, {});
  EXPECT_NEAR(prediction.ttft_s, 1.5, 1e-2);
  EXPECT_NEAR(prediction.compute_s, 0.5, 1e-3);
  clock_.Advance(absl::Milliseconds(400));
  EXPECT_NEAR(table.Predict({.prompt_tokens = 1000}, {}).ttft_s, 1.1, 1e-2);
}

TEST_F(WorkerTableTest, WorkerOfAnotherRoleOrTokenizerIsRefusedByName) {
  WorkerTable table = Make(Topology::kSingle);
  table.OnStatus("d1", Status("prefill"));
  EXPECT_NE(std::string(table.Usable().message()).find("prefill"), std::string::npos);
  auto other = Status("decode");
  other.mutable_fingerprint()->set_tokenizer("other");
  table.OnStatus("d1", other);
  EXPECT_TRUE(absl::IsFailedPrecondition(table.Usable()));
  EXPECT_NE(std::string(table.Usable().message()).find("tokenizer"), std::string::npos);
}

TEST_F(WorkerTableTest, ContextIsWhatEveryReadyWorkerTakes) {
  WorkerTable table = Make();
  EXPECT_EQ(table.max_model_len(), 0u);
  table.OnStatus("p1", Status("prefill"));
  auto shorter = Status("decode");
  shorter.set_max_model_len(512);
  table.OnStatus("d1", shorter);
  EXPECT_EQ(table.max_model_len(), 512u);
  table.OnDown("d1", absl::UnavailableError("x"));
  EXPECT_EQ(table.max_model_len(), 1024u);
}

TEST_F(WorkerTableTest, UnknownAddressesAreIgnored) {
  WorkerTable table = Make();
  table.OnStatus("x", Status("decode"));
  table.OnDown("x", absl::OkStatus());
  table.OnKvEvents("x", true, kKeys, {});
  EXPECT_EQ(table.Rows().size(), 3u);
}

}  // namespace
}  // namespace baton::router
