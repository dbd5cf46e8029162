#pragma once

// Runs a test once in each of the engine's three schedules.

#include <string>

#include "gtest/gtest.h"
#include "tests/simt/fake_cudart.h"
#include "tests/simt/simt.h"

namespace baton::simt {

inline std::string OrderName(Order order) {
  return order == Order::kAscending    ? "ascending"
         : order == Order::kDescending ? "descending"
                                       : "random";
}

class ScheduleTest : public testing::TestWithParam<Order> {
 protected:
  void SetUp() override {
    GetConfig() = Config();
    GetConfig().order = GetParam();
    ClearDeviceError();
  }
  void TearDown() override { GetConfig() = Config(); }
};

#define BATON_INSTANTIATE_SCHEDULES(suite)                               \
  INSTANTIATE_TEST_SUITE_P(Schedules, suite, testing::ValuesIn(kOrders), \
                           [](const auto& info) { return OrderName(info.param); })

}  // namespace baton::simt
