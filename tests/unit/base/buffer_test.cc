#include "engine/base/buffer.h"

#include <utility>

#include "gtest/gtest.h"

namespace baton::base {
namespace {

TEST(BufferTest, AdoptedMemoryIsGivenBackOnceByItsLastOwner) {
  uint8_t memory[16] = {};
  int released = 0;
  {
    Buffer first = Buffer::Adopt(memory, sizeof(memory), [&] { ++released; });
    EXPECT_EQ(first.data(), memory);
    EXPECT_EQ(first.size(), sizeof(memory));
    EXPECT_LT(first.fd(), 0);
    Buffer second = std::move(first);
    Buffer third;
    third = std::move(second);
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
}

TEST(BufferTest, AssignmentGivesBackWhatWasHeld) {
  uint8_t memory[16] = {};
  int released = 0;
  Buffer buffer = Buffer::Adopt(memory, sizeof(memory), [&] { ++released; });
  buffer = Buffer();
  EXPECT_EQ(released, 1);
  auto own = Buffer::Allocate(4096);
  ASSERT_TRUE(own.ok());
  buffer = *std::move(own);
  EXPECT_EQ(buffer.data()[4095], 0);
}

}  // namespace
}  // namespace baton::base
