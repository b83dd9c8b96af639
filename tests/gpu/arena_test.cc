// SPDX-License-Identifier: Apache-2.0
//
// Goal: an arena hands out memory that nobody else has, all of it, and joins what comes back.
// Method: a random sequence of allocations and returns beside a plain list of what is out; its seed
// is printed.
#include "gpu/memory/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/attention/support.h"
#include "tests/gpu/fake_device.h"
#include "tests/gpu/fake_memory.h"

namespace attnd::gpu::test {
namespace {

using attention::test::Random;
using attention::test::TestSeed;
using testing::HasSubstr;

constexpr uint64_t kCapacity = 64 * Arena::kAlignment;

class ArenaTest : public testing::Test {
 protected:
  static std::unique_ptr<Arena> Make(Device* device) {
    auto arena = Arena::Create(device, "page", kCapacity);
    EXPECT_TRUE(arena.ok()) << arena.status();
    return *std::move(arena);
  }

  FakePair fake_ = MakeFakeDevice(uint64_t{1} << 20);
  std::unique_ptr<Arena> arena_ = Make(fake_.device.get());
};

TEST_F(ArenaTest, GivesAllItsMemoryAndTakesItBack) {
  for (int round = 0; round < 2; ++round) {
    std::vector<Arena::Allocation> blocks;
    for (int i = 0; i < 64; ++i) {
      auto block = arena_->Allocate(1);
      ASSERT_TRUE(block.ok()) << block.status();
      blocks.push_back(*std::move(block));
    }
    EXPECT_EQ(arena_->used(), kCapacity);
    EXPECT_EQ(arena_->Allocate(1).status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(arena_->used(), 0u);
  EXPECT_TRUE(arena_->Allocate(kCapacity).ok());
}

TEST_F(ArenaTest, SaysWhatIsFree) {
  const auto first = arena_->Allocate(16 * Arena::kAlignment);
  const auto second = arena_->Allocate(16 * Arena::kAlignment);
  auto third = arena_->Allocate(16 * Arena::kAlignment);
  ASSERT_TRUE(third.ok());
  *third = Arena::Allocation();
  const absl::Status status = arena_->Allocate(33 * Arena::kAlignment).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page arena of 16384 bytes has 8192 free"));
}

TEST_F(ArenaTest, RefusesSizesBeyondEverything) {
  for (const uint64_t bytes : {kCapacity + 1, ~uint64_t{0}, ~uint64_t{0} - 255}) {
    EXPECT_EQ(arena_->Allocate(bytes).status().code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_EQ(arena_->used(), 0u);
}

TEST_F(ArenaTest, BlocksAreAlignedApartAndCounted) {
  const uint64_t seed = TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  std::vector<Arena::Allocation> blocks;
  for (int step = 0; step < 20000; ++step) {
    if (random.Below(2) == 0 && !blocks.empty()) {
      std::swap(blocks[random.Below(blocks.size())], blocks.back());
      blocks.pop_back();
    } else {
      auto block = arena_->Allocate(1 + random.Below(12 * Arena::kAlignment));
      if (block.ok()) blocks.push_back(*std::move(block));
    }
    std::map<const std::byte*, uint64_t> out;
    uint64_t used = 0;
    for (const Arena::Allocation& block : blocks) {
      ASSERT_EQ(reinterpret_cast<uintptr_t>(block.data()) % Arena::kAlignment, 0u);
      ASSERT_TRUE(out.emplace(block.data(), block.bytes()).second);
      used += block.bytes();
    }
    ASSERT_EQ(arena_->used(), used);
    const std::byte* end = nullptr;
    for (const auto& [data, bytes] : out) {
      ASSERT_GE(data, end);
      end = data + bytes;
    }
  }
  blocks.clear();
  EXPECT_TRUE(arena_->Allocate(kCapacity).ok()) << "free ranges were not joined";
}

// An allocation that outlives its arena would point at memory that the device has taken back.
TEST(ArenaDeathTest, AnAllocationMustNotOutliveItsArena) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 20);
  const auto outlive = [&] {
    Arena::Allocation allocation;
    auto arena = Arena::Create(fake.device.get(), "page", kCapacity);
    allocation = *(*arena)->Allocate(1);
    arena->reset();
  };
  EXPECT_DEATH(outlive(), "outlives the page arena");
}

// Where no sanitizer looks on, too.
TEST(FakeMemory, KillsWhoLeavesIt) {
  constexpr size_t kBytes = 20000;
  const auto touch = [](volatile std::byte* at) { *at = std::byte{1}; };
  std::byte* const memory = TakeMemory(kBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0u);
  EXPECT_NE(memory[kBytes - 1], std::byte{0});
  touch(memory + kBytes - 1);
  EXPECT_DEATH(touch(memory + (kBytes + 255) / 256 * 256), "");
  GiveBackMemory(memory, kBytes);
  EXPECT_DEATH(touch(memory), "");
}

}  // namespace
}  // namespace attnd::gpu::test
