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
  double Count(const char* role, const char* state) {
    return metrics_->gauge(base::GaugeId::kRouterWorkers, {role, state}).value();
  }
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

TEST_F(WorkerTableTest, SilentWorkerIsDownUntilItSpeaks) {
  WorkerTable table = Make(Topology::kSingle);
  int changes = 0;
  table.set_on_change([&] { ++changes; });
  table.OnStatus("d1", Status("decode"));
  clock_.Advance(absl::Milliseconds(2999));
  table.Sweep();
  EXPECT_TRUE(table.Usable().ok());
  clock_.Advance(absl::Milliseconds(1));
  table.Sweep();
  EXPECT_FALSE(table.Usable().ok());
  table.OnStatus("d1", Status("decode"));
  EXPECT_TRUE(table.Usable().ok());
  EXPECT_EQ(changes, 3);
  table.OnStatus("d1", Status("decode"));
  EXPECT_EQ(changes, 3) << "nothing new";
}

// Case 11.6: a restarted worker starts from nothing.
TEST_F(WorkerTableTest, NewIncarnationForgetsTheOldOnesWork) {
  WorkerTable table = Make(Topology::kSingle);
  int changes = 0;
  table.OnStatus("d1", Status("decode", "1"));
  table.AddWork("d1", 500);
  EXPECT_EQ(table.Snapshot()[0].load_tokens, 500u);
  table.set_on_change([&] { ++changes; });
  table.OnStatus("d1", Status("decode", "2"));
  EXPECT_EQ(table.Snapshot()[0].load_tokens, 0u);
  EXPECT_EQ(changes, 1);
  table.AddWork("d1", -500);
  EXPECT_EQ(table.Snapshot()[0].load_tokens, 0u) << "never below nothing";
}

TEST_F(WorkerTableTest, LoadIsWhatIsReportedOrWhatWasSentWhicheverIsMore) {
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
  table.AddWork("p1", 400);
  table.AddWork("d1", 100);
  const auto views = table.Snapshot();
  ASSERT_EQ(views.size(), 3u);
  EXPECT_EQ(views[1].address, "p1") << "the operator's order";
  EXPECT_EQ(views[1].load_tokens, 400u);
  EXPECT_EQ(views[2].load_tokens, 192u);
  EXPECT_EQ(views[2].available_blocks, 15u);
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
  table.AddWork("x", 1);
  EXPECT_EQ(table.Rows().size(), 3u);
}

}  // namespace
}  // namespace baton::router
