// SPDX-License-Identifier: Apache-2.0
#include "attention/policy_state/block_recall.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd::attention::test {
namespace {

std::vector<uint64_t> ChosenOf(const BlockChoice& choice, uint64_t end) {
  std::vector<uint64_t> chosen;
  for (uint64_t begin = 0; begin < end; ++begin) {
    if (choice.Chose(begin).value_or(false)) chosen.push_back(begin);
  }
  return chosen;
}

TEST(BlockChoice, KnowsWhatItWasChosenFrom) {
  const BlockRun searched[] = {{64, 320}, {700, 828}};
  const BlockChoice choice(64, searched, [](size_t number) { return number % 2 == 1; });
  EXPECT_EQ(choice.searched_blocks(), 6u);
  EXPECT_EQ(choice.chosen_blocks(), 3u);
  EXPECT_THAT(ChosenOf(choice, 1000), testing::ElementsAre(128, 256, 764));
  EXPECT_EQ(choice.Chose(64), false);
  for (const uint64_t none : {0u, 65u, 320u, 640u, 701u, 828u, 1000u}) {
    EXPECT_EQ(choice.Chose(none), std::nullopt) << none;
  }
  const auto count_new = [&](std::vector<BlockRun> runs) { return choice.CountNew(runs); };
  EXPECT_EQ(count_new({}), 0u);
  EXPECT_EQ(count_new({{64, 320}, {700, 828}}), 0u);
  EXPECT_EQ(count_new({{64, 192}}), 0u);
  EXPECT_EQ(count_new({{0, 384}, {700, 956}}), 4u);
  EXPECT_EQ(count_new({{65, 257}, {764, 828}}), 3u);
  EXPECT_EQ(count_new({{64, 64 + 64 * 20}}), 16u) << "what was cut at other places is new";
}

class BlockRecallTest : public testing::Test {
 protected:
  // A choice of the blocks that begin at these positions, of all below 1024.
  static void Remember(BlockRecall* recall, uint32_t head, uint64_t position,
                       const std::vector<uint64_t>& chosen) {
    const BlockRun searched[] = {{0, 1024}};
    recall->Remember(0, head, position, 64, searched, [&](size_t number) {
      return std::find(chosen.begin(), chosen.end(), 64 * number) != chosen.end();
    });
  }
  static std::vector<uint64_t> Of(const BlockRecall& recall, uint32_t head, uint64_t position) {
    const auto choice = recall.Of(0, head, position);
    return choice == nullptr ? std::vector<uint64_t>{999} : ChosenOf(*choice, 1024);
  }
};

TEST_F(BlockRecallTest, APrefixHasWhatCameBeforeIt) {
  BlockRecall recall(1, 2, [](uint64_t) { return std::make_shared<int>(); });
  EXPECT_EQ(recall.Of(0, 0, 0), nullptr);
  Remember(&recall, 1, 10, {64, 128});
  Remember(&recall, 1, 11, {0});
  const auto prefix = recall.Prefix(11);
  EXPECT_THAT(Of(*prefix, 1, 10), testing::ElementsAre(64, 128));
  EXPECT_EQ(prefix->Of(0, 1, 11), nullptr);
  EXPECT_EQ(prefix->Of(0, 0, 10), nullptr);
  // What either remembers from here on is its own.
  Remember(prefix.get(), 1, 10, {192});
  Remember(&recall, 0, 10, {256});
  Remember(&recall, 1, 12, {320});
  EXPECT_THAT(Of(*prefix, 1, 10), testing::ElementsAre(192));
  EXPECT_EQ(prefix->Of(0, 0, 10), nullptr);
  EXPECT_EQ(prefix->Of(0, 1, 12), nullptr);
  EXPECT_THAT(Of(recall, 1, 10), testing::ElementsAre(64, 128));
  EXPECT_THAT(Of(recall, 0, 10), testing::ElementsAre(256));
}

// Heads of a step remember while others fork (thread sanitizer watches): a prefix keeps what it
// had. Positions come again and again, so that there is something to copy all the time.
TEST_F(BlockRecallTest, PrefixesAreTakenWhileStepsRemember) {
  BlockRecall recall(1, 2, [](uint64_t) { return std::make_shared<int>(); });
  constexpr uint64_t kPositions = BlockRecall::kPositionsMax;
  const auto remember_all = [&recall](uint32_t head) {
    for (uint64_t position = 0; position < kPositions; ++position) {
      Remember(&recall, head, position, {64 * (position % 16)});
    }
  };
  remember_all(0);
  remember_all(1);
  std::atomic<bool> done{false};
  std::vector<std::thread> heads;
  for (uint32_t head = 0; head < 2; ++head) {
    heads.emplace_back([&, head] {
      while (!done) remember_all(head);
    });
  }
  constexpr uint64_t kLength = 40;
  uint64_t compared = 0;
  for (int i = 0; i < 20; ++i) {
    const auto prefix = recall.Prefix(kLength);
    Remember(prefix.get(), 0, kLength - 1, {});
    for (uint64_t position = 0; position < kLength; ++position) {
      const auto choice = prefix->Of(0, 1, position);
      if (choice == nullptr) continue;
      EXPECT_THAT(ChosenOf(*choice, 1024), testing::ElementsAre(64 * (position % 16)));
      ++compared;
    }
    EXPECT_THAT(Of(*prefix, 0, kLength - 1), testing::ElementsAre());
    EXPECT_EQ(prefix->Of(0, 1, kLength), nullptr);
  }
  done = true;
  for (std::thread& head : heads) head.join();
  EXPECT_EQ(compared, 20 * kLength);
}

TEST_F(BlockRecallTest, OnlyTheNewestAreKept) {
  BlockRecall recall(1, 1, [](uint64_t) { return std::make_shared<int>(); });
  for (uint64_t position = 0; position < 200; ++position) {
    Remember(&recall, 0, position, {position / 64 * 64});
  }
  const uint64_t oldest = 200 - BlockRecall::kPositionsMax;
  EXPECT_EQ(recall.Of(0, 0, oldest - 1), nullptr);
  EXPECT_THAT(Of(recall, 0, oldest), testing::ElementsAre(128));
  EXPECT_THAT(Of(recall, 0, 199), testing::ElementsAre(192));
  Remember(&recall, 0, oldest - 1, {0});
  EXPECT_EQ(recall.Of(0, 0, oldest - 1), nullptr) << "older than all that are kept";
}

// All that it holds is asked for, and given back.
TEST_F(BlockRecallTest, WhatThereIsNoMemoryForIsNotRemembered) {
  uint64_t held = 0, most = 0;
  const auto hold = [&](uint64_t bytes) -> std::shared_ptr<const void> {
    if (held + bytes > most) return nullptr;
    held += bytes;
    return {&held, [&held, bytes](const void*) { held -= bytes; }};
  };
  uint64_t remembered = 0;
  for (most = 0; most < 20000; most += 700) {
    remembered = 0;
    {
      BlockRecall recall(1, 2, hold);
      for (uint64_t position = 0; position < 100; ++position) {
        Remember(&recall, position % 2, position, {64});
        const auto prefix = recall.Prefix(position);
        Remember(prefix.get(), 0, position, {128});
        const auto choice = recall.Of(0, position % 2, position);
        if (choice != nullptr) {
          EXPECT_THAT(ChosenOf(*choice, 1024), testing::ElementsAre(64));
          ++remembered;
        }
        EXPECT_LE(held, most);
      }
    }
    EXPECT_EQ(held, 0u);
    EXPECT_TRUE(most > 0 || remembered == 0);
  }
  EXPECT_GT(remembered, 0u) << "with the most";
}

}  // namespace
}  // namespace attnd::attention::test
