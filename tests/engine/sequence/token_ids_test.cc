// SPDX-License-Identifier: Apache-2.0
//
// Goal: token ids are those that were stored, wherever pages begin and end, and their memory is of
// the budget. Method: random stores, truncations and prefixes beside a std::map.
#include "engine/sequence/token_ids.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "engine/memory_budget.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using Model = std::map<uint64_t, uint32_t>;

void StoreIds(TokenIds* ids, Model* model, uint64_t first, const std::vector<uint32_t>& values) {
  auto room = ids->MakeRoom(first, values.size());
  ASSERT_TRUE(room.ok()) << room.status();
  ids->Store(first, values, *std::move(room));
  for (size_t i = 0; i < values.size(); ++i) (*model)[first + i] = values[i];
}

// Every position up to `end` is known as in the model, or unknown.
testing::AssertionResult Same(const TokenIds& ids, const Model& model, uint64_t end) {
  for (uint64_t position = 0; position < end; ++position) {
    const auto found = model.find(position);
    const uint32_t id = found == model.end() ? 0 : found->second;
    const uint32_t one[] = {id}, other[] = {id + 1};
    if (!ids.Check(position, one).ok() ||
        ids.Check(position, other).ok() != (found == model.end())) {
      return testing::AssertionFailure() << "position " << position;
    }
  }
  return testing::AssertionSuccess();
}

void Forget(Model* model, uint64_t length) {
  model->erase(model->lower_bound(length), model->end());
}

TEST(TokenIdsTest, RandomHistories) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  MemoryBudget budget(1 << 20);
  {
    TokenIds ids(&budget);
    Model model;
    for (int step = 0; step < 200; ++step) {
      const uint64_t edge = 1024 * random.Below(5);
      const uint64_t length = random.Below(2) == 0 ? edge : random.Below(5000);
      switch (random.Below(3)) {
        case 0: {
          std::vector<uint32_t> values(random.Below(2) == 0 ? 3 : random.Below(2100));
          for (uint32_t& value : values) value = static_cast<uint32_t>(random.Below(1000));
          StoreIds(&ids, &model, length, values);
          break;
        }
        case 1:
          ids.Truncate(length);
          Forget(&model, length);
          break;
        default: {
          auto prefix = ids.Prefix(length);
          ASSERT_TRUE(prefix.ok()) << prefix.status();
          Model shorter = model;
          Forget(&shorter, length);
          ASSERT_TRUE(Same(*prefix, shorter, 7200));
        }
      }
      ASSERT_TRUE(Same(ids, model, 7200));
    }
    ids.Truncate(0);
    EXPECT_EQ(budget.used(), 0u);
  }
}

TEST(TokenIdsTest, RefusedByTheBudgetTheyChangeNothing) {
  MemoryBudget budget(10000);  // two pages
  TokenIds ids(&budget);
  Model model;
  StoreIds(&ids, &model, 1020, {1, 2, 3});
  const uint64_t used = budget.used();
  EXPECT_GE(used, 1024u * 4);
  EXPECT_EQ(ids.MakeRoom(0, 3000).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(budget.used(), used);
  EXPECT_TRUE(ids.MakeRoom(1000, 24).ok());  // there already
  EXPECT_TRUE(ids.MakeRoom(1000, 25).ok());  // and given back
  EXPECT_EQ(budget.used(), used);
  const auto more = budget.Reserve(5000, "a filler");
  EXPECT_EQ(ids.Prefix(1024).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Same(ids, model, 3000));
  EXPECT_EQ(budget.used(), used + 5000);
}

TEST(TokenIdsTest, AConflictIsNamed) {
  MemoryBudget budget(1 << 20);
  TokenIds ids(&budget);
  Model model;
  StoreIds(&ids, &model, 1022, {5, 6, 7, 8});
  const uint32_t other[] = {9, 5, 6, 1};
  EXPECT_EQ(ids.Check(1021, other),
            absl::AlreadyExistsError("token_ids[3] is 1; position 1024 has token id 7"));
}

}  // namespace
}  // namespace attnd::engine::test
