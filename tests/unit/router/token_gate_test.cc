#include "router/token_gate.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace baton::router {
namespace {

class TokenGateTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string folder = (std::filesystem::temp_directory_path() / "baton-tokens-XXXXXX").string();
    folder_ = mkdtemp(folder.data());
    options_.path = folder_ + "/tokens";
    options_.reload_interval = absl::Milliseconds(1);
    options_.clock = &clock_;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void Write(const std::string& text) {
    std::ofstream(options_.path + ".new") << text;
    std::filesystem::rename(options_.path + ".new", options_.path);
  }
  std::unique_ptr<TokenGate> Open() {
    auto gate = TokenGate::Create(options_);
    EXPECT_TRUE(gate.ok()) << gate.status();
    return gate.ok() ? *std::move(gate) : nullptr;
  }
  static bool Passes(TokenGate* gate, const std::string& secret) {
    return gate->Enter("Bearer " + secret, CallCost::kNothing).ok();
  }
  static bool Becomes(const std::function<bool()>& condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (!condition()) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  std::string folder_;
  TokenGateOptions options_;
  base::FakeClock clock_;
};

TEST_F(TokenGateTest, AFileThatCannotBeUsedStopsTheStart) {
  EXPECT_TRUE(absl::StrContains(TokenGate::Create(options_).status().message(), "cannot be read"));
  Write("alice\n");
  const absl::Status status = TokenGate::Create(options_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "--token-file")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "line 1")) << status;
  options_.path = folder_;
  EXPECT_FALSE(TokenGate::Create(options_).ok()) << "a folder";
}

TEST_F(TokenGateTest, AChangedFileIsTakenUp) {
  Write("a secret:0123456789abcdef\n");
  const auto gate = Open();
  EXPECT_TRUE(Passes(gate.get(), "0123456789abcdef"));
  EXPECT_FALSE(Passes(gate.get(), "abcdef0123456789"));
  Write("b secret:abcdef0123456789\n");
  EXPECT_TRUE(Becomes([&] { return Passes(gate.get(), "abcdef0123456789"); }));
  EXPECT_FALSE(Passes(gate.get(), "0123456789abcdef"));
  Write("");
  EXPECT_TRUE(Becomes([&] { return !Passes(gate.get(), "abcdef0123456789"); })) << "nobody";
}

TEST_F(TokenGateTest, ABrokenOrMissingFileChangesNothing) {
  Write("a secret:0123456789abcdef\n");
  const auto gate = Open();
  Write("what is this\n");
  // The next good file shows that the bad one has been looked at, or passed over.
  std::filesystem::remove(options_.path);
  EXPECT_TRUE(Passes(gate.get(), "0123456789abcdef"));
  Write("a secret:0123456789abcdef\nb secret:abcdef0123456789\n");
  EXPECT_TRUE(Becomes([&] { return Passes(gate.get(), "abcdef0123456789"); }));
  EXPECT_TRUE(Passes(gate.get(), "0123456789abcdef"));
}

TEST_F(TokenGateTest, APlaceIsGivenBackWithItsLastHolderAndMayOutliveTheGate) {
  Write("a secret:0123456789abcdef concurrent=1\n");
  auto gate = Open();
  auto caller = gate->Enter("Bearer 0123456789abcdef", CallCost::kAnswer);
  ASSERT_TRUE(caller.ok()) << caller.status();
  EXPECT_EQ(caller->name, "a");
  EXPECT_EQ(caller->tenant, "a");
  EXPECT_EQ(gate->Enter("Bearer 0123456789abcdef", CallCost::kAnswer).status().code(),
            absl::StatusCode::kResourceExhausted);
  std::shared_ptr<void> copy = caller->place;
  caller->place.reset();
  EXPECT_FALSE(gate->Enter("Bearer 0123456789abcdef", CallCost::kAnswer).ok());
  copy.reset();
  caller = gate->Enter("Bearer 0123456789abcdef", CallCost::kAnswer);
  EXPECT_TRUE(caller.ok()) << caller.status();
  gate.reset();
  caller->place.reset();
}

// The bucket fills by the clock that it was given.
TEST_F(TokenGateTest, RatesFollowTheClock) {
  Write("a secret:0123456789abcdef rate=1\n");
  const auto gate = Open();
  EXPECT_TRUE(gate->Enter("Bearer 0123456789abcdef", CallCost::kRequest).ok());
  EXPECT_FALSE(gate->Enter("Bearer 0123456789abcdef", CallCost::kRequest).ok());
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(gate->Enter("Bearer 0123456789abcdef", CallCost::kRequest).ok());
}

}  // namespace
}  // namespace baton::router
